"""One of two hosts on which `orbax_defects.py` brings a defect of Orbax about.

Arguments: RANK NUM_PROCESSES ADDRESS CASE DIRECTORY. Host 0 loses its memory, host 1 is
the peer. It answers with {"defect": bool, "seen": what Orbax did}.
"""

import json
import logging
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental.emergency.p2p import (
    args,
    checkpoint_manager,
    options,
)

from experiments import worlds

Seen = tuple[bool, str]
State = dict[str, jax.Array]


class Host:
    """This process's part of a job that Orbax checkpoints."""

    def __init__(self, rank: int, directory: Path) -> None:
        """Knows its place; opens nothing."""
        self.rank, self.directory = rank, directory
        self.local = directory / f"host{rank}"
        self.storage = directory / "storage"
        self.local.mkdir(exist_ok=True)
        self.storage.mkdir(exist_ok=True)
        devices = np.array(jax.devices()).reshape(2, 1)
        self.mesh = Mesh(devices, ("replica", "model"))

    def place(self, value: np.ndarray, *spec: str) -> jax.Array:
        """A global array, replicated or divided."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index]
        )

    def open(self, state: State, *, storage: bool = False) -> Any:
        """Orbax's manager: every step in memory, every fourth in storage."""
        self._abstract = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in state.items()
        }
        # No case saves more steps. Orbax deletes older ones in a thread, and `reload`
        # raises ValueError if a step vanishes while it is listed.
        every = options.CheckpointManagerOptions(
            local=options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=8),
            persistent=options.PersistentCheckpointOptions(save_interval_steps=4),
            replica_axis_index=0,
        )
        where = {"persistent_directory": self.storage} if storage else {}
        self.manager = checkpoint_manager.CheckpointManager(
            self.mesh, self._abstract, self.local, options=every, **where
        )
        return self.manager

    def save(self, step: int, state: State) -> None:
        """Saves and waits."""
        wanted = args.Composite(state=ocp.args.PyTreeSave(state))
        self.manager.save(step, args=wanted)
        self.manager.wait_until_finished()
        sync_global_devices(f"saved {step}")

    def lose(self, rank: int, step: int) -> None:
        """One host loses a step."""
        if self.rank == rank:
            shutil.rmtree(self.local / str(step))
        sync_global_devices(f"lost {rank} {step}")

    def restore(self, step: int | None, state: State) -> tuple[str, bool]:
        """What came of a restore, in words, and whether the bits are right."""
        wanted = args.Composite(state=ocp.args.PyTreeRestore(self._abstract))
        try:
            composite = self.manager.restore(step, args=wanted)
        except Exception as error:
            text = str(error).replace(str(self.directory), "DIR").partition("\n")[0]
            return f"raised {type(error).__name__}: {text[:100]}", False
        if composite is None:
            return "returned None", False
        found = composite["state"]
        same = all(_bits(found[path]) == _bits(state[path]) for path in state)
        return f"returned normally, {'right' if same else 'wrong'} values", same


def silent_corruption(host: Host) -> Seen:
    """64 bytes of the peer's file are overwritten; the restore must not succeed."""
    values = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    state = {"w": host.place(values)}
    host.open(state)
    host.save(1, state)
    host.lose(0, 1)
    if host.rank == 1:
        files = [path for path in host.local.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        with open(largest, "r+b") as file:
            file.seek(largest.stat().st_size // 2)
            file.write(b"\xff" * 64)
    sync_global_devices("damaged")
    host.manager.reload()
    seen, _ = host.restore(1, state)
    return seen == "returned normally, wrong values", seen


def fallback(host: Host) -> Seen:
    """Memory loses step 5 after the plan; steps 4 in memory and storage are whole."""

    def made(step: int) -> State:
        return {"w": host.place(np.full((64, 64), step, np.float32))}

    host.open(made(0), storage=True)
    for step in range(1, 6):
        host.save(step, made(step))
    host.lose(0, 5)
    host.manager.reload()
    planned = host.manager.latest_step()
    sync_global_devices("planned")
    host.lose(1, 5)
    seen, _ = host.restore(None, made(4))
    stored = sorted(path.name for path in host.storage.iterdir())
    return seen.startswith("raised"), f"plan {planned}, storage has {stored}: {seen}"


def zero_loss(host: Host) -> Seen:
    """Half of the optimizer state was on the lost host only."""
    state = {
        "w": host.place(np.full(64, 7, np.float32)),
        "mu": host.place(np.arange(1, 129, dtype=np.float32), "replica"),
    }
    host.open(state)
    host.save(1, state)
    host.lose(0, 1)
    host.manager.reload()
    step = host.manager.latest_step()
    seen, same = host.restore(1, state)
    return step == 1 and not same, f"latest_step() is {step}, restore {seen}"


def negative_zero(host: Host) -> Seen:
    """One replica's values are broadcast to the other."""
    from orbax.checkpoint._src.multihost import multislice

    want = np.array([-0.0, 1.5, -2.0, np.inf], np.float32)
    mine = [d for d in jax.devices() if d.process_index == host.rank]
    here = NamedSharding(
        Mesh(np.array(mine).reshape(1, 1), ("replica", "model")), PartitionSpec("model")
    )
    own = jax.device_put(want if host.rank == 0 else np.zeros_like(want), here)
    (got,), _ = multislice.broadcast_one_replica_to_all(
        (own,), host.mesh, 0, host.rank == 0, memory_limit_bytes=1 << 30
    )
    bits = np.asarray(got.addressable_data(0)).view(np.uint32)
    return bits[0] != 0x80000000, f"0x80000000 (-0.0) arrived as {int(bits[0]):#x}"


def no_authentication(host: Host) -> Seen:
    """A stranger on the network, with a plain socket, asks for a step's files."""
    state = {"w": host.place(np.full((64, 64), 7, np.float32))}
    manager = host.open(state)
    host.save(1, state)
    node = manager._p2p._p2p_node  # only to learn the port, which a scan would find
    bound = node.server.server_address[0]
    files = _ask(node.port, 1, {"step": 1, "process_index": host.rank})
    stolen = sum(
        len(_ask(node.port, 2, {"rel_path": file["rel_path"]}))
        for file in json.loads(files)
    )
    return stolen > 0, f"listens on {bound}, gave a stranger {stolen} bytes"


def _ask(port: int, op: int, payload: dict[str, Any]) -> bytes:
    """One request in Orbax's protocol; the answer without its header."""
    body = json.dumps(payload).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(struct.pack("!BI", op, len(body)) + body)
        heard = b""
        while part := connection.recv(1 << 16):
            heard += part
    return heard[5:] if op == 1 else heard[13:]


def _bits(array: jax.Array) -> bytes:
    return np.asarray(array.addressable_data(0)).tobytes()


CASES: dict[str, Callable[[Host], Seen]] = {
    "silent corruption": silent_corruption,
    "fallback": fallback,
    "ZeRO loss": zero_loss,
    "-0.0": negative_zero,
    "no authentication": no_authentication,
}


def main(rank: int, num: int, address: str, case: str, directory: str) -> None:
    """Joins, brings the defect about, answers."""
    logging.getLogger("absl").setLevel(logging.FATAL)
    worlds.join(rank, num, address)
    defect, seen = CASES[case](Host(rank, Path(directory)))
    worlds.answer({"defect": bool(defect), "seen": seen})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
