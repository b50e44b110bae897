"""The program of an experiment whose mesh has stages.

The state, what is logged and the update are those of `step.Program`, but layers are
stacked [stages, chunks, layers of a chunk, ...] and divided over `stage`, each with its
optimizer state. Before and after the layers `stage` is one more axis that divides the
data: parameters there rest divided over it and are gathered for use, and the rows that
leave the last stage are shared out, so that no stage waits for another's loss. Must not
know when which stage works (`pipelined`), hosts, checkpoints or the loop.
"""

import functools
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.train.experiment import Experiment, MeshConfig
from dtft.train.fitting import check_stages
from dtft.train.pipelined import (
    AXIS,
    Pipeline,
    own_part,
    shared_out,
    stack,
    through_layers,
)
from dtft.train.step import BATCH_AXES, Metrics, Program, State, spec_of

_ENDS = (AXIS, "fsdp")
"""Axes over which parameters before and after the layers rest divided."""


class PipelinedProgram(Program):
    """Init, step and evaluation of an experiment on a mesh with stages."""

    def __init__(self, experiment: Experiment, mesh: Mesh) -> None:
        """Traces the model; allocates nothing.

        Args:
            experiment: what is to run.
            mesh: of `step.make_mesh`, with several stages.

        Raises:
            ValueError: something of the experiment does not go together with stages,
                or the model's layers are not equal, or not all it has.
        """
        check_stages(experiment, MeshConfig(**mesh.shape))
        layers = experiment.model.layers
        assert layers is not None  # was checked
        stages = mesh.shape[AXIS]
        self._name, self._num_layers = layers.name, layers.count
        self._pipeline = Pipeline(
            stages=stages,
            microbatches=experiment.pipeline.microbatches,
            layers=experiment.pipeline.chunks(stages, layers.count),
        )
        super().__init__(experiment, mesh)

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers; padding is not trained."""
        params = self._plain["params"]
        stacked = sum(leaf.size for leaf in jax.tree.leaves(params[self._name]))
        padded = self._pipeline.places_SCL.size
        unused = stacked // padded * (padded - self._num_layers)
        return super().num_parameters - unused

    def _trace_model(self) -> Any:
        super()._trace_model()  # refuses what no program can run
        model = nnx.eval_shape(lambda: self._model.build(nnx.Rngs(self._seed)))
        graphs = [nnx.split(layer) for layer in getattr(model, self._name)]
        kinds = {(graph, _shapes(params)) for graph, params in graphs}
        kind = type(self._model).__name__
        if len(kinds) != 1 or len(graphs) != self._num_layers:
            raise ValueError(
                f"model {kind}: its {len(graphs)} {self._name} are not the "
                f"{self._num_layers} equal layers that its config names. Allowed: "
                "layers of one class, with parameters of the same shapes. Set "
                "--mesh.stage 1."
            )
        if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
            raise ValueError(
                f"model {kind} keeps running statistics, which microbatches would "
                "change one after another. Allowed: models without. Set --mesh.stage 1."
            )
        self._layer = graphs[0][0]
        setattr(model, self._name, nnx.List([]))
        return nnx.split(model)[0]

    def _arranged(self, params: Any) -> Any:
        layers = params[self._name]
        in_order = [layers[number] for number in sorted(layers)]
        return params | {self._name: stack(self._pipeline, in_order)}

    def _shardings(self, abstract: State) -> State:
        fsdp = self.mesh.shape["fsdp"]

        def of(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            if any(getattr(key, "key", None) == self._name for key in path):
                spec = (AXIS, None, None, *spec_of(leaf.shape[3:], fsdp, 1))
            else:
                parts = spec_of(leaf.shape, fsdp * self._pipeline.stages, 1)
                spec = (_ENDS if part == "fsdp" else part for part in parts)
            return NamedSharding(self.mesh, PartitionSpec(*spec))

        return jax.tree_util.tree_map_with_path(of, abstract)

    def _losses(
        self, read: State, batch: dict[str, jax.Array], *, training: bool
    ) -> tuple[Metrics, Any]:
        ends = dict(read["params"])
        layers = ends.pop(self._name)
        ran = jax.shard_map(
            functools.partial(self._on_a_stage, training=training),
            mesh=self.mesh,
            in_specs=(PartitionSpec(AXIS), PartitionSpec(), PartitionSpec(BATCH_AXES)),
            out_specs=PartitionSpec((*BATCH_AXES, AXIS)),
        )
        return ran(layers, ends, batch), read["statistics"]

    def _on_a_stage(
        self, layers_SCL: Any, ends: Any, batch: dict[str, jax.Array], training: bool
    ) -> Metrics:
        """Losses and metrics of the rows that this stage is given at the end."""

        def mode(model: Any) -> Any:
            (model.train if training else model.eval)()
            return model

        # Marked as different on each device before anything is computed: gradients are
        # then added up over the data axes once, after all ticks, not at each of them.
        layers_CL = jax.tree.map(lambda leaf: leaf[0], _varying(layers_SCL, BATCH_AXES))
        ends = _varying(ends, (*BATCH_AXES, AXIS))
        batch = _varying(batch, (AXIS,))
        model = mode(nnx.merge(self._graph, ends))
        rows_B = self._model.before_layers(model, batch)
        rows_B = through_layers(
            self._pipeline,
            lambda params, rows: mode(nnx.merge(self._layer, params))(rows),
            layers_CL,
            rows_B,
        )
        rows_B = shared_out(self._pipeline, rows_B)
        batch = {name: own_part(self._pipeline, it) for name, it in batch.items()}
        losses, metrics = self._model.after_layers(model, rows_B, batch)
        return {"loss": losses, **metrics}


def _varying(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), tree)


def _shapes(params: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params))
