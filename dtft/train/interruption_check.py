"""How a drill reports what lasted: stopped hosts, a paused store, busy event loops.

Reads what strikes saw and what agents wrote at their end; runs and changes nothing.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.elastic.faults import INTERRUPTIONS, Strike

Span = tuple[float, float]
"""Wall-clock times: begin and end."""


def fault_fields(strike: Strike) -> dict[str, Any]:
    """What the record says of a fault that lasts; nothing of one that does not.

    `stopped_s`: null where it was never ended. `killed_after_s`: when somebody had
    killed what was stopped.
    """
    if strike.fault.kind not in INTERRUPTIONS:
        return {}
    entry: dict[str, Any] = {
        "until": strike.until,
        "stopped_s": None if strike.until is None else strike.until - strike.at,
    }
    if strike.gone_s is not None:
        entry["killed_after_s"] = round(strike.gone_s, 3)
    if strike.fault.kind == "pause-store":
        entry["steps_per_s"] = strike.steps_per_s
        entry["steps_per_s_during"] = strike.steps_per_s_during
    return entry


def agents(faulted: Path, strikes: Sequence[Strike]) -> dict[str, dict[str, Any]]:
    """The longest call of each host's event loop, the time it was stopped left out.

    Agents write `loop-HOST.json` when they end: `host`, and in `calls` their longest
    calls, each with `what`, `seconds`, and `at`, the wall-clock time it began.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(faulted.glob("loop-*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
            said = json.loads(path.read_text())
            stops = _stops(said["host"], strikes)
            found[said["host"]] = longest_call(said["calls"], stops)
    return found


def _stops(host: str, strikes: Sequence[Strike]) -> list[Span]:
    """When a host's agent was stopped."""
    return [
        (strike.at, strike.until or float("inf"))
        for strike in strikes
        if host in strike.hosts and strike.fault.kind in ("stop-agent", "stop-host")
    ]


def longest_call(
    calls: Sequence[dict[str, Any]], stops: Sequence[Span]
) -> dict[str, Any]:
    """The longest of an event loop's calls, without the time its process was stopped.

    >>> calls = [{"what": "tick", "seconds": 10.5, "at": 100.25},
    ...          {"what": "view", "seconds": 0.75, "at": 90.0}]
    >>> longest_call(calls, [(100.5, 110.5)])
    {'longest_call_s': 0.75, 'what': 'view'}
    """
    found = {"longest_call_s": 0.0, "what": ""}
    for call in calls:
        seconds = float(call["seconds"])
        begun, ended = call["at"], call["at"] + seconds
        for first, last in stops:
            seconds -= max(0.0, min(last, ended) - max(first, begun))
        if seconds > found["longest_call_s"]:
            found = {"longest_call_s": round(seconds, 4), "what": call["what"]}
    return found


def lines(record: dict[str, Any]) -> list[str]:
    """What a drill's record says of this, for people."""
    said = []
    for entry in record["faults"]:
        if "stopped_s" not in entry:
            continue
        whom = ", ".join(entry["hosts"]) or "the store"
        took = entry["stopped_s"]
        lasted = "for ever" if took is None else f"for {took:.1f} s"
        line = f"dtft: {entry['fault']}: {whom} {lasted}"
        if "killed_after_s" in entry:
            line += f", killed by its agent after {entry['killed_after_s']:.1f} s"
        if entry.get("steps_per_s") and entry.get("steps_per_s_during") is not None:
            line += (
                f"; {entry['steps_per_s']:.1f} steps per second before, "
                f"{entry['steps_per_s_during']:.1f} meanwhile"
            )
        said.append(line)
    if record.get("agents"):
        host, worst = max(
            record["agents"].items(), key=lambda item: item[1]["longest_call_s"]
        )
        said.append(
            f"dtft: longest call of an agent's event loop: "
            f"{1e3 * worst['longest_call_s']:.0f} ms ({worst['what']} on {host})"
        )
    return said + [
        f"dtft: LEFT BEHIND: {name}" for name in record.get("left_behind", ())
    ]
