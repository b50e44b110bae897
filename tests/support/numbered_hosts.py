"""Hosts known by numbers, for slots to be filled with."""

from dtft.elastic.assignment import HostRecord


def record(number: int, incarnation: str = "a") -> HostRecord:
    """What host `number` says of itself; hosts joined in the order of numbers."""
    return HostRecord(
        host=f"host-{number}",
        address=f"127.0.0.1:{9000 + number}",
        incarnation=incarnation,
        joined_ns=number,
        pid=number,
    )


def entries(records: list[HostRecord]) -> list[tuple[str, str]]:
    """Who sat in the slots: names and incarnations."""
    return [(r.host, r.incarnation) for r in records]
