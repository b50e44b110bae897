"""A job looked at from outside: real holders and sockets, no trainers."""

import concurrent.futures
import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer
from dtft.cli.checkpoint import job_lines, job_record, verify_lines, verify_record
from dtft.elastic.admission import JobMismatch, proof_of
from dtft.elastic.assignment import HostRecord
from dtft.elastic.host import inspection
from dtft.elastic.host.inspection import serve_inspection
from dtft.elastic.inspect_job import Observer, Verification
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.export_requests import Answer, ExportRequests, serve_export
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import job_key
from dtft.elastic.transfer.replica_server import Inbox
from tests.support.commits import layout
from tests.support.hosts import stage

SECRET = b"0123456789abcdef"
STATE = layout(2, 1)
CHUNK = 4096


def flip(holder: ReplicaStore) -> None:
    """Flips a bit of the first own slice of step 7, in the arena's file."""
    start = int(holder.map.own.starts[0])
    start += holder.own_buffers(7)[0] * holder.map.own.nbytes
    with open(holder.path, "r+b") as memory:
        memory.seek(start)
        (byte,) = memory.read(1)
        memory.seek(start)
        memory.write(bytes([byte ^ 1]))


class Job:
    """Two hosts that hold step 7, as the store tells of them."""

    def __init__(self, directory: Path) -> None:
        self.store, self.holders = MemoryStore(), []
        self.servers: list[TransportServer] = []
        self.emits: list[Callable[..., None]] = []
        self.inspects: list[Callable[[Channel], None]] = []
        self.former: list[ReplicaStore] = []
        """Of the first host."""
        self._directory = directory
        self.requests = ExportRequests()
        self._put("m/fingerprint", json.dumps({"secret": proof_of(SECRET, "j")}))
        self._put("m/leader", "h1")
        digests: dict[str, bytes] = {}
        for slot in range(2):
            digests |= self._host(directory, slot)
        commit = Commit(
            step=7,
            generation=1,
            attempt=1,
            root=digest_root(digests.items()),
            layout=STATE.digest,
            holders=("h0", "h1"),
            copies=2,
        )
        self._put("c/commits", commit.to_json())

    def _put(self, name: str, text: str) -> None:
        self.store.put(job_key("j", name), text.encode())

    def _host(self, directory: Path, slot: int) -> dict[str, bytes]:
        config = AgentConfig(
            job="j",
            host=f"h{slot}",
            store="s:1",
            secret=SECRET,
            num_slots=2,
            trainer_command=(),
            run_directory=directory,
            storage_directory=directory / "checkpoints",
            config_digest="",
        )
        holder = self._holder(slot, f"arena-{slot}")
        stage(holder, 7, lambda key, size: bytes(size))
        keys = [piece.key for piece in holder.own_slices]
        digests = dict(zip(keys, holder.all_own_digests(7), strict=True))
        self.holders.append(holder)
        inbox = Inbox(
            epoch=lambda: (1, 1),
            holder=lambda: self.holders[slot],
            held=lambda *_: None,
            former=lambda: [] if slot else self.former,
        )
        self.inspects.append(lambda channel: serve_inspection(channel, config, inbox))

        def emit(answer: Answer) -> None:
            self.requests.add(7, answer)
            self.requests.outcome(6, True, "")  # an older step: not what was asked for
            self.requests.outcome(8, slot == 1, "No space left on device")

        self.emits.append(emit)
        server = TransportServer(
            "127.0.0.1:0",
            Credentials(job="j", secret=SECRET),
            {
                "inspect": lambda channel: self.inspects[slot](channel),
                "export": lambda channel: serve_export(
                    channel, config, lambda *event: self.emits[slot](*event)
                ),
            },
        )
        self.servers.append(server)
        record = HostRecord(
            host=f"h{slot}",
            address=server.address,
            incarnation="x",
            joined_ns=0,
            pid=1,
        )
        self._put(f"m/hosts/h{slot}", record.to_json())
        return digests

    def _holder(self, slot: int, name: str) -> ReplicaStore:
        path, placement = self._directory / name, place_copies(STATE, 2)
        return ReplicaStore(STATE, slot, placement, path=path, chunk_bytes=CHUNK)

    def second_holder(self) -> ReplicaStore:
        """The first host's memory for another formation; it holds nothing yet."""
        return self._holder(0, "arena-0-")

    def observer(self, job: str = "j", secret: bytes = SECRET) -> Observer:
        return Observer(self.store, "s:1", job, secret)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for holder in self.holders:
            holder.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


def test_a_healthy_job_is_read_and_every_copy_is_right(job: Job) -> None:
    record = job_record(job.observer().look())
    (commit,) = record["commits"]
    assert (commit["health"], commit["copies"]) == ("healthy", [2, 2])
    assert [host["slot"] for host in record["hosts"]] == [0, 1]
    text = "\n".join(job_lines(record))
    assert "2-2 of 2" in text and "is not seen from here" in text
    assert json.loads(json.dumps(record)) == record
    lines, well = verify_lines(verify_record(job.observer().look(Verification())))
    assert well and "step 7: healthy" in lines[-1]


def test_a_corrupt_copy_and_a_silent_host_are_named(job: Job) -> None:
    holder = job.holders[0]
    (key, other) = (piece.key for piece in holder.own_slices)
    flip(holder)
    for _ in range(2):  # the second one knows it, and reads what is right
        state = job.observer().look(Verification())
        lines, well = verify_lines(verify_record(state))
        assert not well and f"corrupt copy: h0 step 7: {key}" in lines
        assert sum(line.startswith("corrupt copy") for line in lines) == 1
        assert any("degraded" in line for line in lines)
        assert [row.split()[-1] for row in lines[:3]] == ["corrupt", "1", "0"]
    assert set(holder.here(7)) == {other}  # given to nobody any more
    job.servers[1].close()
    lines, well = verify_lines(verify_record(job.observer().look(Verification())))
    assert not well and any(line.startswith("no answer: h1: ") for line in lines)
    assert lines[1].split()[0] == "h0" and lines[2].split()[-1] == "-"


def test_a_verification_counts_what_it_reads_and_tells_progress(job: Job) -> None:
    told: dict[str, list[tuple[int, int]]] = {"h0": [], "h1": []}

    def progress(host: str, read: int, total: int) -> None:
        told[host].append((read, total))

    state = job.observer().look(Verification(progress=progress))
    for holder, host in zip(job.holders, state.hosts, strict=True):
        nbytes = sum(piece.nbytes for piece in holder.own_slices)
        assert (host.copies_read, host.bytes_read) == (2, nbytes)
        assert 0 < host.seconds < 10
        assert told[host.record.host][0] == (0, nbytes)
    record = verify_record(state)
    assert json.loads(json.dumps(record)) == record
    assert [it["copies_read"] for it in record["hosts"]] == [2, 2]


def test_copies_of_a_former_formation_are_read_too(job: Job) -> None:
    former, job.holders[0] = job.holders[0], job.second_holder()
    job.former.append(former)
    try:
        flip(former)
        host = job.observer().look(Verification()).hosts[0]
        assert host.corrupt == (f"step 7: {former.own_slices[0].key}",)
        assert host.copies_read == 2 and not host.held  # of the newest formation
    finally:
        former.close()


def test_the_rate_bounds_a_verification_and_its_deadline(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PROGRESS_S", 0.1)
    nbytes = sum(piece.nbytes for piece in job.holders[0].own_slices)
    told: list[int] = []
    paced = Verification(
        rate=max(1, nbytes),  # a second
        timeout_s=60.0,
        progress=lambda host, read, total: told.append(read),
    )
    state = job.observer().look(paced)
    assert all(1.0 <= host.seconds < 30 for host in state.hosts)
    assert len(told) > 6  # while they wait, too
    lines, well = verify_lines(verify_record(state))
    assert well and "step 7: healthy" in lines[-1]


def test_hosts_that_are_silent_or_slow_while_they_verify_are_named(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, answered, inspect = threading.Event(), threading.Event(), job.inspects[0]

    def sound(channel: Channel) -> None:
        inspect(channel)
        answered.set()

    def silent(channel: Channel) -> None:
        channel.receive(10)
        assert answered.wait(20)  # the limit is for this host alone
        monkeypatch.setattr("dtft.elastic.inspect_job.SILENCE_S", 0.3)
        channel.send({"progress": (0, 5)}, timeout_s=10)
        released.wait(20)

    def slow(channel: Channel) -> None:
        channel.receive(10)
        while not released.wait(0.05):
            channel.send({"progress": (0, 5)}, timeout_s=10)

    job.inspects[0], job.inspects[1] = sound, silent
    try:
        lines, well = verify_lines(verify_record(job.observer().look(Verification())))
        assert not well and any("no answer: h1: " in line for line in lines)
        assert any("told no progress for" in line for line in lines)
        monkeypatch.setattr("dtft.elastic.inspect_job.SILENCE_S", 20.0)
        assert lines[1].split()[0] == "h0" and lines[1].split()[-1] == "0"
        job.inspects[1] = slow
        for rate, limit in ((0, "1 s"), (10, "2 s")):
            asked = Verification(rate=rate, timeout_s=1.0 + 0.5 * bool(rate))
            state = job.observer().look(asked)
            assert f"not all copies were read in {limit}" in state.hosts[1].error
    finally:
        released.set()


def test_the_leader_is_asked_to_export(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job.observer().export() == 8
    job.store.put(job_key("j", "m/leader"), b"h0")
    with pytest.raises(RuntimeError, match="leader h0: No space left"):
        job.observer().export()
    monkeypatch.setattr("dtft.elastic.inspect_job.LEADER_S", 0.2)
    job.store.delete(job_key("j", "m/leader"))
    with pytest.raises(RuntimeError, match="has no leader at the moment"):
        job.observer().export()


def test_a_leader_that_changes_while_asked(job: Job) -> None:
    observer = job.observer()
    asked = threading.Event()

    def leads_no_more(answer: Answer) -> None:
        job.requests.add(99, answer)  # answered by nobody until the host is deposed
        asked.set()

    job.emits[1] = leads_no_more
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        export = pool.submit(observer.export)
        assert asked.wait(10)
        job.emits[0] = lambda answer: answer({"step": 12})
        job.store.put(job_key("j", "m/leader"), b"h0")
        job.requests.close()
        assert export.result(timeout=20) == 12
        job.store.put(job_key("j", "m/leader"), b"h1")
        asked.clear()
        export = pool.submit(observer.export)
        assert asked.wait(10)
        job.store.put(job_key("j", "m/leader"), b"h0")
        job.servers[1].close()  # the leader dies with the question
        assert export.result(timeout=20) == 12


def test_a_job_of_which_nobody_lives(job: Job) -> None:
    for slot in range(2):
        job.store.delete(job_key("j", f"m/hosts/h{slot}"))
    record = job_record(job.observer().look())
    text = "\n".join(job_lines(record))
    assert "no host of it is alive" in text and "step 7: " in text
    job.store.delete(job_key("j", "c/commits"))
    record = job_record(job.observer().look())
    assert "nothing is committed yet" in "\n".join(job_lines(record))
    assert verify_lines(record) == (["nothing is committed yet"], False)


def test_wrong_secret_and_wrong_name(job: Job) -> None:
    with pytest.raises(JobMismatch, match="is not that of job 'j'"):
        job.observer(secret=b"another secret...")
    with pytest.raises(ValueError, match="has no such job. It has: j"):
        job.observer(job="k")


def test_every_new_leader_is_asked_however_late_the_one_before_is_deposed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.elastic.inspect_job.LEADER_S", 1.0)
    asked = [threading.Event(), threading.Event()]

    def deposed(leader: int, successor: int) -> None:
        assert asked[leader].wait(10)
        asked[leader].clear()
        time.sleep(1.2)  # longer than a job may be without a leader
        job.store.delete(job_key("j", "m/leader"))
        job.store.put(job_key("j", "m/leader"), f"h{successor}".encode())
        job.requests.close()

    def works(slot: int, answer: Answer) -> None:
        job.requests.add(99, answer)
        asked[slot].set()

    job.emits = [functools.partial(works, slot) for slot in range(2)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        export = pool.submit(job.observer().export)
        deposed(1, successor=0)
        deposed(0, successor=1)
        assert asked[1].wait(10)
        job.requests.outcome(99, True, "")
        assert export.result(timeout=20) == 99


def test_a_leader_that_always_says_it_has_moved_is_given_up(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.elastic.inspect_job.LEADER_S", 0.5)
    job.emits[1] = lambda answer: answer({"error": "ask again", "moved": True})
    with pytest.raises(RuntimeError, match="leader h1: ask again"):
        job.observer().export()


def test_an_export_ends_in_time_however_often_the_leader_changes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtft.elastic.inspect_job.EXPORT_S", 1.5)
    monkeypatch.setattr("dtft.elastic.inspect_job.LEADER_PAUSE_S", 1.0)

    def moves(answer: Answer) -> None:
        job.store.delete(job_key("j", "m/leader"))
        job.store.put(job_key("j", "m/leader"), b"h1")  # another term
        answer({"error": "ask again", "moved": True})

    job.emits[1] = moves
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="leader h1: ask again"):
        job.observer().export()
    assert time.monotonic() - begun < 5
