"""Divided shares: enough copies at every turn, even work, and nobody goes unseen."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.replication.commit import Divergence, StepTracker
from dtft.checkpoint.replication.copy_placement import Shares, place_copies
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout, Slice
from dtft.elastic.leader.recovery import RecoveryReport
from dtft.elastic.transfer.restore_executor import borrow
from tests.support.memory_job import Job

leaves = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([(), (("fsdp",),), (("replica",),)])),
    min_size=1,
    max_size=6,
)


def layout(replica: int, fsdp: int, found: list) -> Layout:
    axes = {"replica": replica, "fsdp": fsdp}
    return Layout(
        mesh=MeshLayout(
            axis_names=tuple(axes),
            axis_sizes=tuple(axes.values()),
            slots=tuple(range(replica * fsdp)),
        ),
        leaves=tuple(
            Leaf(path=f"p{i}", shape=(size * replica * fsdp,), dtype="int8", spec=spec)
            for i, (size, spec) in enumerate(found)
        ),
    )


def copiers(state: Layout, shares: Shares, turn: int) -> dict[Slice, set[int]]:
    found: dict[Slice, set[int]] = {piece: set() for piece in state.owners}
    for slot in range(state.mesh.num_slots):
        for piece, copied in zip(
            state.slices(slot), shares.of(slot, turn), strict=True
        ):
            if copied:
                found[piece].add(slot)
    return found


@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), leaves, st.integers(0, 50)
)
@settings(deadline=None, max_examples=60)
def test_every_slice_is_in_enough_domains_at_every_turn(
    replica: int, fsdp: int, copies: int, found: list, turn: int
) -> None:
    state = layout(replica, fsdp, found)
    domains = [f"rack{slot % 4}" for slot in range(state.mesh.num_slots)]
    placement = place_copies(state, copies, domains)
    shares = Shares(state, copies, domains)
    seen: dict[Slice, set[int]] = {piece: set() for piece in state.owners}
    for now in range(turn, turn + -(-replica * fsdp // copies)):
        for piece, slots in copiers(state, shares, now).items():
            pushed = set(placement.holders[piece]) - set(state.owners[piece])
            assert slots <= set(state.owners[piece])
            if pushed:  # whoever sends it must have it
                assert slots == set(state.owners[piece])
            held = {domains[slot] for slot in slots | pushed}
            assert len(held) >= placement.effective_copies
            seen[piece] |= slots
    assert seen == {piece: set(slots) for piece, slots in state.owners.items()}


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 20), st.integers(6, 30))
@settings(deadline=None, max_examples=30)
def test_the_work_is_even(replica: int, copies: int, turn: int, count: int) -> None:
    sizes = [(3 + index % 5, ()) for index in range(count)]
    state = layout(replica, 1, sizes)
    shares = Shares(state, copies)
    whole = sum(piece.nbytes for piece in state.owners)
    done = [
        sum(
            p.nbytes
            for p, c in zip(state.slices(s), shares.of(s, turn), strict=True)
            if c
        )
        for s in range(replica)
    ]
    largest = max(piece.nbytes for piece in state.owners)
    even = whole * min(copies, replica) / replica
    assert max(done) <= even + largest * min(copies, replica)


def arrays(step: int, wrong: bool = False) -> dict[str, jax.Array]:
    """Five leaves, each whole on every host; one of them may have a wrong byte."""
    mesh = Mesh(np.array(jax.devices()[:HOSTS]), ("replica",))
    values = {
        f"w{leaf}": np.random.default_rng([step, leaf]).random(700).astype(np.float32)
        for leaf in range(5)
    }
    values["w3"][5] += wrong
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.block_until_ready(jax.device_put(values, sharding))


HOSTS = 3


@pytest.fixture
def job(tmp_path: Path):
    state = Layout(
        mesh=MeshLayout(axis_names=("replica",), axis_sizes=(HOSTS,), slots=(0, 1, 2)),
        leaves=tuple(
            Leaf(path=f"w{leaf}", shape=(700,), dtype="float32") for leaf in range(5)
        ),
    )
    made = Job(state, 2, tmp_path, share="divided")
    yield made
    made.close()


def test_a_trainers_death_takes_rung_1_and_the_rest_from_peers(job: Job) -> None:
    for step in (1, 2, 3):
        job.save(step, arrays(step))
        held = [host.holder.holdings()[0][step] for host in job.hosts.values()]
        assert sum(map(len, held)) == 2 * 5 and max(map(len, held)) < 5
    decision = job.decide()
    assert (decision.step, decision.rung, decision.source) == (3, 1, "memory")
    outcomes = job.carry_out(decision)
    peers = sum(one["peers"] for one in outcomes.values())
    assert peers == 5 * 2800 and not any("error" in one for one in outcomes.values())
    for path, array in arrays(3).items():
        for name in job.hosts:
            assert job.hosts[name].own_bytes(3, path) == np.asarray(array).tobytes()
    report = RecoveryReport(
        fault="f", generation=1, attempt=1, rung=1, source="memory", restored_step=3,
        last_finished_step=3, detect_s=0, restore_s=0, total_s=0,
        bytes_from_own_memory=0, bytes_from_peers=peers, bytes_from_storage=0,
        processes_restarted=3,
    )  # fmt: skip
    assert "rung 1; step 3 restored (13.7 KiB from peers' memory" in report.line()


def test_the_loss_of_any_host_is_survived_at_every_turn(job: Job) -> None:
    for step in (1, 2, 3):
        job.save(step, arrays(step))
        job.lose(job.slots[step % HOSTS])
        decision = job.decide()
        assert (decision.step, decision.rung, decision.source) == (step, 2, "memory")
        assert not any("error" in one for one in job.carry_out(decision).values())


def test_the_last_commit_is_whole_until_the_next_is(job: Job) -> None:
    job.save(1, arrays(1))
    assert job.shares is not None
    for host in list(job.hosts.values())[:2]:  # the third dies before it has copied
        host.snapshot(2, arrays(2), job.shares.of(host.slot, 2))
        host.holder.drop_before(2, keep={1})
    job.lose("h2")
    decision = job.decide()
    assert (decision.step, decision.source) == (1, "memory")
    assert not any("error" in one for one in job.carry_out(decision).values())


@pytest.mark.parametrize("wrong", range(HOSTS))
@pytest.mark.parametrize("begun", [1, 2, 3])
def test_silent_divergence_is_found_within_two_commits(
    job: Job, wrong: int, begun: int
) -> None:
    assert job.shares is not None
    placement = place_copies(job.layout, job.copies)
    with pytest.raises(Divergence, match=r"different bytes for w3\["):
        for step in range(begun, begun + 2):  # ceil(3 / 2)
            tracker = StepTracker(job.layout, placement, step)
            for slot, host in enumerate(job.hosts.values()):
                made = arrays(step, wrong=slot == wrong)
                copied = job.shares.of(slot, step)
                tracker.staged(slot, host.snapshot(step, made, copied))
            assert tracker.complete


def test_a_slice_that_too_few_copied_is_not_committed(job: Job) -> None:
    assert job.shares is not None
    tracker = StepTracker(job.layout, place_copies(job.layout, job.copies), 1)
    for slot, host in enumerate(job.hosts.values()):
        copied = job.shares.of(slot, 0)
        if slot == 1:
            copied[copied.argmax()] = False
        tracker.staged(slot, host.snapshot(1, arrays(1), copied))
    assert not tracker.complete and "another copy of w" in tracker.missing


def test_a_host_borrows_what_it_did_not_copy_for_an_export(job: Job) -> None:
    job.save(1, arrays(1))
    for host in job.hosts.values():
        host.holder.pin(1)
    holder = job.hosts["h0"].holder
    pin = holder.pin(1)
    job.save(2, arrays(2))
    job.save(3, arrays(3))  # nobody has step 1 any more but for the pins
    lacking = [
        piece.key
        for piece, digests in zip(
            holder.own_slices, job.shares.of(0, 1) if job.shares else (), strict=True
        )
        if not digests
    ]
    peers = {
        name: [key for key in lacking if key in _keys(job, name)]
        for name in ("h1", "h2")
    }
    order = {
        "step": 1,
        "epoch": (1, 1),
        "digests": {
            key: _keys(job, name)[key] for name in peers for key in peers[name]
        },
        "transfers": [
            {"host": name, "address": job.addresses[name], "keys": keys}
            for name, keys in peers.items()
        ],
    }
    borrow(holder, pin, order, job.credentials, 10.0)
    memory = holder.arena.view(0, holder.arena.size)
    buffers = np.frombuffer(holder.pinned(pin)[0], np.uint8)
    for index, piece in enumerate(holder.own_slices):
        found = bytes(holder.map.own.parts(memory, buffers, index))
        assert found == np.asarray(arrays(1)[piece.path]).tobytes()
    assert holder.holdings()[1] == []


def _keys(job: Job, name: str) -> dict[str, bytes]:
    """Slice key to digest of what a host has pinned of step 1."""
    own = job.hosts[name].holder._own
    ((_, copy),) = [pinned for pinned in own.pins.values() if pinned[0] == 1][:1]
    pieces = zip(own.pool.chunks.slices, copy.digests, strict=True)
    return {piece.key: digests for piece, digests in pieces if digests}
