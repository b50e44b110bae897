"""Whom to believe where hosts contradict each other about a commit's bytes. Pure.

Each host has checked its bytes against its own digests, so a flipped bit is no claim; a
host that keeps another step's bytes under the commit's number is. The commit's root
digest says which claims are of it. Must not know layouts, nor what is done with a host.
"""

from collections.abc import Mapping, Sequence

from dtft.checkpoint.digest import digest_root

Claims = Mapping[str, Mapping[bytes, Sequence[str]]]
"""Slice key -> digest -> the hosts that say so."""

MAX_SUSPECTS = 16
"""So many hosts are left out in turn, where hosts contradict each other."""


def adding_up(root: str, claims: Claims) -> dict[str, bytes] | None:
    """The digest of each slice that the commit is of; None if that is not found.

    What most hosts say; with two copies of a slice there is no majority. One host that
    is wrong, in as many slices as it likes, is then found by leaving it out.

    Args:
        root: digest over the digests of all slices, from the commit.
        claims: of every slice.

    >>> right, wrong = {"u": b"1", "v": b"2"}, {"u": b"1", "v": b"3"}
    >>> told = {"u": {b"1": ["a", "b"]}, "v": {b"3": ["a"], b"2": ["b"]}}
    >>> adding_up(digest_root(right.items()), told) == right
    True
    >>> adding_up(digest_root({"u": b"9"}.items()), told) is None
    True
    """
    most = _most(claims, "")
    if digest_root(most.items()) == root:
        return most
    disputed = {key: told for key, told in claims.items() if len(told) > 1}
    lists = [hosts for told in disputed.values() for hosts in told.values()]
    for host in sorted({host for hosts in lists for host in hosts})[:MAX_SUSPECTS]:
        chosen = most | _most(disputed, host)
        if digest_root(chosen.items()) == root:
            return chosen
    return None


def _most(claims: Claims, without: str) -> dict[str, bytes]:
    """What most hosts say of each slice, but for one of them."""
    return {
        key: max(told, key=lambda value: sum(host != without for host in told[value]))
        if len(told) > 1
        else next(iter(told))
        for key, told in claims.items()
    }


def dissenters(claims: Claims, chosen: Mapping[str, bytes]) -> tuple[str, ...]:
    """The hosts that say something else of some slice.

    >>> dissenters({"v": {b"3": ["a"], b"2": ["b"]}}, {"v": b"2"})
    ('a',)
    """
    odd = {
        host
        for key, told in claims.items()
        if len(told) > 1
        for value, hosts in told.items()
        if value != chosen[key]
        for host in hosts
    }
    return tuple(sorted(odd))
