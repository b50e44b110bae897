"""One process of a user's own jax.distributed job: stock Flax and optax, no trainer.

``python -m tests.drills.stock_job DIRECTORY COORDINATOR PROCESSES INDEX STEPS [MODE]``.
Writes a digest of what this process has after every step to DIRECTORY/digests, and one
line of JSON about what it restored to stdout. MODE "hang" stays after the last step
instead of closing; "turned" divides matrices by columns, over the processes from the
last one on.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dtft.checkpoint import ReplicatedCheckpointManager, ReplicatedOptions
from tests.support.json_lines import keep_stdout, say

STORAGE_INTERVAL = 10


def digest(state: Any) -> str:
    """Of the bytes that this process has."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            leaf = jax.random.key_data(leaf) if key else leaf
            for shard in leaf.addressable_shards:
                total.update(repr(shard.index).encode())
                total.update(np.asarray(shard.data).tobytes())
        else:
            total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def leaf_digests(state: Any) -> list[str]:
    """Of every leaf, in no order."""
    return sorted(map(digest, jax.tree.leaves(state)))


def whole_digests(state: Any, mesh: jax.sharding.Mesh) -> list[str]:
    """Of every leaf, all of it, however it is divided."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return [
        digest(
            jax.jit(lambda it: it, out_shardings=everywhere)(leaf)
            if isinstance(leaf, jax.Array)
            else leaf
        )
        for leaf in jax.tree.leaves(state)
    ]


def placed(state: Any, mesh: jax.sharding.Mesh, turned: bool) -> Any:
    """Matrices divided over the processes, the rest on every one of them."""

    def put(leaf: jax.Array) -> jax.Array:
        rows, columns = PartitionSpec("data"), PartitionSpec(None, "data")
        divided = columns if turned else rows
        spec = divided if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, state)


def make(mesh: jax.sharding.Mesh, turned: bool) -> tuple[Any, Any]:
    model = nnx.Linear(12, 6, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.adam(1e-2, mu_dtype="bfloat16"), wrt=nnx.Param
    )
    graph, state = nnx.split((model, optimizer))

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, key: jax.Array, x: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        key, noise = jax.random.split(key)
        x = x + 0.01 * jax.random.normal(noise, x.shape)
        grads = nnx.grad(lambda m: jnp.mean((m(x) - x[:, :6]) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), key

    return placed(state, mesh, turned), train_step


def main(
    directory: Path, coordinator: str, processes: int, index: int, steps: int, mode: str
) -> None:
    keep_stdout()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, processes, index, heartbeat_timeout_seconds=10
    )
    automatic = (jax.sharding.AxisType.Auto,)
    turned = mode == "turned"
    devices = jax.devices()[:: -1 if turned else 1]
    mesh = jax.make_mesh((processes,), ("data",), automatic, devices=devices)
    state, train_step = make(mesh, turned)
    everywhere = NamedSharding(mesh, PartitionSpec())
    key = jax.jit(lambda: jax.random.key(1), out_shardings=everywhere)()
    tree = {"state": state, "key": key, "seen": 0, "table": np.arange(3, dtype="int64")}
    options = ReplicatedOptions(storage_interval_steps=STORAGE_INTERVAL)
    manager = ReplicatedCheckpointManager(directory / "steps", options=options)
    found: dict[str, Any] = {"index": index, "restored": None}
    start = 0
    if (latest := manager.latest_step()) is not None:
        tree = manager.restore(latest, args=ocp.args.StandardRestore(tree))
        start = latest + 1
        found |= {"restored": latest, "digest": digest(tree), "seen": tree["seen"]}
        found["whole"] = whole_digests(tree, mesh)
        if not turned:
            bare = manager.restore(latest)  # onto the shardings that it had
            found["bare"] = leaf_digests(bare) == leaf_digests(tree)
    say(**found)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    for step in range(start, start + steps):
        numbers = np.random.default_rng(step).normal(size=(6, 12)).astype(np.float32)
        x = jax.make_array_from_callback((6, 12), rows, numbers.__getitem__)
        state, key = train_step(tree["state"], tree["key"], x)
        tree = tree | {"state": state, "key": key, "seen": tree["seen"] + 6}
        jax.block_until_ready(state)
        (directory / "digests" / f"{step}.{index}").write_text(digest(tree))
        manager.save(step, args=ocp.args.StandardSave(tree))
    if mode == "hang":
        manager.wait_until_finished()
        (directory / "digests" / f"whole.{index}").write_text(
            json.dumps(whole_digests(tree, mesh))
        )
        say(index=index, waits=True)
        time.sleep(600)
    manager.close()
    say(index=index, closed=True)


if __name__ == "__main__":
    where, coordinator, processes, index, steps, *rest = sys.argv[1:]
    main(
        Path(where),
        coordinator,
        int(processes),
        int(index),
        int(steps),
        rest[0] if rest else "",
    )
