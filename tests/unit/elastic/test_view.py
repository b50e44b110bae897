"""What a view reads from the keys of a job, and how views are ordered."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.store.api import Delete
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View, ViewReader, job_key, read_commits, read_view
from tests.support.desks import ASSIGNMENT, record_of


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def put(store: MemoryStore, name: str, text: str, lease: int = 0) -> None:
    store.put(job_key("j", name), text.encode(), lease=lease)


def test_an_empty_store_has_an_empty_view(store: MemoryStore) -> None:
    view, revision = read_view(store, "j")
    assert view == View(revision=revision)
    assert view.term == 0 and view.age == (0, revision)
    assert read_commits(store, "j") == ()


def test_every_key_is_read(store: MemoryStore) -> None:
    lease = store.grant(9.0)
    put(store, "m/hosts/a", record_of("a").to_json(), lease)
    put(store, "m/leader", "a", lease)
    created = store.list("")[1]
    put(store, "m/leader", "a", lease)
    put(store, "m/led", "a")
    led = store.list("")[1]
    era = json.dumps({"era": 3, "id": "x"})
    put(store, "m/era", era)
    put(store, "m/assignment", ASSIGNMENT.to_json())
    put(store, "m/stored", "40")
    put(store, "m/stop", "1")
    put(store, "m/budget", '{"exit": 2}')
    put(store, "m/result", '{"status": "done"}')
    put(store, "c/commits", "")  # of another kind
    view, revision = read_view(store, "j")
    assert view.hosts == {"a": record_of("a")} and view.leases == {"a": lease}
    assert (view.leader, view.leader_lease) == ("a", lease)
    assert view.leader_revision == created  # of the key, not of its last write
    assert (view.last_led, view.last_led_revision) == ("a", led)
    assert (view.era, view.era_value) == (3, era.encode())
    assert view.age == (3, revision)
    assert view.assignment == ASSIGNMENT and view.stored == 40 and view.stop
    assert view.budget == '{"exit": 2}' and view.result == '{"status": "done"}'


def test_other_jobs_are_not_seen(store: MemoryStore) -> None:
    store.put(job_key("jj", "m/leader"), b"a")
    store.put(job_key("k", "m/stop"), b"1")
    view, _ = read_view(store, "j")
    assert view.leader is None and not view.stop


@pytest.mark.parametrize("text", ["", "[]", '{"host": "b"}', '{"host": 7, "x": 1}'])
def test_a_record_that_is_none_is_left_out(
    store: MemoryStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, "m/hosts/a", record_of("a").to_json())
    put(store, "m/hosts/b", text)
    assert set(read_view(store, "j")[0].hosts) == {"a"}
    assert "hosts/b" in caplog.text


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 10**9)),
    st.tuples(st.integers(0, 9), st.integers(0, 10**9)),
)
def test_a_term_of_a_later_era_is_larger(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    """Also where the store that came back counts its revisions from the start."""
    terms = [View(era=era, leader_revision=at).term for era, at in (one, other)]
    assert (terms[0] < terms[1]) == (one < other)


def test_a_view_is_of_its_pairs_alone() -> None:
    assert ViewReader("j").view([], 7) == View(revision=7)


def test_what_changed_or_went_is_read_anew(store: MemoryStore) -> None:
    reader, names = ViewReader("j"), ["a", "b", "c"]
    for name in names:
        put(store, f"m/hosts/{name}", record_of(name).to_json())
    before = reader.view(*store.list("j/m/"))
    put(store, "m/hosts/b", record_of("b", incarnation="new.1").to_json())
    store.txn([], [Delete(key="j/m/hosts/c")])
    after = reader.view(*store.list("j/m/"))
    assert after.hosts["a"] is before.hosts["a"]
    assert after.hosts["b"].incarnation == "new.1" and "c" not in after.hosts
    assert after == read_view(store, "j")[0]  # as if nothing had been read before
    put(store, "m/hosts/c", "{}")
    assert "c" not in reader.view(*store.list("j/m/")).hosts


@pytest.mark.parametrize(
    "name", ["hosts/a", "leader", "led", "assignment", "stored", "size", "era"]
)
@pytest.mark.parametrize("value", [b"\xff", b"[]", b'{"host": 5}', b"7a"])
def test_what_cannot_be_read_is_left_out(
    store: MemoryStore, name: str, value: bytes
) -> None:
    store.put(job_key("j", f"m/{name}"), value)
    store.put(job_key("j", "m/stop"), b"1")
    view, _ = read_view(store, "j")
    assert view.stop and not view.hosts and view.assignment is None


def test_a_record_with_a_field_of_another_kind_is_left_out(store: MemoryStore) -> None:
    told = json.loads(record_of("a").to_json()) | {"incarnation": 7}
    put(store, "m/hosts/a", json.dumps(told))
    assert read_view(store, "j")[0].hosts == {}


@pytest.mark.parametrize("value", [b"\xff", b"{}", b"[1]", b"nothing"])
def test_commits_that_cannot_be_read_are_none(store: MemoryStore, value: bytes) -> None:
    store.put(job_key("j", "c/commits"), value)
    assert read_commits(store, "j") == ()
