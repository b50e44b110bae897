"""A job looked at from outside: real holders and sockets, no trainers."""

import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer
from dtft.cli.checkpoint import job_lines, job_record, verify_lines
from dtft.elastic.admission import JobMismatch, proof_of
from dtft.elastic.assignment import HostRecord
from dtft.elastic.host.inspection import serve_inspection
from dtft.elastic.inspect_job import Observer
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.export_requests import Answer, ExportRequests, serve_export
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import job_key
from dtft.elastic.transfer.replica_server import Inbox
from tests.checkpoint.hosts import stage
from tests.elastic.test_recovery import layout

SECRET = b"0123456789abcdef"
STATE = layout(2, 1)
CHUNK = 4096


class Job:
    """Two hosts that hold step 7, as the store tells of them."""

    def __init__(self, directory: Path) -> None:
        self.store, self.holders = MemoryStore(), []
        self.servers: list[TransportServer] = []
        self.emits: list[Callable[..., None]] = []
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
            config_digest="",
        )
        path = directory / f"arena-{slot}"
        holder = ReplicaStore(
            STATE, slot, place_copies(STATE, 2), path=path, chunk_bytes=CHUNK
        )
        stage(holder, 7, lambda key, size: bytes(size))
        keys = [piece.key for piece in holder.own_slices]
        digests = dict(zip(keys, holder.all_own_digests(7), strict=True))
        self.holders.append(holder)
        inbox = Inbox(epoch=lambda: (1, 1), holder=lambda: holder, held=lambda *_: None)

        def emit(answer: Answer) -> None:
            self.requests.add(7, answer)
            self.requests.outcome(6, True, "")  # an older step: not what was asked for
            self.requests.outcome(8, slot == 1, "No space left on device")

        self.emits.append(emit)
        server = TransportServer(
            "127.0.0.1:0",
            Credentials(job="j", secret=SECRET),
            {
                "inspect": lambda channel: serve_inspection(channel, config, inbox),
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
    lines, well = verify_lines(job_record(job.observer().look(verify=True)))
    assert well and "step 7: healthy" in lines[0]


def test_a_corrupt_copy_and_a_silent_host_are_named(job: Job) -> None:
    holder = job.holders[0]
    holder.own_parts(7, holder.own_slices[0]).views[0][3] ^= 1
    lines, well = verify_lines(job_record(job.observer().look(verify=True)))
    assert not well and lines[0].startswith("corrupt copy: h0 step 7: ")
    assert any("degraded" in line for line in lines)
    job.servers[1].close()
    lines, well = verify_lines(job_record(job.observer().look(verify=True)))
    assert not well and "no answer: h1" in lines


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
