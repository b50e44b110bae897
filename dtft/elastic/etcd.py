"""`EtcdStore`: the store spoken to through etcd's JSON gateway, with `http.client`.

Knows connections, errors and when to try again; `etcd_wire` has the spelling. Must not
know what the keys are used for.
"""

import contextlib
import http.client
import json
import logging
import math
import re
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from dtft.elastic.etcd_wire import (
    Stream,
    change_request,
    comparison,
    encode,
    event_value,
    has_input,
    key_value,
    next_position,
    prefix_range,
    put_request,
    refusal,
    shut,
)
from dtft.elastic.store import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    LeaseGone,
    Put,
    Resync,
    StoreUnavailable,
    check_changes,
)

logger = logging.getLogger(__name__)

_QUIET_S = 30.0  # a watch that hears nothing for so long connects again
_PAUSES_S = (0.1, 0.2, 0.4, 0.8)  # between attempts to connect a watch
_OLDEST_SAFE = (3, 5, 6)


def version_warning(version: str) -> str | None:
    """What to tell about this version of etcd; None if there is nothing to tell.

    >>> version_warning("3.5.9") is None
    True
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers >= _OLDEST_SAFE:
        return None
    return (
        f"etcd {version} can lose consistency when it is killed under load (etcd "
        "#13766). That is fine for tests and for the private store of one machine; a "
        "cluster needs 3.5.6 or later: upgrade it, or point --store at another."
    )


class EtcdStore:
    """A `Store` on etcd; keeps one connection per thread and one per watch."""

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        """Connects to nothing yet.

        Args:
            address: "host:port" of an etcd member, without a scheme.
            timeout_s: limit of each wait for the network.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            raise ValueError(
                f"store address {address!r}: must be host:port without a scheme, "
                "as in 127.0.0.1:2379. Change --store."
            )
        self._address, self._timeout_s = address, timeout_s
        self._target = (host.strip("[]"), int(port))
        self._connections: dict[threading.Thread, http.client.HTTPConnection] = {}
        self._lock = threading.Lock()
        self._closed = False

    def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        reply = self._call(f"get {key}", "kv/range", {"key": encode(key)})
        pairs = reply.get("kvs", [])
        return key_value(pairs[0]) if pairs else None

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """See `Store.list`."""
        reply = self._call(f"list {prefix}", "kv/range", prefix_range(prefix))
        pairs = [key_value(pair) for pair in reply.get("kvs", [])]
        return pairs, int(reply["header"]["revision"])

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """See `Store.put`."""
        put = Put(key=key, value=value, lease=lease)
        check_changes([put])
        body = put_request(put)
        self._call(f"put {key}", "kv/put", body, retry=False)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        body = {"key": encode(key)}
        self._call(f"delete {key}", "kv/deleterange", body, retry=False)

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See `Store.txn`."""
        check_changes(changes)
        body = {
            "compare": [comparison(compare) for compare in compares],
            "success": [change_request(change) for change in changes],
        }
        keys = ", ".join(it.key for it in [*compares, *changes])
        reply = self._call(f"txn on {keys}", "kv/txn", body, retry=False)
        return bool(reply.get("succeeded"))

    def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        if ttl_s <= 0:
            raise ValueError(f"ttl_s={ttl_s}: a lease needs more than 0 seconds.")
        # Safe to repeat: a lease that nobody heard of expires.
        body = {"TTL": str(math.ceil(ttl_s))}
        return int(self._call("grant", "lease/grant", body)["ID"])

    def keepalive(self, lease: int) -> float | None:
        """See `Store.keepalive`."""
        body = {"ID": str(lease)}
        reply = self._call(f"keepalive {lease}", "lease/keepalive", body)
        ttl = reply.get("result", {}).get("TTL")
        return float(ttl) if ttl is not None and int(ttl) > 0 else None

    def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        with contextlib.suppress(LeaseGone):
            self._call(f"revoke {lease}", "lease/revoke", {"ID": str(lease)})

    def watch(
        self, prefix: str, start_revision: int, stop: threading.Event
    ) -> Iterator[Events]:
        """See `Store.watch`."""
        position, failures = start_revision, 0
        while not self._ended(stop):
            try:
                with contextlib.closing(self._follow(prefix, position, stop)) as news:
                    for batch, reached in news:
                        position, failures = reached, 0
                        if batch or isinstance(batch, Resync):
                            yield batch
            except (OSError, LookupError, ValueError, StoreUnavailable) as error:
                if not failures:
                    logger.warning(
                        "store %s: watch %s: %s; trying again",
                        self._address,
                        prefix,
                        error,
                    )
                stop.wait(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1

    def compact(self, revision: int) -> None:
        """See `Store.compact`."""
        body = {"revision": str(revision), "physical": True}
        self._call("compact", "kv/compaction", body, retry=False)

    def reclaim(self) -> None:
        """See `Store.reclaim`: compacts, shrinks the file, takes the alarm back."""
        _, revision = self.list("/dtft/none/")
        try:
            self.compact(revision)
        except StoreUnavailable as error:  # compacted so far already
            logger.info("%s", error)
        self._call("defragment", "maintenance/defragment", {}, retry=False)
        raised = self._call("alarm", "maintenance/alarm", {"action": "GET"})
        for alarm in raised.get("alarms", []):
            if alarm.get("alarm") == "NOSPACE":
                body = {"action": "DEACTIVATE", **alarm}
                self._call("alarm", "maintenance/alarm", body, retry=False)

    def database_bytes(self) -> tuple[int, int]:
        """Size of the database file, and how much of it is in use."""
        reply = self._call("status", "maintenance/status", {})
        return int(reply["dbSize"]), int(reply.get("dbSizeInUse", 0))

    def status(self) -> str:
        """See `Store.status`; `version_warning` tells what to think of it."""
        return str(self._call("status", "maintenance/status", {})["version"])

    def peer_urls(self) -> frozenset[str]:
        """Where the members of this etcd meet; no other etcd has any of them."""
        members = self._call("members", "cluster/member/list", {}).get("members", [])
        return frozenset(url for it in members for url in it.get("peerURLs", []))

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            shut(connection)

    # ------------------------------------------------------------------ calls

    def _call(
        self, operation: str, path: str, body: dict[str, Any], *, retry: bool = True
    ) -> dict[str, Any]:
        """One request and its reply.

        With `retry` once more if a kept connection breaks. A call that must not happen
        twice goes without: `_connection` has seen to it that the socket is not stale.
        """
        connection = self._connection(operation)
        kept = connection.sock is not None
        try:
            raw = self._exchange(connection, path, body)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if kept and retry and not isinstance(error, TimeoutError):
                return self._call(operation, path, body, retry=False)
            raise self._unavailable(operation, error) from error
        if self._closed:  # meanwhile; it may have connected only after that
            connection.close()
        try:
            reply = json.loads(raw)
        except ValueError as error:
            raise self._unavailable(operation, f"reply {raw[:200]!r}") from error
        if "error" in reply:
            raise refusal(self._said(operation), reply)
        return reply

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
    ) -> bytes:
        connection.request("POST", f"/v3/{path}", json.dumps(body).encode())
        with connection.getresponse() as response:
            return response.read()

    def _connection(self, operation: str) -> http.client.HTTPConnection:
        """This thread's connection, closed if the other side has left it."""
        with self._lock:
            if self._closed:
                raise self._unavailable(operation, "this client is closed")
            thread = threading.current_thread()
            found = self._connections.get(thread)
            if found is None:
                for ended in [it for it in self._connections if not it.is_alive()]:
                    self._connections.pop(ended).close()
                # Connects on first use, with TCP_NODELAY; proxies are not looked at.
                found = http.client.HTTPConnection(
                    *self._target, timeout=self._timeout_s
                )
                self._connections[thread] = found
        if found.sock is not None and has_input(found.sock):
            found.close()  # idle, so input can only be its end
        return found

    def _unavailable(self, operation: str, cause: object) -> StoreUnavailable:
        if isinstance(cause, TimeoutError):
            cause = f"no answer within {self._timeout_s} s"
        return StoreUnavailable(f"{self._said(operation)}: {cause}")

    def _said(self, operation: str) -> str:
        return f"store {self._address}: {operation}"

    # ---------------------------------------------------------------- watches

    def _ended(self, stop: threading.Event) -> bool:
        return stop.is_set() or self._closed

    def _follow(
        self, prefix: str, position: int, stop: threading.Event
    ) -> Generator[tuple[Events, int], None, None]:
        """One connection's batches, each with the revision to go on from."""
        create = prefix_range(prefix) | {"progress_notify": True}
        body = {"create_request": create | {"start_revision": str(position)}}
        with Stream(self._target, self._timeout_s, body) as lines:
            while not self._ended(stop) and lines.quiet_s < _QUIET_S:
                message = lines.receive()
                if message is None:
                    continue
                if "error" in message:
                    raise refusal(self._said(f"watch {prefix}"), message)
                result = message["result"]
                resync = self._lost_history(prefix, position, result)
                if resync is not None:
                    yield resync, resync.revision + 1
                    return
                events = [event_value(event) for event in result.get("events", [])]
                position = next_position(position, result, events)
                yield events, position

    def _lost_history(
        self, prefix: str, position: int, result: dict[str, Any]
    ) -> Resync | None:
        """A listing, if the store cannot tell what happened since `position`."""
        revision = int(result["header"].get("revision", 0))
        if result.get("canceled"):
            if "compact_revision" not in result:
                raise StoreUnavailable(result.get("cancel_reason", "watch canceled"))
            return Resync(*self.list(prefix))
        if result.get("created") and revision + 1 < position:
            # A member that lags, or a store that lost its data: a listing is never old.
            listing = Resync(*self.list(prefix))
            return listing if listing.revision + 1 < position else None
        return None
