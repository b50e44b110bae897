"""Balance in the loop: shares follow speeds, are recorded, and are replayed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtft.balance.balance import Balance, Rules
from dtft.balance.load_shares import Microbatches
from dtft.config.experiment import BalanceConfig, Experiment, MeshConfig, StopConfig
from dtft.data.rows import make_datasets
from dtft.parallel.load_balancing.balance_log import (
    BalanceLog,
    Begin,
    Cost,
    begin_balance,
    node_names,
    round_line,
    to_items,
)
from dtft.parallel.load_balancing.balancer import Balancer
from dtft.parallel.load_balancing.step import (
    Probe,
    TimedStep,
    load_balanced_step,
    shared_by,
)
from dtft.parallel.row_assignment import COUNTS
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import TrainStep
from dtft.train.loop import run, train_step_of
from tests.support.tiny_experiment import MemoryRuntime, as_bytes, compilations, tiny

BALANCE = BalanceConfig(policy="exact", microbatches=16, every=3, probes=2)
EXACT = Rules()
SPEEDS = (4.0, 2.0, 1.0, 1.0)
BEST = [8, 4, 2, 2]
WORK = Microbatches(num_nodes=4, total=16, cap=(12,) * 4)
NAMES = ("a", "b", "c", "d")


class Unlike:
    """Times of replicas with known speeds, beside real steps."""

    def __init__(self, program: TrainStep, speeds: Sequence[float] = SPEEDS) -> None:
        self._program, self._speeds = program, np.asarray(speeds)
        self._random = np.random.default_rng(0)

    def prepare(self, batch: Mapping[str, jax.Array]) -> None:
        del batch

    def idle_at(self, state: Any) -> float:
        del state
        return -1.0

    def step(
        self, state: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Any, Any, TimedStep]:
        busy = np.asarray(batch[COUNTS]) / self._speeds
        busy = busy * (1 + 0.01 * self._random.standard_normal(4))
        state, metrics = self._program.step(state, batch)
        times = tuple(busy.tolist())
        return state, metrics, TimedStep(began=0.0, ended=max(times), busy_s=times)


class Job:
    """A program on four replicas, run by hand."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        mesh = make_mesh(MeshConfig(replica=4), jax.devices()[:4])
        self.program = load_balanced_step(experiment, mesh)
        self.work = shared_by(self.program).sharing.work
        self.source = make_datasets(experiment.data, 0).train
        self.folder = folder

    def balancer(
        self, items: dict[str, Any], names: Sequence[str] = NAMES, **options: Any
    ) -> Balancer:
        made: Begin = begin_balance(EXACT, self.work, names, items)
        log = BalanceLog(self.folder, {}, names, leading=True)
        return Balancer(
            *(self.program, self.source, options.get("config", BALANCE)),
            *(made, names, log),
            step=items.get("step", 0),
            timing=options.get("timing", Unlike(self.program)),
        )

    def run(
        self, balancer: Balancer, state: Any, steps: Sequence[int]
    ) -> tuple[Any, list[int], list[list[int]]]:
        """The state after these steps, the rows used, the shares of each step."""
        rows, shares = [], []
        for step in steps:
            batch = balancer.feed.take(step)
            rows += batch.rows
            shares.append(np.asarray(batch.arrays[COUNTS]).tolist())
            balancer.prepare(batch.arrays)
            state, _ = balancer.step(state, batch.arrays)
            balancer.feed.prepare(step + 1)
        return state, rows, shares


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("run")
    return Job(tiny(folder, balance=BALANCE), folder)


def _records(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(it) for it in (folder / "balance.jsonl").read_text().splitlines()
    ]


def test_shares_follow_speeds_and_every_row_is_used_once(job: Job) -> None:
    balancer = job.balancer({})
    _, rows, shares = job.run(balancer, job.program.init(), range(1, 16))
    assert sorted(rows) == list(range(15 * 16))
    assert shares[0] == [4] * 4 and shares[-1] == BEST
    assert [i for i in range(1, 15) if shares[i] != shares[i - 1]] == [3]
    assert balancer.balance.settled
    lines = _records(job.folder)[-5:]
    assert [line["next"] for line in lines] == [BEST] * 5
    assert (
        lines[0]["max_wait_ms"] > 10 * lines[1]["max_wait_ms"] and lines[-1]["settled"]
    )


def test_recorded_shares_are_replayed_bit_for_bit(job: Job) -> None:
    whole = job.balancer({})
    expected, _, shares = job.run(whole, job.program.init(), range(1, 11))
    first = job.balancer({})
    state, _, _ = job.run(first, job.program.init(), range(1, 8))
    items = json.loads(json.dumps({"step": 7, **first.items}))
    again = job.balancer(items)
    assert again.items == first.items
    found, rows, replayed = job.run(again, state, range(8, 11))
    assert replayed == shares[7:] and sorted(rows) == list(range(7 * 16, 10 * 16))
    assert as_bytes(found) == as_bytes(expected)


def test_shares_of_an_older_commit_are_replayed_without_what_was_learned(
    job: Job,
) -> None:
    first = job.balancer({})
    job.run(first, job.program.init(), range(1, 8))
    older = {name: it for name, it in first.items["balance"].items() if name != "tried"}
    made = begin_balance(EXACT, job.work, NAMES, {"balance": older})
    assert made.is_recorded and made.unknown == NAMES
    assert made.balance.division.tolist() == older["shares"]


def test_a_replaced_host_opens_the_search_again(job: Job) -> None:
    first = job.balancer({})
    state, _, _ = job.run(first, job.program.init(), range(1, 19))
    assert first.balance.settled
    slower = Unlike(job.program, (1.0, 2.0, 1.0, 1.0))
    items = {"step": 18, **first.items}
    again = job.balancer(items, ("spare", *NAMES[1:]), timing=slower)
    assert not again.balance.settled
    assert (
        _records(job.folder)[-1] | {"shares": BEST, "recorded": True}
        == (_records(job.folder)[-1])
    )
    assert _records(job.folder)[-1]["unknown"] == ["spare"]
    _, rows, shares = job.run(again, state, range(19, 31))
    assert shares[:3] == [BEST] * 3 and sorted(rows) == list(range(18 * 16, 30 * 16))
    assert shares[-1] == WORK.best(np.array([1, 1 / 2, 1, 1])).tolist()
    assert again.balance.settled


def _known(policy: Any = "exact") -> Balance[Any]:
    balance = Balance.begin(WORK, Rules(policy=policy))
    for _ in range(6):
        busy = balance.division / np.asarray(SPEEDS)
        balance = balance.after(np.tile(busy, (3, 1)))
    return balance


def test_a_record_is_json_and_says_all() -> None:
    balance = _known()
    items = json.loads(json.dumps(to_items(balance, NAMES)))
    made = begin_balance(EXACT, WORK, NAMES, items)
    assert made.is_recorded and not made.unknown
    assert to_items(made.balance, NAMES) == to_items(balance, NAMES)
    assert made.balance.settled


@pytest.mark.parametrize("policy", ["exact", "proportional"])
def test_another_number_of_nodes_begins_with_what_is_known(policy: Any) -> None:
    items = to_items(_known(policy), NAMES)
    five = Microbatches(num_nodes=5, total=16, cap=(12,) * 5)
    made = begin_balance(Rules(policy=policy), five, (*NAMES, "new"), items)
    assert not made.is_recorded and made.unknown == ("new",)
    assert made.balance.division.sum() == 16 and not made.balance.settled
    speeds = made.balance.tried.speeds()
    best = five.best(speeds.unit_s, speeds.fixed_s)
    assert np.array_equal(made.balance.division, best) is (policy == "exact")


def test_other_microbatches_or_none_begin_anew() -> None:
    items = to_items(_known(), NAMES)
    other = Microbatches(num_nodes=4, total=32, cap=(12,) * 4)
    for made in (
        begin_balance(EXACT, other, NAMES, items),
        begin_balance(EXACT, other, NAMES, {}),
    ):
        assert not made.is_recorded and made.unknown == NAMES
        assert made.balance.division.tolist() == [8] * 4
    smaller = replace(WORK, cap=(6,) * 4)
    made = begin_balance(EXACT, smaller, NAMES, items)
    assert not made.is_recorded and made.balance.division.max() == 6


def test_another_policy_goes_on_with_the_shares_but_is_open() -> None:
    made = begin_balance(
        Rules(policy="proportional"), WORK, NAMES, to_items(_known(), NAMES)
    )
    assert made.is_recorded and made.balance.division.tolist() == BEST
    assert not made.balance.settled and made.balance.rules.policy == "proportional"


def test_nodes_have_names() -> None:
    assert node_names([["x.y"], ["x.y"], ["x", "z"]]) == ("x.y", "x.y.1", "x+z")
    assert node_names([["d"], ["d.1"], ["d"]]) == ("d", "d.1", "d.2")


def test_a_probe_times_every_replica(job: Job) -> None:
    balancer = job.balancer({}, timing=Probe(job.program))
    state, _, _ = job.run(balancer, job.program.init(), range(1, 4))
    record = _records(job.folder)[-1]
    assert len(record["busy_ms"]) == 4 and min(record["busy_ms"]) > 0
    assert record["probe_ms"] > 0
    assert record["step_ms"] is None  # but for the first step all were measured
    job.run(balancer, state, range(4, 7))
    assert _records(job.folder)[-1]["step_ms"] > 0


def test_only_the_first_step_compiles_and_round_1_tells_its_cost(job: Job) -> None:
    config = replace(BALANCE, every=4)
    balancer = job.balancer({}, timing=Probe(job.program), config=config)
    state, _, _ = job.run(balancer, job.program.init(), [1])
    with compilations() as found:
        job.run(balancer, state, range(2, 5))
    assert not found
    record = _records(job.folder)[-1]
    assert record["round"] == 1 and record["step_ms"] > 0
    assert record["cost"] is not None


def test_a_round_says_why_shares_stay_and_who_changed() -> None:
    before, busy = _known(), BEST / np.asarray(SPEEDS)
    cost = Cost(step_s=1.0, probe_s=1.1, probes=2, steps=4)

    def line(speeds: Sequence[float], **changes: Any) -> str:
        after = before.after(np.tile(BEST / np.asarray(speeds), (3, 1)))
        assert after.judgement is not None
        judged = replace(after.judgement, **changes)
        after = replace(after, judgement=judged)
        rows = np.tile(busy, (3, 1))
        return round_line(8, before, after, rows, cost, NAMES)

    assert line(SPEEDS).endswith(": settled, these are the best for the times known")
    noisy = line(SPEEDS, gain=0.031, threshold=0.062)
    assert noisy.endswith(": settled, gain 3.1% below 6.2% (noise)")
    assert "below 1.0% (least gain)" in line(SPEEDS, gain=0.005, threshold=0.01)
    assert "another speed: b, measuring costs 5.0%" in line((4.0, 0.5, 1.0, 1.0))


def test_all_programs_are_compiled_before_peers_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that runs collectives waits for one that still compiles only so long
    as the collectives allow."""
    found: list[str] = []

    class Recording(MemoryRuntime):
        def compile(self, train_step: TrainStep, batch: Mapping[str, Any]) -> None:
            super().compile(train_step, batch)
            found.append("step compiled")

        def await_peers(self) -> None:
            found.append("await_peers")

        def dispatched(self, step: int) -> None:
            found.append(f"step {step}")

    class Prepared(Probe):
        def prepare(self, batch: Mapping[str, Any]) -> None:
            super().prepare(batch)
            found.append("timed step compiled")

    monkeypatch.setattr("dtft.parallel.load_balancing.balancer.Probe", Prepared)
    experiment = tiny(tmp_path, balance=BALANCE, stop=StopConfig(steps=1))
    run(experiment, Recording(tmp_path, num_devices=4))
    assert sorted(found[:2]) == ["step compiled", "timed step compiled"]
    assert found[2:] == ["await_peers", "step 1"]


def test_the_loop_balances_records_and_resumes(tmp_path: Path) -> None:
    experiment = tiny(
        tmp_path, balance=BALANCE, stop=StopConfig(steps=6), mesh=MeshConfig()
    )
    runtime = MemoryRuntime(tmp_path, num_devices=4)
    result = run(experiment, runtime)
    assert result.step == 6 and result.summary["completed"]
    state, items = runtime.saved[4]
    assert sum(items["balance"]["shares"]) == 16
    later = MemoryRuntime(tmp_path, num_devices=4, restored=(4, state, items))
    run(experiment, later)
    began = [it for it in _records(tmp_path) if it["event"] == "begin"]
    assert [it["step"] for it in began] == [0, 4]
    assert began[1]["shares"] == items["balance"]["shares"] and began[1]["recorded"]
    balanced = train_step_of(experiment, MemoryRuntime(tmp_path, num_devices=4))
    assert shared_by(balanced).sharing.num_replicas == 4
