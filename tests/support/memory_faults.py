"""One bit that flips in the memory of a host, between any two uses of it.

Whatever flips, and whenever: a load gives the right bytes or refuses, a peer that
fetches is told or gets them from elsewhere, and an audit names just what is wrong.
"""

import random
from collections.abc import Callable

import jax
import numpy as np

from dtft.checkpoint.memory.snapshot import CorruptCopy, SnapshotPlan
from dtft.checkpoint.state.digests import Parts, chunk_digests, pack_flags
from tests.support.fault_bench import STEP, Bench
from tests.support.fault_proxy import Fault
from tests.support.hosts import CHUNK, Host, content, digests_of


def flip(memory: Parts, rng: random.Random) -> None:
    """Flips one bit."""
    at = rng.randrange(len(memory) * 8)
    (byte,) = memory.cut(at // 8, at // 8 + 1)
    byte[0] ^= 1 << at % 8


def loads(host: Host, step: int) -> bool:
    """Whether a trainer can load a step; what it loads must be right.

    Raises:
        AssertionError: it is not.
    """
    holder, here = host.holder, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plan = SnapshotPlan(holder.layout, host.slot, CHUNK)
    abstract = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=here)
        for leaf in holder.layout.leaves
    }
    memory = holder.arena.view(0, holder.arena.size)
    buffers = np.frombuffer(holder.own_buffers(step), np.uint8)
    try:
        found = plan.read(memory, buffers, holder.all_own_digests(step), abstract)
    except CorruptCopy as error:
        assert "does not match its digest" in str(error)
        return False
    for piece in holder.own_slices:
        right = content(step, piece.key, piece.nbytes)
        assert np.asarray(found[piece.path]).tobytes() == right, piece.key
    return True


def own_bytes(bench: Bench, rng: random.Random) -> str:
    """What a trainer staged, before it is loaded."""
    host = rng.choice(bench.peers)
    piece = rng.choice([p for p in host.holder.own_slices if p.nbytes])
    flip(host.holder.own_parts(STEP, piece), rng)
    named = host.holder.holdings()[1]
    noticed = not loads(host, STEP) and named == [f"step {STEP}: {piece.key}"]
    host.stage(STEP)
    return "detected" if noticed and loads(host, STEP) else "silent"


def own_digest(bench: Bench, rng: random.Random) -> str:
    """A digest that was kept since the snapshot."""
    host = rng.choice(bench.peers)
    digests = [bytearray(one) for one in host.holder.all_own_digests(STEP)]
    number = rng.randrange(len(digests))
    flip(Parts([memoryview(digests[number])]), rng)
    host.holder.begin_stage(STEP)
    kept = pack_flags(np.ones(host.holder.map.own.num_chunks, bool))
    host.holder.staged(STEP, [bytes(one) for one in digests], {}, kept)
    key = host.holder.own_slices[number].key
    named = host.holder.holdings()[1]
    noticed = not loads(host, STEP) and named == [f"step {STEP}: {key}"]
    host.stage(STEP)
    return "detected" if noticed and loads(host, STEP) else "silent"


def sent_bytes(bench: Bench, rng: random.Random) -> str:
    """What a trainer staged, before it is pushed: the receiver has its digests."""
    step, holder = bench.step + 1, bench.sender.holder
    bench.sender.stage(step)
    pieces = [p for p in holder.outgoing[0].slices if p.nbytes]
    flip(holder.own_parts(step, rng.choice(pieces)), rng)
    usual = bench.sender.stage
    bench.sender.stage = lambda step: None
    try:
        arrived = bench.pushed(bench.receiver.address, 1, 0.2, 0.2)
    finally:
        bench.sender.stage = usual
    return "silent" if arrived else bench.push_again()


def hosted_bytes(bench: Bench, rng: random.Random) -> str:
    """A peer's copy that arrived well, before it is needed."""
    if bench.push_again() != "detected":
        return "lost: no push arrives any more"
    step, holder = bench.step, bench.receiver.holder
    keys = [p.key for p in holder.map.incoming[0].slices if p.nbytes]
    key = rng.choice(keys)
    (view,) = holder.find(step, [key])
    flip(view, rng)
    named = holder.holdings()[1] == [f"step {step}: {key}"]
    refused = not holder.has_received(step, 0, holder_digests(bench, step))
    holder.drop_before(step + 1, keep=set())
    bench.sender.holder.drop_before(step + 1, keep=set())
    return "detected" if named and refused else "silent"


def holder_digests(bench: Bench, step: int) -> list[bytes]:
    """The digests that came with a push."""
    pieces = bench.receiver.holder.map.incoming[0].slices
    return [chunk_digests(content(step, p.key, p.nbytes), CHUNK) for p in pieces]


def ordered_digest(bench: Bench, rng: random.Random) -> str:
    """A digest in the leader's order to restore."""
    digests = digests_of(bench.lost, STEP)
    key = rng.choice(sorted(digests))
    changed = bytearray(digests[key])
    flip(Parts([memoryview(changed)]), rng)
    told = bench.refused(
        lambda outcome: any(key in text for text in outcome["corrupt"]),
        digests=digests | {key: bytes(changed)},
    )
    return bench.fetch_again() if told else "silent"


def during_fetch(bench: Bench, rng: random.Random, source: bool) -> str:
    """While a host fetches: in the peer's memory, or in what it has received."""
    host = bench.peers[0] if source else bench.lost
    pieces = [p for p in host.holder.own_slices if p.path == "big"]
    fault = bench.fault("fetch", "memory", rng)
    fault = Fault(kind="memory", place=fault.place)
    with bench.proxy("fetch", fault) as proxy:
        proxy.on_fault = lambda: flip(host.holder.own_parts(STEP, pieces[0]), rng)
        outcome = bench.restore([proxy.address, bench.peers[1].address])
        fired = proxy.fired.is_set()
    if source:
        host.stage(STEP)  # another's copy is as good as ever
    if not fired and "error" not in outcome:
        return "not reached"
    if fired and "error" not in outcome and loads(bench.lost, STEP):
        return "survived"
    again = bench.fetch_again()  # the next case needs what was restored
    return again if fired or again != "detected" else "not reached"


FAULTS: dict[str, Callable[[Bench, random.Random], str]] = {
    "staged bytes": own_bytes,
    "staged digest": own_digest,
    "bytes to push": sent_bytes,
    "hosted bytes": hosted_bytes,
    "ordered digest": ordered_digest,
    "source in fetch": lambda bench, rng: during_fetch(bench, rng, True),
    "target in fetch": lambda bench, rng: during_fetch(bench, rng, False),
}


def in_memory(bench: Bench, rng: random.Random) -> tuple[str, str, bool]:
    """One bit somewhere; returns what it was in, and what came of it."""
    kind = rng.choice(sorted(FAULTS))
    result = FAULTS[kind](bench, rng)
    if result in ("survived", "detected") and not loads(bench.lost, STEP):
        result = "lost: the restored state does not load"
    return kind, result, result != "not reached"
