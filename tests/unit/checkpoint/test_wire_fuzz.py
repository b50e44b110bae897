"""A short run of the fuzzer, and headers that hypothesis thinks up."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fuzz_inputs, wire_fuzz
from tests.support.fuzz_inputs import STEP, Member
from tests.support.hosts import EPOCH, divided, hosts
from tests.support.wire_fuzz import Target

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary()
values = st.recursive(
    scalars | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner),
    max_leaves=8,
)
numbers = st.sampled_from([0, 1, STEP, -1, 3, 2**63]) | values


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    with wire_fuzz.guarded_arenas(), hosts(folder, divided(2)) as (_, host):
        yield Target(host)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert caplog.records == []  # no handler failed


def test_seeded_inputs(tmp_path: Path) -> None:
    counts = wire_fuzz.run(1500, seed=1, folder=tmp_path)
    assert sum(counts.values()) == 1500
    assert set(counts) - {"bomb"} == {kind.__name__ for kind in fuzz_inputs.KINDS}


def test_headers_that_stand_for_much(target: Target) -> None:
    for number in range(10):
        target.serve(fuzz_inputs.bomb(random.Random(number), target.host))
    target.check()


@given(
    st.fixed_dictionaries(
        {"op": st.just("push")},
        optional={
            "epoch": st.just(EPOCH) | values,
            "source": numbers,
            "step": numbers,
            "digests": st.lists(st.binary(max_size=20), max_size=5) | values,
            "items": st.dictionaries(st.text(max_size=3), values, max_size=2) | values,
        },
    ),
    st.lists(st.integers(-1, 60), max_size=3) | values,
    st.binary(max_size=50),
)
@settings(max_examples=100, deadline=None)
def test_any_push_leaves_what_is_verified(
    target: Target, header: dict, chunks: object, payload: bytes
) -> None:
    def say(member: Member) -> None:
        member.frame({"op": "push"})
        member.frame(header)
        member.frame({"chunks": chunks}, payload)
        member.frame({"end": True})

    before = target.fingerprint()
    target.serve(Member(say).stream)
    assert target.fingerprint() == before  # none of these has the right bytes
    assert target.host.wrong() == []


@given(values, st.lists(st.lists(numbers, max_size=4) | values, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_fetch_only_reads(target: Target, keys: object, parts: list) -> None:
    own = [piece.key for piece in target.host.holder.own_slices]

    def say(member: Member) -> None:
        member.frame({"op": "fetch"})
        member.frame({"step": STEP, "epoch": EPOCH, "keys": keys if parts else own})
        member.frame({"parts": parts})

    before = target.fingerprint()
    target.serve(Member(say).stream)
    assert target.fingerprint() == before
    assert target.host.wrong() == []


def test_after_all_of_it_the_server_serves(target: Target) -> None:
    target.check()
