"""Shares as data: the even step's gradients for any shares, compiled once."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.config.experiment import BalanceConfig, Experiment, MeshConfig
from dtft.config.loading import parse_experiment
from dtft.config.optimizers import MaxAdaBeliefConfig, SGDConfig, SyncConfig
from dtft.data.datasets import CharsConfig
from dtft.data.rows import make_datasets
from dtft.models.base import ResNetConfig, TransformerConfig
from dtft.parallel.feed import Feed
from dtft.parallel.load_balancing.step import (
    Probe,
    SharedFeed,
    gathered,
    load_balanced_step,
    own_replicas,
)
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import Arrays, sharded_step
from tests.support.tiny_experiment import as_bytes, compilations, tiny

BALANCE = BalanceConfig(policy="exact", microbatches=8, most=6)
EVEN = (2, 2, 2, 2)
UNEVEN = [(6, 1, 1, 0), (0, 3, 4, 1), (0, 0, 2, 6)]


class Trained:
    """A load-balanced step on four replicas, and its batches."""

    def __init__(self, experiment: Experiment, mesh: MeshConfig) -> None:
        devices = jax.devices()[: mesh.replica * mesh.tensor]
        self.experiment = experiment
        self.program = load_balanced_step(experiment, make_mesh(mesh, devices))
        self.source = make_datasets(experiment.data, 0).train
        self.feed = SharedFeed(self.source, self.program, EVEN)

    def batch(self, counts: Sequence[int], step: int = 1) -> Arrays:
        self.feed.share(counts)
        return self.feed.take(step).arrays

    def after(self, counts: Sequence[int]) -> tuple[Any, Any]:
        """State and metrics after one step."""
        return self.program.step(self.program.init(), self.batch(counts))

    @cached_property
    def even(self) -> Any:
        """State and metrics after one step in equal shares."""
        return jax.device_get(self.after(EVEN))

    @cached_property
    def undivided(self) -> Any:
        """The state after the ordinary step on one device."""
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        program = sharded_step(self.experiment, mesh)
        batch = Feed(self.source, program, self.experiment.data.global_batch).take(1)
        return program.step(program.init(), batch.arrays)[0]


def _experiment(tmp_path: Path, **changes: Any) -> Experiment:
    changes.setdefault("optim", SGDConfig(learning_rate=1.0, momentum=0.0))
    return tiny(tmp_path, balance=BALANCE, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    experiment = _experiment(tmp_path_factory.mktemp("run"))
    return Trained(experiment, MeshConfig(replica=4))


def _assert_equal_but_for_rounding(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=1e-5, atol=3e-7
        ),
        *jax.device_get((found, expected)),
    )


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_any_shares_give_the_even_steps_gradient(
    trained: Trained, counts: list[int]
) -> None:
    while sum(counts) != 8:  # the nearest shares of eight microbatches
        by = 1 if sum(counts) < 8 else -1
        counts[int(np.argmin(counts) if by > 0 else np.argmax(counts))] += by
    found = trained.after(counts)
    _assert_equal_but_for_rounding(found[0]["params"], trained.undivided["params"])
    _assert_equal_but_for_rounding(found, trained.even)


def test_shares_are_data_and_equal_shares_give_equal_bits(trained: Trained) -> None:
    first = trained.after(EVEN)
    batches = [trained.batch(counts) for counts in (*UNEVEN, EVEN)]
    state = trained.program.init()
    with compilations() as found:
        jax.jit(lambda x: x + 1)(0)
        assert found
        found.clear()
        for batch in batches:
            state, _ = trained.program.step(state, batch)
    assert not found
    assert as_bytes(trained.after(EVEN)) == as_bytes(first)


@pytest.mark.more
def test_devices_of_a_replica_meet_inside_of_its_loop(tmp_path: Path) -> None:
    experiment = _experiment(
        tmp_path,
        model=TransformerConfig(context=8, width=16, num_layers=1, num_heads=2),
        data=CharsConfig(global_batch=16, context=8),
    )
    job = Trained(experiment, MeshConfig(replica=4, tensor=2))
    for counts in UNEVEN:
        state, _ = job.after(counts)
        _assert_equal_but_for_rounding(state["params"], job.undivided["params"])


def test_layers_that_normalize_see_the_same_microbatches(tmp_path: Path) -> None:
    model = ResNetConfig(depths=(1,), width=4, num_classes=10)
    job = Trained(_experiment(tmp_path, model=model), MeshConfig(replica=4))
    even = job.after(EVEN)
    for counts in UNEVEN:
        _assert_equal_but_for_rounding(job.after(counts), even)


def test_the_three_programs_of_a_probe_are_the_step(trained: Trained) -> None:
    probe = Probe(trained.program)
    probe.prepare(trained.batch(EVEN))
    for counts in (EVEN, *UNEVEN):
        batch = trained.batch(counts)
        with compilations() as found:
            probe.prepare(batch)
        state, metrics, timed = probe.step(trained.program.init(), batch)
        assert as_bytes((state, metrics)) == as_bytes(trained.after(counts))
        assert not found and len(timed.busy_s) == 4 and min(timed.busy_s) > 0


def test_replicas_meet_once_and_only_after_their_loops(trained: Trained) -> None:
    probe = Probe(trained.program)
    probe.prepare(trained.batch(EVEN))
    local, means, update = (it.as_text() for it in probe.programs)
    collective = r" (all-|reduce-scatter|collective-)[a-z-]*\("
    assert re.findall(collective, means) == ["all-"]
    assert not re.findall(collective, local + update)


def test_all_processes_learn_what_each_knows(trained: Trained) -> None:
    values = np.arange(12.0).reshape(4, 3)
    assert own_replicas(trained.program.mesh) == (0, 1, 2, 3)
    found = gathered(trained.program.mesh, values)
    np.testing.assert_array_equal(found, values[:, None])


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path)
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2), jax.devices()[:4])
    with pytest.raises(ValueError, match="mesh.fsdp=2"):
        load_balanced_step(experiment, mesh)
    optim = MaxAdaBeliefConfig(sync=SyncConfig(moments="operands"))
    with pytest.raises(ValueError, match=r"optim\.sync"):
        replace(experiment, optim=optim)
    with pytest.raises(ValueError, match=r"optim\.wire"):
        replace(parse_experiment("digits_shampoo", []), balance=experiment.balance)
    with pytest.raises(ValueError, match="--balance off"):
        replace(experiment, plan="auto")
