"""Restores onto other numbers of replicas and other meshes, over real sockets."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.assignment import resized
from dtft.elastic.leader import recovery
from tests.support.resizing_job import Job

REPLICA, FSDP = ("replica",), ("fsdp",)
WHOLE = (
    Leaf(path="w", shape=(96, 24), dtype="float32", spec=(FSDP,)),
    Leaf(path="h", shape=(12, 31), dtype="bfloat16"),
    Leaf(path="q", shape=(24, 3), dtype="int4", spec=(FSDP,)),
    Leaf(path="step", shape=(), dtype="int32"),
    Leaf(path="none", shape=(0, 4), dtype="float32"),
)
ZERO_1 = (
    *WHOLE,
    Leaf(path="mu", shape=(24, 48), dtype="float32", spec=(REPLICA, FSDP)),
    Leaf(path="nu", shape=(5, 48), dtype="float64", spec=((), REPLICA)),
)


def mesh_of(replicas: int, fsdp: int, leaves: tuple[Leaf, ...]) -> Layout:
    mesh = MeshLayout(
        axis_names=("replica", "fsdp"),
        axis_sizes=(replicas, fsdp),
        slots=tuple(range(replicas * fsdp)),
    )
    return Layout(mesh=mesh, leaves=leaves)


def names(number: int) -> list[str]:
    return [f"h{i}" for i in range(number)]


@contextlib.contextmanager
def job_of(directory: Path, hosts: int, copies: int = 2) -> Iterator[Job]:
    with contextlib.closing(Job(directory, names(hosts), copies)) as job:
        yield job


@pytest.mark.parametrize("leaves", [WHOLE, ZERO_1])
@pytest.mark.parametrize(
    "before, after, fsdp", [(2, 3, 1), (3, 1, 1), (1, 3, 1), (2, 3, 2), (2, 1, 2)]
)
def test_more_and_fewer_replicas_have_the_committed_bytes(
    tmp_path, before, after, fsdp, leaves
):
    old = mesh_of(before, fsdp, leaves)
    slots = names(after * fsdp)
    with job_of(tmp_path, max(before, after) * fsdp) as job:
        commit = job.train(old, names(before * fsdp), step=7)
        decision = job.decide(slots)
        new = decision.layout
        assert new is not None and new.digest == resized(old, after).digest
        told = job.restore(decision, slots)
        assert all("error" not in outcome for outcome in told.values()), told
        assert job.wrong(new, slots, 7) == []
        proof = job.proof(decision, told)
        assert proof.differing == () and proof.leaves == len(leaves)
        if leaves == WHOLE:
            assert proof.restored_root == commit.root
            moved = sum(outcome["peers"] for outcome in told.values())
            new_hosts = max(0, after - before) * fsdp
            assert moved == sum(
                p.nbytes for s in range(new_hosts) for p in old.slices(s % fsdp)
            )
        job.train(new, slots, step=8)
        again = job.decide(slots)
        assert (again.rung, again.step, again.sent) == (1, 8, {})
        assert all(len(job.hosts[name].arenas) == 1 for name in slots)


@pytest.mark.parametrize("leaves", [WHOLE, ZERO_1])
def test_the_old_copies_stay_until_a_step_is_committed_on_the_new_mesh(
    tmp_path, leaves
):
    """A re-formation that gets half way, then another size, then the old one."""
    old = mesh_of(2, 1, leaves)
    with job_of(tmp_path, 3) as job:
        job.train(old, ["h0", "h1"], step=7)
        slots = ["h0", "h1", "h2"]
        half = job.restore(job.decide(slots), slots, only=["h1", "h2"])
        assert all("error" not in outcome for outcome in half.values())
        job.lose("h2")
        for slots in (["h1"], ["h1", "h0"], ["h0", "h1"]):
            decision = job.decide(slots)
            assert decision.step == 7 and decision.layout is not None, decision
            told = job.restore(decision, slots)
            assert all("error" not in outcome for outcome in told.values()), told
            assert job.wrong(decision.layout, slots, 7) == []
            assert job.proof(decision, told).differing == ()
        job.train(old, ["h0", "h1"], step=8)
        assert all(len(job.hosts[name].arenas) == 1 for name in ("h0", "h1"))


@pytest.mark.parametrize("leaves", [WHOLE, ZERO_1])
def test_a_corrupt_copy_is_named_and_another_is_taken(tmp_path, leaves):
    """Corrupted after it was reported: what is read is checked, not what was said."""
    old, slots = mesh_of(2, 1, leaves), names(3)
    with job_of(tmp_path, 3) as job:
        job.train(old, names(2), step=7)
        decision = job.decide(slots)
        for piece in job.hosts["h1"].holder.own_slices:
            if piece.path in ("w", "mu"):
                parts = job.hosts["h1"].holder.own_parts(7, piece)
                parts.fill(memoryview(bytes(255 - byte for byte in bytes(parts))))
        told = job.restore(decision, slots)
        bad = [it for it in told.values() if "error" in it]
        assert bad and all(it["host"] == "h1" and it["corrupt"] for it in bad)
        decision = job.decide(slots)
        assert any("h1" in text and ": w[" in text for text in job.corrupt)
        told = job.restore(decision, slots)
        assert all("error" not in outcome for outcome in told.values()), told
        assert decision.layout is not None
        assert job.wrong(decision.layout, slots, 7) == []


def test_a_slice_that_several_hosts_send_is_put_together(tmp_path, monkeypatch):
    cutting = functools.partial(recovery.plan_restore, whole_bytes=64)
    monkeypatch.setattr(recovery, "plan_restore", cutting)
    old, slots = mesh_of(3, 1, WHOLE), ["h3", "h1", "h2"]
    with job_of(tmp_path, 4) as job:
        job.train(old, names(3), step=7)
        job.lose("h0")
        decision = job.decide(slots)
        assert set(decision.sent) == {"h1", "h2"} and decision.plan is not None
        assert not decision.plan.moves_whole("h3")
        told = job.restore(decision, slots)
        assert all("error" not in outcome for outcome in told.values()), told
        assert [told[name]["peers"] for name in ("h1", "h2")] == [0, 0]
        assert job.wrong(old, slots, 7) == []
        assert job.proof(decision, told).differing == ()


def test_bytes_that_differ_between_owners_are_seen(tmp_path):
    old, slots = mesh_of(2, 1, WHOLE), names(3)
    with job_of(tmp_path, 3) as job:
        job.train(old, names(2), step=7)
        decision = job.decide(slots)
        told = job.restore(decision, slots)
        (key,) = (k for k in told["h2"]["restored"] if k.startswith("h["))
        told["h2"]["restored"][key] = b"?" * 16
        assert job.proof(decision, told).differing == ("h",)
        del told["h2"]["restored"][key]
        assert job.proof(decision, told).differing == ()
        for outcome in told.values():
            outcome["restored"].pop(key, None)
        assert job.proof(decision, told).differing == ("h",)


def test_without_memory_for_both_the_old_copies_are_kept(tmp_path):
    old = mesh_of(2, 1, WHOLE)
    huge = Leaf(path="huge", shape=(1 << 50,), dtype="uint8")
    with job_of(tmp_path, 2) as job:
        job.train(old, names(2), step=7)
        copies = job.hosts["h0"].copies
        before = copies.holder
        with pytest.raises(OSError, match="needs .* bytes"):
            copies.hold(mesh_of(1, 1, (*WHOLE, huge)), 0, keep=7)
        assert copies.holder is None and copies.former == (before,)
        assert job.decide(names(2)).step == 7
        assert copies.hold(old, 0, keep=7) is before and copies.former == ()


def test_a_host_that_returns_to_another_slot_brings_what_it_has(tmp_path):
    old = dataclasses.replace(mesh_of(1, 3, WHOLE), config="x")
    with job_of(tmp_path, 4) as job:
        job.train(old, names(3), step=7)
        slots = ["h2", "h0", "h3"]
        decision = job.decide(slots)
        told = job.restore(decision, slots)
        assert all("error" not in outcome for outcome in told.values()), told
        assert job.wrong(old, slots, 7) == []
