"""The manager of a job's process against a real agent, both in this test's process.

A job of one process: everything is there but the other hosts, which have drills.
"""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from dtft.checkpoint import (
    AgentGone,
    CorruptItems,
    NoAgent,
    NotBrought,
    ReplicatedOptions,
)
from dtft.checkpoint.managers.agent_client import AttachedMemory
from dtft.checkpoint.managers.agent_link import LinkClosed, attach
from dtft.checkpoint.managers.distributed import JobSteps
from dtft.checkpoint.managers.local import StorageFailed
from dtft.checkpoint.memory import snapshot
from dtft.checkpoint.state import digests
from dtft.checkpoint.state.slices import Layout, MeshLayout
from dtft.checkpoint.storage import StoredSteps
from dtft.elastic.admission import JobMismatch
from dtft.elastic.assignment import HostRecord
from dtft.elastic.host.serve import ServeConfig, ServingHost, base_config
from dtft.elastic.leader.events import read_events
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import job_key
from tests.support.etcd_cluster import until

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
NEVER = 10**9


class Serving:
    """One agent that serves, on a thread; a store in memory."""

    def __init__(self, directory: Path, name: str = "h", domain: str = "") -> None:
        self.store, self.directory = MemoryStore(), directory
        (directory / "run" / "logs").mkdir(parents=True, exist_ok=True)
        (directory / "memory").mkdir(exist_ok=True)
        serve = ServeConfig(copies=2, arena_directory=str(directory / "memory"))
        config = base_config(
            serve, job="j", host=name, store="s:1", secret=b"0123456789abcdef"
        )
        config = dataclasses.replace(
            config, run_directory=directory / "run", domain=domain
        )
        self.host = ServingHost(config, self.store, None)
        self.socket = config.memory_directory / "agent.sock"
        self.refused = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.host.run()
        except JobMismatch as error:
            self.refused = str(error)

    def end(self) -> None:
        self.host.depart()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.end()
        self.store.close()

    def manager(self, **options: Any) -> JobSteps:
        given = {"storage_interval_steps": NEVER, "agent": str(self.socket)}
        directory = epath.Path(self.directory / "steps")
        return JobSteps(directory, ReplicatedOptions(**{**given, **options}))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    made.close()


def tree(step: int) -> dict[str, Any]:
    def put(value: jax.Array, *spec: str) -> jax.Array:
        return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec)))

    w = jnp.arange(48, dtype=jnp.float32).reshape(8, 6) * (step + 0.5)
    return {
        "params": {"w": put(w, "data", "model"), "b": put(-jnp.zeros(6), "model")},
        "half": put(jnp.full((8, 2), step, jnp.bfloat16), "data"),
        "key": put(jax.random.key(step)),
        "local": jnp.full(3, step, jnp.int32),
        "empty": jnp.zeros((0, 3)),
        "table": np.arange(3, dtype=np.int64) + step,
        "scalar": np.float64(0.1) * step,
        "count": step,
        "rate": 0.5 * step,
        "on": step % 2 == 0,
        "nothing": None,
    }


def save(manager: JobSteps, step: int, **more: Any) -> None:
    args = ocp.args.StandardSave(tree(step))
    manager.save(step, args, more.get("metrics"), more.get("custom"), False)


def restored(manager: JobSteps, step: int | None) -> Any:
    return manager.restore(step, ocp.args.StandardRestore(tree(0)))


def bits(state: Any) -> list[bytes]:
    def of(leaf: Any) -> bytes:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(state)]


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert type(one) is type(other)
        assert getattr(one, "sharding", None) == getattr(other, "sharding", None)


def test_steps_come_back_from_memory_in_this_run_and_the_next(serving: Serving) -> None:
    manager = serving.manager()
    assert manager.all_steps() == [] and manager.newest() is None
    for step in range(4):
        save(manager, step, metrics={"loss": step}, custom={"by": "me"})
    assert manager.newest() == 3
    manager.wait_until_finished()
    same(restored(manager, 3), tree(3))  # after a loss that became NaN, say
    assert manager.metrics(3) == {"loss": 3}
    assert manager.metadata(3).custom_metadata == {"by": "me"}
    same(manager.restore(3, None), tree(3))  # onto the shardings that it had
    known = manager.item_metadata(3)["params"]["w"]
    assert known.shape == (8, 6)
    assert known.sharding == tree(3)["params"]["w"].sharding
    save(manager, 4)
    manager.leave()  # as a process that dies

    again = serving.manager()
    assert 4 in again.all_steps() and again.newest() == 4
    same(restored(again, None), tree(4))
    same(again.restore(4, None), tree(4))
    assert not again.restore(4, None)["local"].committed  # as it was
    with pytest.raises(FileNotFoundError, match="step=9 is neither"):
        restored(again, 9)
    save(again, 5)
    same(restored(again, 5), tree(5))
    again.leave()


@pytest.mark.timeout(120)
def test_what_close_leaves_in_storage_is_read_by_stock_orbax(serving: Serving) -> None:
    manager = serving.manager()
    for step in range(2):
        save(manager, step)
    manager.close()
    steps = ocp.utils.checkpoint_steps(serving.directory / "steps")
    assert set(steps) == {0, 1}
    plain = {name: leaf for name, leaf in tree(1).items() if name != "empty"}
    with ocp.CheckpointManager(serving.directory / "steps") as stock:
        found = stock.restore(1, args=ocp.args.StandardRestore(plain | {"empty": None}))
    found.pop("empty")
    assert bits(found) == bits(plain)

    again = serving.manager()
    same(restored(again, 0), tree(0))  # an older one: from storage
    same(again.restore(0, None), tree(0))
    save(again, 2)
    with pytest.raises(ValueError, match="newest commit in memory"):
        again.delete(2)
    again.delete(0)
    assert again.all_steps() == [1, 2]
    again.leave()


def on_other_shardings() -> dict[str, Any]:
    """As `tree(0)`, on another mesh, divided otherwise."""
    other = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def struct(leaf: jax.Array, *spec: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(other, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    target = tree(0)
    w, b = target["params"]["w"], target["params"]["b"]
    return target | {
        "params": {"w": struct(w, "y", "x"), "b": struct(b)},
        "half": struct(target["half"], "x"),
        "key": struct(target["key"]),
    }


def test_what_is_beside_the_arrays_has_a_digest(serving: Serving) -> None:
    saved = ocp.args.Composite(
        state=ocp.args.StandardSave(tree(1)),
        data=ocp.args.JsonSave({"position": 2**70, "names": ["a", None]}),
    )
    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore(tree(0)), data=ocp.args.JsonRestore()
    )
    manager = serving.manager()
    manager.save(1, saved, {"loss": 0.5}, None, False)
    manager.wait_until_finished()
    found = manager.restore(1, wanted)
    same(found["state"], tree(1))
    assert found["data"] == {"position": 2**70, "names": ["a", None]}

    agent = serving.host._agent
    assert agent is not None
    copies = agent._follower._copies
    assert copies.holder is not None
    kept = copies.holder.items(1)
    kept["json"] = kept["json"].replace("0.5", "0.7")  # as a bit that flips
    with pytest.raises(CorruptItems, match="does not match its digest"):
        manager.restore(1, wanted)
    assert copies.report()["items"] == {1: {}}  # another host's are taken
    assert copies.report()["corrupt"] == ["h step 1: its items"]
    manager.leave()


def test_memory_brings_a_step_onto_other_shardings(serving: Serving) -> None:
    manager = serving.manager(chunk_bytes=16)
    for step in (7, 8):
        save(manager, step)
    target = on_other_shardings()
    found = manager.restore(8, ocp.args.StandardRestore(target))
    assert bits(found) == bits(tree(8))
    for wanted, leaf in zip(
        jax.tree.leaves(target), jax.tree.leaves(found), strict=True
    ):
        assert getattr(leaf, "sharding", None) == getattr(wanted, "sharding", None)
    directory = serving.socket.parent  # the agent is told, and frees it then
    until(lambda: not list(directory.glob("side-*")))
    same(restored(manager, 8), tree(8))  # and again as it was saved
    mesh = MeshLayout(axis_names=("x",), axis_sizes=(1,), slots=(0,))
    with pytest.raises(NotBrought, match="newest commit in memory is step 8, not 7"):
        manager._memory.read_on(7, Layout(mesh=mesh, leaves=()), {})
    manager.leave()

    again = serving.manager(chunk_bytes=16)  # what was restored can be had so, too
    found = again.restore(8, ocp.args.StandardRestore(target))
    assert bits(found) == bits(tree(8))
    again.save(9, ocp.args.StandardSave(found), None, None, False)
    same(again.restore(None, ocp.args.StandardRestore(found)), found)
    assert again.all_steps() == [9]
    again.leave()


def test_what_makes_no_sense_in_a_job_is_refused(
    serving: Serving, tmp_path: Path
) -> None:
    for options, hint in (
        ({"best_fn": float}, "best_fn=.*in a job"),
        ({"memory_to_keep": 2}, "memory_to_keep=2"),
    ):
        with pytest.raises(ValueError, match=hint):
            serving.manager(**options)
    with pytest.raises(ValueError, match="a path that every host sees"):
        JobSteps(epath.Path("gs://bucket/x"), ReplicatedOptions())
    manager = serving.manager()
    with pytest.raises(NoAgent, match="is taken by process"):
        serving.manager()
    save(manager, 5)
    with pytest.raises(StepAlreadyExistsError, match="not above step 5"):
        save(manager, 5)
    changed = tree(6) | {"count": 1.5}
    with pytest.raises(ValueError, match="'default/count' was int64.*now float64"):
        manager.save(6, ocp.args.StandardSave(changed), None, None, False)
    with pytest.raises(ValueError, match="items of step 6 .*Save large values as arr"):
        save(manager, 6, custom={"text": "x" * (4 << 20)})
    save(manager, 6)  # nothing was lost by it
    manager.leave()
    with pytest.raises(NoAgent, match="chunk_bytes=64 instead of"):
        serving.manager(chunk_bytes=64)


def test_an_agent_that_ends_is_named_at_the_next_save(serving: Serving) -> None:
    manager = serving.manager()
    save(manager, 0)
    assert manager.all_steps() == [0]
    serving.end()
    with pytest.raises(AgentGone, match="agent of host h.*this agent ends"):
        save(manager, 1)
    with pytest.raises(AgentGone):
        manager.check_for_errors()
    manager.leave()


def test_a_process_that_failed_to_attach_can_try_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(StoredSteps, "steps", fail)
        with pytest.raises(OSError, match="stale file handle"):
            serving.manager()
    with monkeypatch.context() as patch:
        patch.setattr(AttachedMemory, "take", fail)
        with pytest.raises(AgentGone, match="stale file handle"):
            serving.manager()

    def interrupted(memory: AttachedMemory) -> None:
        memory._dialogue.wait(lambda: memory._formed is not None, "the job")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AttachedMemory, "_take_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serving.manager()
    manager = serving.manager()
    reasons = [it.get("reason") for it in read_events(serving.directory / "run")]
    assert "process 0 on h has gone" in reasons  # processes beside it are told at once
    save(manager, 0)
    assert manager.all_steps() == [0]
    manager.leave()


def test_after_a_first_save_that_failed_there_is_nothing_to_wait_for(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory")

    manager = serving.manager()
    with monkeypatch.context() as patch:
        patch.setattr(AttachedMemory, "_copy", fail)
        with pytest.raises(OSError, match="no memory"):
            save(manager, 0)
    manager.wait_until_finished()
    manager.close()
    again = serving.manager()
    assert again.all_steps() == []
    again.leave()


def test_a_step_that_could_not_be_digested_is_told_and_saved_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> list[bytes]:
        raise MemoryError("no memory")

    monkeypatch.setattr(snapshot, "BRIEF_BYTES", 0)
    monkeypatch.setattr(digests, "THREAD_BYTES", 1)
    monkeypatch.setattr(digests.os, "sched_getaffinity", lambda _: range(2))
    manager = serving.manager()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "digests_of", fail)
        save(manager, 0)
        with pytest.raises(RuntimeError, match=r"step 0 .*MemoryError: no memory"):
            manager.wait_until_finished()
    save(manager, 0)
    manager.wait_until_finished()
    assert manager.all_steps() == [0]
    manager.leave()


def test_a_late_commit_names_its_own_limit(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = serving.manager(storage_timeout_s=0.5)
    save(manager, 0)
    monkeypatch.setattr(manager._memory, "ask_storage", lambda step, store: -1)
    limit = r"1 s waiting .* limit: 2 \* ReplicatedOptions.storage_timeout_s"
    with pytest.raises(TimeoutError, match=limit):
        manager.wait_until_finished()
    manager.leave()


def test_labels_that_do_not_fit_are_told_to_the_process(tmp_path: Path) -> None:
    serving = Serving(tmp_path, domain="power=p1")
    other = HostRecord(
        host="x",
        address="127.0.0.1:1",
        incarnation="x-1",
        joined_ns=0,
        pid=1,
        domain="rack=r1",
    )
    serving.store.put(job_key("j", "m/hosts/x"), other.to_json().encode())
    with pytest.raises(AgentGone, match="--domain of h: "):
        serving.manager()
    serving.close()
    assert "--domain of h: " in serving.refused


@pytest.mark.timeout(120)
def test_storage_that_fails_is_told_and_training_goes_on(
    serving: Serving, tmp_path: Path
) -> None:
    manager = serving.manager()
    (tmp_path / "steps").write_text("not a directory")
    save(manager, 0)
    with pytest.raises(StorageFailed, match="step 0 did not reach storage"):
        manager.wait_until_finished()
    save(manager, 1)
    same(restored(manager, 1), tree(1))
    with pytest.raises(StorageFailed):
        manager.close()


def test_a_message_that_is_none_ends_its_process_and_not_the_agent(
    serving: Serving,
) -> None:
    terms = {
        "processes": 1,
        "directory": str(serving.directory / "steps"),
        "storage_interval_steps": NEVER,
        "max_to_keep": ReplicatedOptions.max_to_keep,
        "chunk_bytes": ReplicatedOptions.chunk_bytes,
        "storage_timeout_s": ReplicatedOptions.storage_timeout_s,
    }
    attached = attach(str(serving.socket), {"process": 0, "terms": terms})
    while attached.link.receive(20)["op"] != "formed":
        pass
    attached.link.send("stage")  # without a step
    told: dict[str, Any] = {}
    with pytest.raises(LinkClosed):
        while True:
            told = attached.link.receive(20)
    attached.link.close()
    assert "KeyError" in told["reason"]
    manager = serving.manager()
    save(manager, 1)
    manager.wait_until_finished()
    same(restored(manager, 1), tree(1))
    manager.leave()
