"""Checks that an experiment fits a cluster, and resolves the sizes of its mesh.

Checks of a single part of an experiment are in `dtft.config.experiment`. This module
does not import JAX.
"""

from dataclasses import replace
from typing import Any

from dtft.config import ConfigError, Experiment, MeshConfig
from dtft.models.base import EqualLayers
from dtft.parallel.row_assignment import sharing_of


def check_input(experiment: Experiment, **cluster: Any) -> None:
    """Runs `check_experiment`; raises its ValueError as a ConfigError.

    `cluster` has the arguments `hosts`, `devices_per_host` and `memory_tier`.

    Raises:
        ConfigError: the experiment does not fit the cluster.
    """
    try:
        check_experiment(experiment, **cluster)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def resolve_mesh(mesh: MeshConfig, hosts: int, devices_per_host: int) -> MeshConfig:
    """Replaces the size -1 of a mesh by the size that uses all devices.

    Args:
        mesh: axis sizes, at most one of which is -1.
        hosts: number of hosts.
        devices_per_host: number of devices of each host.

    Returns:
        A mesh without -1; the product of its sizes is the number of devices.

    Raises:
        ValueError: the sizes do not fit the devices.

    In the example `replica` has its default -1, and 6 devices / fsdp 2 gives 3:

    >>> resolve_mesh(MeshConfig(fsdp=2), hosts=3, devices_per_host=2)
    MeshConfig(replica=3, stage=1, fsdp=2, tensor=1)
    """
    devices, known, unknown = hosts * devices_per_host, 1, ""
    for name, value in vars(mesh).items():
        known, unknown = (known, name) if value == -1 else (known * value, unknown)
    sizes = " x ".join(f"{name}={value}" for name, value in vars(mesh).items())
    if devices % known or (not unknown and devices != known):
        raise ValueError(
            f"mesh {sizes} does not fit {devices} devices ({hosts} hosts x "
            f"{devices_per_host}). The sizes must multiply to {devices}. Change "
            "--mesh.replica, .stage, .fsdp or .tensor, or the number of hosts."
        )
    return replace(mesh, **({unknown: devices // known} if unknown else {}))


def scaled_mesh(
    experiment: Experiment, slots: int, devices_per_host: int
) -> MeshConfig:
    """Returns the config's mesh with the number of replicas that fills `slots` hosts.

    The result has no size -1.

    Args:
        experiment: the config, whose mesh is for `cluster.hosts` hosts.
        slots: the current number of hosts.
        devices_per_host: number of devices of each host.

    Raises:
        ValueError: the sizes do not fit the devices.
    """
    mesh = resolve_mesh(experiment.mesh, experiment.cluster.hosts, devices_per_host)
    return resolve_mesh(replace(mesh, replica=-1), slots, devices_per_host)


def row_parts(experiment: Experiment) -> int:
    """Returns the number by which the rows of a data slot must be divisible.

    A data slot is one of the `replica` x `fsdp` equal parts of a batch. The number is
    the least common multiple of the pipeline's microbatches and stages, or 1 without
    stages.
    """
    stages = experiment.mesh.stage
    return experiment.pipeline.row_parts(stages) if stages > 1 else 1


def check_experiment(
    experiment: Experiment,
    hosts: int | None = None,
    devices_per_host: int | None = None,
    *,
    memory_tier: bool = True,
) -> None:
    """Checks that an experiment fits a cluster.

    Args:
        experiment: the experiment to run.
        hosts: number of hosts, 1 or more; by default `cluster.hosts` of the config.
        devices_per_host: number of devices of each host, 1 or more, or -1; by default
            `cluster.devices_per_host` of the config. With -1, or if the config has a
            plan, only these are checked: that there are enough hosts for the copies of
            a checkpoint, that the model fits the data, and, with stages, that model and
            optimizer can run with stages.
        memory_tier: whether copies of checkpoints are kept in the hosts' memory.

    Raises:
        ValueError: the experiment does not fit, or a number is not allowed; the message
            says what to change.
    """
    given = {"hosts": hosts, "devices_per_host": devices_per_host}
    known = {name: value for name, value in given.items() if value is not None}
    cluster = replace(experiment.cluster, **known)  # refuses sizes such as 0
    hosts, devices_per_host = cluster.hosts, cluster.devices_per_host
    if memory_tier:
        _check_copies(experiment.checkpoint.copies, hosts)
    _check_model(experiment)
    if experiment.mesh.stage > 1:
        _check_stackable(experiment, experiment.mesh.stage)
    if devices_per_host == -1 or experiment.plan:
        return
    mesh = resolve_mesh(experiment.mesh, hosts, devices_per_host)
    experiment.optim.check_mesh(mesh.tensor)
    if memory_tier and experiment.checkpoint.share == "divided":
        _check_divided(experiment.checkpoint.copies, mesh, hosts)
    _check_batch(experiment.data.global_batch, mesh)
    if experiment.balance.policy != "off":
        sharing_of(experiment.balance, experiment.data.global_batch, vars(mesh))
    if mesh.stage > 1:
        check_stages(experiment, mesh)
    if experiment.cluster.min_replicas:
        _check_min_replicas(experiment, mesh, hosts)


def _check_copies(copies: int, hosts: int) -> None:
    if copies > hosts:
        raise ValueError(
            f"checkpoint.copies={copies} is more than the number of hosts, {hosts}: "
            f"each copy is on another host. Allowed: 1 to {hosts}. Set "
            f"--checkpoint.copies {hosts} or use more hosts."
        )


def _check_model(experiment: Experiment) -> None:
    """Checks that the model's context and number of classes suffice for the data.

    The context is the largest number of tokens of an example. A limit that the model's
    config does not have as a field is not checked.

    Raises:
        ValueError: the data has longer examples than the context, or more classes.
    """
    context = getattr(experiment.model, "context", None)
    length = experiment.data.tokens_per_example
    if context is not None and length > context:
        raise ValueError(
            f"data.context={length} is more than model.context={context}. "
            f"Set --data.context {context} or --model.context {length}."
        )
    outputs = getattr(experiment.model, "num_classes", None)
    classes = 0 if outputs is None else experiment.data.count_classes()
    if outputs is not None and classes > outputs:
        raise ValueError(
            f"model.num_classes={outputs} is less than the {classes} classes of the "
            f"data. Set --model.num_classes {classes} or more."
        )


def _check_divided(copies: int, mesh: MeshConfig, hosts: int) -> None:
    replicas = min(mesh.replica, hosts)
    if replicas < max(copies, 2):
        raise ValueError(
            f"checkpoint.share=divided has nothing to divide: hosts with "
            f"the same slices: {replicas} (mesh.replica={mesh.replica}), and "
            f"checkpoint.copies={copies} of them shall copy each. Set "
            "--checkpoint.share full, or use more replicas than copies."
        )


def _check_batch(batch: int, mesh: MeshConfig) -> None:
    parts = mesh.num_data_slots
    if batch % parts:
        larger = -(-batch // parts) * parts
        raise ValueError(
            f"data.global_batch={batch} is not divisible by {parts} (mesh.replica x "
            f"mesh.fsdp): every part of the mesh takes equally many rows. Set "
            f"--data.global_batch {larger}, or change the number of hosts."
        )


def check_stages(experiment: Experiment, mesh: MeshConfig) -> None:
    """Checks that an experiment can run on a mesh with pipeline stages.

    Args:
        experiment: the experiment to run.
        mesh: the experiment's mesh, with a number in place of the size -1.

    Raises:
        ValueError: the experiment cannot run; the message has the allowed values.
    """
    layers = _check_stackable(experiment, mesh.stage)
    if mesh.tensor > 1:
        raise ValueError(
            f"mesh.stage={mesh.stage} does not go together with mesh.tensor="
            f"{mesh.tensor}: a stage computes with whole matrices. Allowed: 1 "
            "(mesh.replica and mesh.fsdp may be more). Set --mesh.tensor 1."
        )
    experiment.pipeline.chunks(mesh.stage, layers.count)
    rows = experiment.data.global_batch // mesh.num_data_slots
    experiment.pipeline.check_rows(mesh.stage, rows)


def _check_stackable(experiment: Experiment, stages: int) -> EqualLayers:
    """Checks that model and optimizer can run with stages; returns the equal layers.

    `stages` is the number of stages, for the error message.

    Raises:
        ValueError: the model has no equal layers, or the optimizer is not elementwise
            or communicates between replicas.
    """
    layers, where = experiment.model.layers, f"mesh.stage={stages}"
    if layers is None:
        raise ValueError(
            f"{where}: the model {type(experiment.model).__name__} is not a row of "
            "equal layers that stages could share. Allowed: models whose config has "
            "`layers`, such as TransformerConfig. Set --mesh.stage 1."
        )
    optim = type(experiment.optim).__name__
    if experiment.optim.reduces_itself or not experiment.optim.is_elementwise:
        raise ValueError(
            f"{where} does not go together with the optimizer {optim}, because it "
            "looks at whole matrices or communicates by itself, and layers are "
            "stacked here. Allowed: optimizers that update each number by itself "
            "(MaxAdaBeliefConfig without optim.sync, AdamWConfig, SGDConfig). Set "
            "--mesh.stage 1."
        )
    return layers


def _check_min_replicas(experiment: Experiment, mesh: MeshConfig, hosts: int) -> None:
    """Checks that the job can shrink to `cluster.min_replicas` replicas.

    Args:
        experiment: the experiment, whose `cluster.min_replicas` is above 0.
        mesh: the experiment's mesh, with a number in place of the size -1.
        hosts: number of hosts of `mesh`.

    Raises:
        ValueError: the job cannot shrink to this number; the message lists the allowed
            numbers. Or, with load balancing, so few replicas cannot take all
            microbatches.
    """
    least, batch = experiment.cluster.min_replicas, experiment.data.global_batch
    parts = mesh.fsdp * row_parts(experiment)
    fitting = [
        replicas
        for replicas in range(1, mesh.replica + 1)
        if replicas * hosts % mesh.replica == 0 and batch % (replicas * parts) == 0
    ]
    if least not in fitting:
        raise ValueError(
            f"--min-replicas {least} (cluster.min_replicas) is not a size that this "
            f"job can shrink to: whole hosts of the {hosts}, at most {mesh.replica} "
            f"replicas, and equal parts of data.global_batch={batch} rows. Allowed: "
            f"{', '.join(map(str, fitting))}, or 0 to wait for a host."
        )
    if experiment.balance.policy != "off":
        sharing_of(experiment.balance, batch, vars(replace(mesh, replica=least)))
