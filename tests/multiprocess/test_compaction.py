"""A store with a small quota takes commits without end."""

import contextlib
from pathlib import Path

import pytest

from benchmarks.etcd_commits import run
from dtft.elastic.store import membership as upkeep_module
from dtft.elastic.store.address import StoreAddress
from dtft.elastic.store.api import StoreFull, StoreUnavailable
from dtft.elastic.store.embedded import EmbeddedEtcd
from dtft.elastic.store.etcd import EtcdStore
from dtft.elastic.store.membership import (
    PERIOD_BYTES,
    PERIOD_WRITES,
    RECLAIM_PAUSE_S,
    Compaction,
)
from dtft.elastic.store.memory import MemoryStore

QUOTA = 8 << 20


class Counting(MemoryStore):
    """Writes down how it was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.compacted: list[int] = []
        self.reclaimed = 0

    def compact(self, revision: int) -> None:
        self.compacted.append(revision)
        super().compact(revision)

    def reclaim(self) -> None:
        self.reclaimed += 1


def test_between_one_and_two_periods_of_history_are_kept() -> None:
    store = Counting()
    compaction = Compaction(store)
    for number in range(1, 4 * PERIOD_WRITES + 1):
        store.put("/k", b"v")
        compaction.wrote(1)
        kept = number - (store.compacted[-1] - 1 if store.compacted else 0)
        assert kept <= 2 * PERIOD_WRITES
    assert len(store.compacted) == 3
    compaction.wrote(PERIOD_BYTES)  # large writes make a period by themselves
    assert len(store.compacted) == 4


class Refusing(Counting):
    """Refuses to compact a revision twice, as etcd does."""

    def compact(self, revision: int) -> None:
        if revision <= max(self.compacted, default=0):
            raise StoreUnavailable("required revision has been compacted")
        super().compact(revision)


def test_a_leader_that_leads_again_compacts_again() -> None:
    store = Refusing()
    first, second = Compaction(store), Compaction(store)
    for compaction, periods in ((first, 2), (second, 3), (first, 3)):
        before = len(store.compacted)
        for _ in range(periods):
            store.put("/k", b"v")
            compaction.wrote(PERIOD_BYTES)
        assert len(store.compacted) > before
    assert store.compacted[-1] == store.list("")[1] - 1


def test_a_store_is_not_made_smaller_again_and_again() -> None:
    now = [0.0]
    store = Counting()
    compaction = Compaction(store, lambda: now[0])
    compaction.reclaim()
    compaction.reclaim()
    assert store.reclaimed == 1
    now[0] += RECLAIM_PAUSE_S
    compaction.reclaim()
    assert store.reclaimed == 2


class Shared(Counting):
    """A store with other users."""

    @property
    def private(self) -> bool:
        return False


def test_a_shared_store_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    store = Shared()
    compaction = Compaction(store)
    for _ in range(3):
        compaction.wrote(PERIOD_BYTES)
        compaction.reclaim()
    assert not store.compacted and not store.reclaimed
    assert caplog.text.count("the store is full and has other users") == 1


def test_etcd_is_only_compacted_if_it_is_private() -> None:
    shared = EtcdStore("127.0.0.1:1")
    for call in (lambda: shared.compact(1), shared.reclaim):
        with pytest.raises(ValueError, match="other users.*--store-private"):
            call()


@pytest.mark.timeout(200)
def test_commits_of_many_hosts_stay_within_the_quota(tmp_path: Path) -> None:
    # 30 KiB a commit, of which two are kept: without compaction 150 of them fill 8 MiB.
    found = run(220, QUOTA, 2000, tmp_path, every=20)
    assert found["recorded"] == 220
    assert found["largest_database_bytes"] < QUOTA / 2


@pytest.mark.timeout(200)
def test_a_full_store_is_made_to_take_commits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep_module, "PERIOD_BYTES", 1 << 40)
    monkeypatch.setattr(upkeep_module, "PERIOD_WRITES", 1 << 40)
    found = run(220, QUOTA, 2000, tmp_path, every=1000)  # a third more than fit
    assert found["recorded"] == 220
    assert "the store is full" in caplog.text


def test_a_full_store_says_so(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path, quota_bytes=1 << 20)
    etcd.start()
    store = EtcdStore(StoreAddress.parse(etcd.address, private=True))
    with contextlib.closing(store):
        try:
            etcd.wait_ready()
            with pytest.raises(StoreFull, match="database space exceeded"):
                for _ in range(100):
                    store.put("/k", b"x" * 100_000)
            store.reclaim()
            store.put("/k", b"x" * 100_000)
        finally:
            etcd.stop()
