"""The five defects of Orbax's peer-to-peer checkpoints: here each of them is absent.

`experiments/orbax_defects.py` shows Orbax doing wrong what is done right here.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dtft.checkpoint.memory.snapshot import CorruptCopy, SnapshotPlan
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.storage.directory import StorageTier
from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.protocol import AuthenticationError, Credentials
from dtft.checkpoint.transport.server import connect
from tests.support.memory_job import CHUNK, Job

State = dict[str, jax.Array]
Start = Callable[..., Job]


def placed(values: dict[str, np.ndarray], hosts: int, sharded: tuple = ()) -> State:
    """Arrays on one device per host, replicated but for the leaves in `sharded`."""
    mesh = Mesh(np.array(jax.devices()[:hosts]), ("replica",))
    return {
        path: jax.device_put(
            value,
            NamedSharding(mesh, PartitionSpec("replica" if path in sharded else None)),
        )
        for path, value in values.items()
    }


def layout_of(arrays: State, hosts: int, sharded: tuple = ()) -> Layout:
    return Layout(
        mesh=MeshLayout(
            axis_names=("replica",), axis_sizes=(hosts,), slots=tuple(range(hosts))
        ),
        leaves=tuple(
            Leaf(
                path=path,
                shape=array.shape,
                dtype=array.dtype.name,
                spec=(("replica",),) if path in sharded else (),
            )
            for path, array in arrays.items()
        ),
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(arrays: State, hosts: int, sharded: tuple = (), copies: int = 2) -> Job:
        layout = layout_of(arrays, hosts, sharded)
        jobs.append(Job(layout, copies, tmp_path / "memory"))
        return jobs[-1]

    (tmp_path / "memory").mkdir()
    yield begin
    for job in jobs:
        job.close()


def numbers(size: int = 4096, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def loaded(job: Job, name: str, step: int) -> State:
    """The replicated state of one host, loaded as its trainer would."""
    host = job.hosts[name]
    plan = SnapshotPlan(job.layout, host.slot, CHUNK)
    memory = host.holder.arena.view(0, host.holder.arena.size)
    buffers = np.frombuffer(host.holder.own_buffers(step), np.uint8)
    here = SingleDeviceSharding(jax.devices()[host.slot])
    abstract = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=here)
        for leaf in job.layout.leaves
    }
    return plan.read(memory, buffers, host.holder.all_own_digests(step), abstract)


# ------------------------------------------------------- 1. silent corruption


def test_silent_corruption_the_damaged_copy_is_passed_over_and_replaced(
    start: Start,
) -> None:
    arrays = placed({"w": numbers()}, hosts=3)
    job = start(arrays, hosts=3)
    job.save(1, arrays)
    job.lose("h0")
    job.hosts["h1"].corrupt(1, "w")
    assert job.hosts["h1"].holder.holdings()[1] == ["step 1: w[0:4096]:float32"]
    decision = job.decide()
    assert decision.plan is not None
    assert {t.source for t in decision.plan.transfers} == {"h2"}
    assert {t.target for t in decision.plan.transfers} == {"h0-spare", "h1"}
    assert not any("error" in one for one in job.carry_out(decision).values())
    for name in job.hosts:
        assert np.array_equal(np.asarray(loaded(job, name, 1)["w"]), numbers())


def test_silent_corruption_of_the_last_copy_is_never_restored(start: Start) -> None:
    arrays = placed({"w": numbers()}, hosts=2)
    job = start(arrays, hosts=2)
    job.save(1, arrays)
    job.lose("h0")
    job.hosts["h1"].corrupt(1, "w")
    decision = job.decide()
    assert (decision.source, decision.rung) == ("init", 3)
    assert "no verified copy left" in decision.passed_over[0]
    with pytest.raises(CorruptCopy, match=r"w\[0:4096\]:float32 does not match its"):
        loaded(job, "h1", 1)


def test_silent_corruption_between_plan_and_fetch_is_refused_by_the_receiver(
    start: Start,
) -> None:
    arrays = placed({"w": numbers()}, hosts=2)
    job = start(arrays, hosts=2)
    job.save(1, arrays)
    job.lose("h0")
    decision = job.decide()
    assert decision.source == "memory"
    job.hosts["h1"].corrupt(1, "w")
    outcomes = job.carry_out(decision)
    assert outcomes["h1"]["corrupt"] == ("h1 step 1: w[0:4096]:float32",)
    assert "corrupt" in outcomes["h1"]["error"]  # it found its own copy damaged
    assert "not held here" in outcomes["h0-spare"]["error"]  # and gave it to nobody
    assert job.decide().source == "init"


# ------------------------------------- 2. fallback to a step that storage lacks


def test_fallback_takes_the_newest_step_that_storage_has(
    start: Start, tmp_path: Path
) -> None:
    def made(step: int) -> State:
        return placed({"w": np.full(512, step, np.float32)}, hosts=2)

    tier = StorageTier(tmp_path / "storage")
    job = start(made(0), hosts=2)
    for step in range(1, 6):
        job.save(step, made(step))
        if step == 4:
            tier.save(step, made(step), {})
            tier.wait_until_finished()
    job.lose("h0")
    planned = job.decide(tier.all_steps())
    assert (planned.source, planned.step) == ("memory", 5)
    order = job.orders(planned)["h0-spare"]
    job.hosts["h1"].holder.keep_only(set())  # step 5 goes between plan and fetch
    failed = job.obey("h0-spare", order)
    assert failed["host"] == "h1" and "not held here" in failed["error"]
    job.lose("h1")  # and then its host
    failed = job.obey("h0-spare", order)
    assert failed["host"] == "h1" and "cannot connect" in failed["error"]
    fallback = job.decide(tier.all_steps())
    assert (fallback.source, fallback.step) == ("storage", 4)
    abstract = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for path, array in made(0).items()
    }
    restored, _ = tier.restore(fallback.step, abstract)
    assert np.array_equal(np.asarray(restored["w"]), np.asarray(made(4)["w"]))
    with pytest.raises(FileNotFoundError, match=r"step=5 is not in .* It has: 4\."):
        tier.restore(planned.step, abstract)
    tier.close()


# ------------------------------------------------------------- 3. ZeRO loss


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("lost", [0, 1])
def test_zero_loss_every_hosts_part_of_the_optimizer_state_comes_back(
    start: Start, hosts: int, lost: int
) -> None:
    values = {"w": numbers(256), "mu": numbers(1024, seed=1)}
    arrays = placed(values, hosts, sharded=("mu",))
    job = start(arrays, hosts, sharded=("mu",))
    job.save(1, arrays)
    job.lose(f"h{lost}")
    decision = job.decide()
    assert (decision.source, decision.rung, decision.step) == ("memory", 2, 1)
    assert not any("error" in one for one in job.carry_out(decision).values())
    parts = [job.hosts[name].own_bytes(1, "mu") for name in job.slots]
    assert b"".join(parts) == values["mu"].tobytes()
    assert all(h.own_bytes(1, "w") == values["w"].tobytes() for h in job.hosts.values())


def test_zero_loss_without_a_second_copy_is_not_reported_as_complete(
    start: Start,
) -> None:
    arrays = placed({"w": numbers(256), "mu": numbers(1024)}, 2, sharded=("mu",))
    job = start(arrays, hosts=2, sharded=("mu",), copies=1)
    job.save(1, arrays)
    job.lose("h0")
    decision = job.decide(storage_steps=[])
    assert decision.source == "init"
    assert "1 of 3 slices have no verified copy" in decision.passed_over[0]


# ------------------------------------------------------------------- 4. -0.0


def test_negative_zero_and_every_other_bit_arrive_as_they_were(start: Start) -> None:
    words = np.array(
        [0x80000000, 0, 0x7FC12345, 0xFFC00001, 0x7F812345, 1, 0x80000001, 0xFF800000],
        np.uint32,
    )
    # Through device_put as integers: numpy and XLA may quieten a signalling NaN.
    bits = placed({"w": np.tile(words, 64)}, hosts=2)
    view = jax.jit(lambda w: jax.lax.bitcast_convert_type(w, np.float32))
    arrays = {"w": view(bits["w"]), "zero": view(bits["w"] & np.uint32(0x80000000))}
    job = start(arrays, hosts=2)
    job.save(1, arrays)
    job.lose("h0")
    job.carry_out(job.decide())
    found = loaded(job, "h0-spare", 1)
    for path, array in arrays.items():
        assert np.asarray(found[path]).tobytes() == np.asarray(array).tobytes(), path
    zeros = np.asarray(found["zero"])
    assert np.signbit(zeros).any() and not zeros.any()


# --------------------------------------------------------- 5. no authentication


def strangers(job: Job) -> list[Credentials]:
    name, secret = job.credentials.job, job.credentials.secret
    return [
        Credentials(job=name, secret=b"x" * 32),
        Credentials(job=name, secret=secret[:-1]),
        Credentials(job="other", secret=secret),
    ]


def test_no_authentication_a_stranger_neither_reads_nor_writes(start: Start) -> None:
    arrays = placed({"w": numbers()}, hosts=2)
    job = start(arrays, hosts=2)
    job.save(1, arrays)
    before = job.hosts["h1"].holder.holdings()
    for credentials in strangers(job):
        for op in ("fetch", "push"):
            with pytest.raises(AuthenticationError, match="secret"):
                connect(job.addresses["h1"], credentials, {"op": op}, 5.0)
    assert job.hosts["h1"].holder.holdings() == before
    job.lose("h0")  # and the peers are still served
    assert "error" not in job.carry_out(job.decide())["h0-spare"]


def test_no_authentication_who_skips_the_handshake_hears_only_a_nonce(
    start: Start,
) -> None:
    arrays = placed({"w": numbers()}, hosts=2)
    job = start(arrays, hosts=2)
    job.save(1, arrays)
    host, port = job.addresses["h1"].split(":")
    greeting, _ = protocol.greeting()
    request = protocol.encode_header({"op": "fetch"}, 0) + protocol.encode_header(
        {"step": 1, "keys": ["w[0:4096]:float32"]}, 0
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(greeting + request)
        heard = b""
        try:
            while part := connection.recv(1 << 16):
                heard += part
        except ConnectionResetError:  # it closed before it had read all we sent
            pass
    assert heard[protocol.GREETING_BYTES :] in (b"", protocol.REFUSAL)


def test_no_authentication_no_server_listens_on_every_address(start: Start) -> None:
    arrays = placed({"w": numbers()}, hosts=2)
    job = start(arrays, hosts=2)
    assert all(a.startswith("127.0.0.1:") for a in job.addresses.values())
    listener = job.hosts["h0"].server
    with pytest.raises(ValueError, match="not an address that peers could connect to"):
        type(listener)("0.0.0.0:0", job.credentials, {})
