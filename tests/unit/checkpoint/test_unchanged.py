"""What does not change from step to step is neither written nor sent, yet restored."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.transport import push
from tests.support.memory_job import CHUNK, Job

FROZEN, ADAPTED, HOSTS = 95 * CHUNK, 5 * CHUNK, 2
"""Bytes of each host's part that stay as they are, and that change at every step."""


def state(step: int) -> dict[str, jax.Array]:
    """Divided over the hosts, so that every byte of it has to be pushed."""
    mesh = Mesh(np.array(jax.devices()[:HOSTS]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    random = np.random.default_rng(0)
    frozen = random.integers(0, 255, FROZEN * HOSTS, np.uint8)
    adapted = np.random.default_rng(step).integers(0, 255, ADAPTED * HOSTS, np.uint8)
    values = {"adapter": adapted, "frozen": frozen}
    return jax.block_until_ready(jax.device_put(values, sharding))


def layout() -> Layout:
    return Layout(
        mesh=MeshLayout(axis_names=("fsdp",), axis_sizes=(HOSTS,), slots=(0, 1)),
        leaves=tuple(
            Leaf(path=path, shape=array.shape, dtype="uint8", spec=(("fsdp",),))
            for path, array in state(0).items()
        ),
    )


def test_with_95_percent_frozen_5_percent_are_written_and_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(layout(), 2, tmp_path)
    written, sent, asked = [], [], []
    frames_of = push.frames_of

    def recording(lacks: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
        asked.append(int(sizes[lacks].sum()))
        return frames_of(lacks, sizes)

    monkeypatch.setattr(push, "frames_of", recording)
    try:
        for step in range(1, 6):
            asked.clear()
            job.save(step, state(step))
            sent.append(sum(asked))
            saved = [host.last for host in job.hosts.values() if host.last]
            written.append(sum((~one.kept).sum() for one in saved) * CHUNK)
        whole = HOSTS * (FROZEN + ADAPTED)
        assert written == sent == [whole] + [whole // 20] * 4
        job.lose("h0")
        assert not any("error" in one for one in job.carry_out(job.decide()).values())
        for path, array in state(5).items():
            parts = [job.hosts[name].own_bytes(5, path) for name in job.slots]
            assert b"".join(parts) == np.asarray(array).tobytes()
    finally:
        job.close()
