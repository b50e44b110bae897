"""A process of a world: joins it, then does what the lines of its stdin say."""

import contextlib
import json
import os
import sys
import threading
from queue import Queue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft._jax_internals import meet, share_cached_programs, told_by
from dtft.train.world import World, broken_collective
from tests.support.cache_hits import cache_hits
from tests.support.json_lines import keep_stdout, say


def add(
    world: World, indices: list[int], turn: int, times: int, size: int = 1
) -> float:
    """Adds the indices of some processes with an all-reduce, several times.

    Each process has an array of `size` copies of its index.
    """
    mesh = Mesh(np.array(world.devices(indices, turn, 1)), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    values = np.repeat(np.asarray(indices, np.float32)[:, None], size, axis=1)
    parts = jax.make_array_from_callback(values.shape, rows, lambda at: values[at])
    program = jax.jit(lambda parts: jnp.sum(parts, axis=0), out_shardings=everywhere)
    total = parts
    for _ in range(times):
        total = program(parts).block_until_ready()
    return float(np.asarray(total.addressable_data(0))[0])


def main() -> None:
    """Joins the world of the arguments, and serves commands."""
    keep_stdout()
    index, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    share_cached_programs()
    loaded = contextlib.ExitStack().enter_context(cache_hits())
    world = World(lambda keys: say(op="keys", keys=dict(keys)))
    commands = Queue[dict[str, Any]]()
    seat = {"number": 1, "address": address, "size": size, "index": index}
    limits = {"heartbeat_s": 10.0, "start_s": 60.0, "devices": 4, "lasts": True}
    world.join(seat | limits)
    say(op="joined", number=world.number)

    def listen() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "leave":
                world.leave()
            elif command["op"] == "keys":
                world.keys.take(command["keys"])
            else:
                commands.put(command)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        command = commands.get()
        op = command.pop("op")
        try:
            if op == "meet":
                meet(command["name"], command["indices"], command["limit_s"])
                say(op="met")
            elif op == "broadcast":
                say(
                    op="told",
                    text=told_by(**command, text=f"of {index}", timeout_s=20.0),
                )
            elif op == "left":
                world.left()
                say(op="left")
            elif op == "cache":
                world.write_compilation_cache(**command)
            else:
                say(op="sum", sum=add(world, **command), loaded=len(loaded))
        except (jax.errors.JaxRuntimeError, ValueError, TimeoutError) as error:
            is_known = isinstance(error, TimeoutError) or broken_collective(error)
            say(op="broken" if is_known else "error", error=str(error))


if __name__ == "__main__":
    main()
