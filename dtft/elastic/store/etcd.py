"""`EtcdStore`: a `Store` client for etcd's JSON gateway.

A call tries the members one after the other until one answers; all attempts together
have one deadline. A request that must not be applied twice is not sent again once it
may have been applied. The module `etcd_wire` has the wire format and the sockets.
Deadlines in arguments (`end`, `limit`) are times of `time.monotonic` in seconds.

No gRPC client is used, because of the following comparison with two of them, made with
`python benchmarks/etcd_clients.py` on 2 cores. Its figures are in this order: this
module, aetcd 1.0, etcd-client-py 0.5.1.

* A commit takes 0.61, 0.46 and 0.48 ms. A watch reports a put after 0.61, 0.49 and 0.53
  ms. A transaction costs 0.21, 0.36 and 0.31 ms of processor time.
* With aetcd 19 of 90 children started with `preexec_fn` died of SIGSEGV before their
  exec, because gRPC's threads do not survive a fork.
* aetcd supports one address and no TLS. etcd-client-py supports no TLS, no start
  revision of a watch, no revision of a read and no lease of a put.
"""

import contextlib
import http.client
import json
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtft.elastic.store.address import StoreAddress, endpoint_text
from dtft.elastic.store.api import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    LeaseGone,
    Put,
    Resync,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    check_changes,
)
from dtft.elastic.store.etcd_wire import (
    Connection,
    EtcdStream,
    change_request,
    comparison,
    decode_reply,
    encode,
    error_text,
    event_value,
    key_value,
    may_answer_elsewhere,
    next_position,
    not_applied,
    prefix_range,
    put_request,
    refusal,
    tls_refusal,
    wants_token,
)

logger = logging.getLogger(__name__)

_QUIET_S = 30.0  # a watch that receives nothing for this time connects again
_ASK_S = 2.0  # a watch probes a member that sent nothing for this time
_PAUSES_S = (0.1, 0.2, 0.4, 0.8)  # between attempts to connect a watch
_ELECTION_PAUSE_S = 0.1  # between rounds of asking members that have no leader
_OLDEST_SAFE = (3, 5, 6)
_HEADERS = {"Grpc-Metadata-hasleader": "true"}
"""Request header that makes a member without a leader refuse requests and end
watches."""


def version_warning(version: str) -> str | None:
    """Returns a warning about an unsafe version of etcd; None for a safe version.

    Versions before 3.5.6 can lose their last writes when killed (etcd #13766).

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


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One request, which any member of etcd may answer.

    `operation` names the request in error texts, `path` is its URL path, and `body` its
    JSON.
    """

    operation: str
    path: str
    body: bytes = field(repr=False)
    repeat: bool
    """Whether the request may be sent again although it may have been applied."""


class _Elsewhere(Exception):
    """A member did not answer, or did not serve the call; another one may be tried."""

    def __init__(
        self,
        cause: str,
        *,
        passing: bool = False,
        refused: bool = False,
        waited_s: float = math.inf,
    ):
        """Makes the exception.

        Args:
            cause: reason, for the error message.
            passing: whether the failure may be temporary, so that a later attempt
                succeeds.
            refused: whether only a changed setting can help.
            waited_s: seconds waited if the member did not answer; infinity if the call
                failed otherwise.
        """
        super().__init__(cause)
        self.passing, self.refused = passing, refused
        self.waited_s = waited_s


class _Members:
    """The order in which calls try members, and when each member last answered."""

    def __init__(self, endpoints: Sequence[tuple[str, int]]) -> None:
        """Shuffles the members, so that clients spread over the members."""
        self._order = random.sample(endpoints, len(endpoints))
        self._heard: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def order(self) -> list[tuple[str, int]]:
        """Returns all members, (host, port), in the order in which calls try them."""
        with self._lock:
            return list(self._order)

    @property
    def first(self) -> tuple[str, int]:
        """The member (host, port) that calls and watches try first."""
        return self._order[0]

    def failed(self, endpoint: tuple[str, int]) -> None:
        """Moves a member to the end of the order, because a call to it failed."""
        with self._lock:
            self._order.sort(key=lambda other: other == endpoint)

    def answered(self, endpoint: tuple[str, int]) -> None:
        """Records that a member has answered."""
        self._heard[endpoint] = time.monotonic()

    def silent_s(self, endpoint: tuple[str, int]) -> float:
        """Returns seconds since the member last answered a call; infinity if never."""
        return time.monotonic() - self._heard.get(endpoint, -math.inf)


class EtcdStore:
    """A `Store` on etcd; keeps one connection per thread and one per watch.

    Keys in arguments and results do not include the address's prefix.
    """

    def __init__(self, address: StoreAddress | str, timeout_s: float = 2.0) -> None:
        """Opens no connection yet.

        Args:
            address: address of the cluster. A str is parsed by `StoreAddress.parse`,
                without TLS and without a user.
            timeout_s: limit of each call in seconds, over all members that it tries.
        """
        if isinstance(address, str):
            address = StoreAddress.parse(address)
        self._address, self._timeout_s = address, timeout_s
        self._context = address.context()
        self._below = address.prefix + "/"
        self._members = _Members(address.endpoints)
        self._connections: dict[threading.Thread, Connection] = {}
        self._tokens: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def private(self) -> bool:
        """Whether dtft is the store's only user, so its history may be dropped."""
        return self._address.private

    @property
    def endpoint(self) -> str:
        """The member "host:port" that calls and watches try first."""
        return endpoint_text(self._members.first)

    def get(self, key: str) -> KeyValue | None:
        """Reads a key; returns None if the key does not exist."""
        body = {"key": encode(self._below + key)}
        pairs = self._call(f"get {key}", "kv/range", body).get("kvs", [])
        return key_value(pairs[0], self._below) if pairs else None

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """Returns all pairs whose keys have `prefix`, and the store's revision.

        The pairs are sorted by key.
        """
        body = prefix_range(self._below + prefix)
        reply = self._call(f"list {prefix}", "kv/range", body)
        pairs = [key_value(pair, self._below) for pair in reply.get("kvs", [])]
        return pairs, int(reply["header"]["revision"])

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes one key; see `Store.put`."""
        put = Put(key=key, value=value, lease=lease)
        check_changes([put])
        body = put_request(put, self._below)
        self._call(f"put {key}", "kv/put", body, repeat=False)

    def delete(self, key: str) -> None:
        """Deletes one key; a missing key is no error."""
        body = {"key": encode(self._below + key)}
        self._call(f"delete {key}", "kv/deleterange", body, repeat=False)

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """Applies all changes if all compares hold; see `Store.txn`."""
        check_changes(changes)
        body = {
            "compare": [comparison(compare, self._below) for compare in compares],
            "success": [change_request(change, self._below) for change in changes],
        }
        keys = ", ".join(it.key for it in [*compares, *changes])
        reply = self._call(f"txn on {keys}", "kv/txn", body, repeat=False)
        return bool(reply.get("succeeded"))

    def grant(self, ttl_s: float) -> int:
        """Makes a lease of `ttl_s` seconds; see `Store.grant`."""
        if ttl_s <= 0:
            raise ValueError(f"ttl_s={ttl_s}: a lease needs more than 0 seconds.")
        # Safe to repeat: a lease whose id is lost expires.
        body = {"TTL": str(math.ceil(ttl_s))}
        return int(self._call("grant", "lease/grant", body)["ID"])

    def keepalive(self, lease: int) -> float | None:
        """Renews a lease; returns its remaining seconds, None if it has expired."""
        body = {"ID": str(lease)}
        reply = self._call(f"keepalive {lease}", "lease/keepalive", body)
        ttl = reply.get("result", {}).get("TTL")
        return float(ttl) if ttl is not None and int(ttl) > 0 else None

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; an expired lease is no error."""
        with contextlib.suppress(LeaseGone):
            self._call(f"revoke {lease}", "lease/revoke", {"ID": str(lease)})

    def watch(
        self,
        prefix: str,
        start_revision: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> Iterator[Events]:
        """Yields changes under `prefix` in order; see `Store.watch`."""
        position, failures = start_revision, 0
        while not self._ended(stop):
            endpoint = self._members.first
            try:
                news = self._follow(endpoint, prefix, position, stop, known)
                with contextlib.closing(news):
                    for batch, reached in news:
                        position, failures = reached, 0
                        if batch or isinstance(batch, Resync):
                            yield batch
            except (OSError, LookupError, ValueError, StoreUnavailable) as error:
                self._members.failed(endpoint)
                self._tokens.pop(endpoint, None)
                if not failures:
                    logger.warning(
                        "store %s: watch %s: %s; trying again",
                        endpoint_text(endpoint),
                        prefix,
                        error,
                    )
                stop.wait(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1

    def compact(self, revision: int) -> None:
        """Drops values that were replaced up to `revision`; see `Store.compact`."""
        self._check_private("compact")
        body = {"revision": str(revision), "physical": True}
        self._call("compact", "kv/compaction", body, repeat=False)

    def reclaim(self) -> None:
        """Frees space: compacts, defragments and clears the NOSPACE alarm.

        See `Store.reclaim`.
        """
        self._check_private("reclaim")
        _, revision = self.list("none/")
        try:
            self.compact(revision)
        except StoreUnavailable as error:  # etcd refuses to compact a revision twice
            logger.info("history not compacted before defragmentation: %s", error)
        self._call("defragment", "maintenance/defragment", {}, repeat=False)
        raised = self._call("alarm", "maintenance/alarm", {"action": "GET"})
        for alarm in raised.get("alarms", []):
            if alarm.get("alarm") == "NOSPACE":
                body = {"action": "DEACTIVATE", **alarm}
                self._call("alarm", "maintenance/alarm", body, repeat=False)

    def _check_private(self, operation: str) -> None:
        if not self.private:
            raise ValueError(
                f"{operation}: the etcd at {self._address} may have other users, and "
                "compaction forgets the history of all keys. Leave it to its operator, "
                "or give --store-private if dtft is its only user."
            )

    def database_bytes(self) -> tuple[int, int]:
        """Returns the size of the database file and the part in use, in bytes."""
        reply = self._call("status", "maintenance/status", {})
        return int(reply["dbSize"]), int(reply.get("dbSizeInUse", 0))

    def status(self) -> str:
        """Returns the version of etcd, such as "3.5.9"."""
        return str(self._call("status", "maintenance/status", {})["version"])

    def peer_urls(self) -> frozenset[str]:
        """Returns the peer URLs of this etcd's members, which identify the cluster."""
        members = self._call("members", "cluster/member/list", {}).get("members", [])
        return frozenset(url for it in members for url in it.get("peerURLs", []))

    def close(self) -> None:
        """Ends connections and watches; later calls raise StoreUnavailable."""
        with self._lock:
            self._closed = True
            connections = [*self._connections.values()]
            self._connections.clear()
        for connection in connections:
            connection.shut()

    # ------------------------------------------------------------------ calls

    def _call(
        self, operation: str, path: str, body: dict[str, Any], *, repeat: bool = True
    ) -> dict[str, Any]:
        """Sends one request to one member after the other; returns the first reply.

        The time left until the deadline is divided equally among the members that were
        not tried yet. If a failure may be temporary, such as an election, all members
        are tried again until the deadline.

        Args:
            operation: names the request in error texts.
            path: URL path of the request.
            body: the request, which is sent as JSON.
            repeat: whether the request may be sent again although it may have been
                applied.

        Raises:
            StoreUnavailable: no member replied in time, or a member refused.
            ValueError: the request is invalid.
        """
        payload = json.dumps(body).encode()
        call = _Call(operation=operation, path=path, body=payload, repeat=repeat)
        end = time.monotonic() + self._timeout_s
        problems: dict[str, _Elsewhere] = {}
        while True:
            passing = False
            order = self._members.order()
            for number, endpoint in enumerate(order):
                now = time.monotonic()
                limit = now + max(end - now, 0.0) / (len(order) - number)
                try:
                    return self._ask(endpoint, call, limit, end)
                except _Elsewhere as problem:
                    self._members.failed(endpoint)
                    passing |= problem.passing
                    # Prefer the error of an answer, then that of the longest wait.
                    known = problems.get(text := endpoint_text(endpoint))
                    if known is None or problem.waited_s >= known.waited_s:
                        problems[text] = problem
            if not passing or time.monotonic() + _ELECTION_PAUSE_S > end:
                raise self._unavailable(operation, problems)
            time.sleep(_ELECTION_PAUSE_S)

    def _ask(
        self, endpoint: tuple[str, int], call: _Call, limit: float, end: float
    ) -> dict[str, Any]:
        """Sends a request to one member; returns the reply.

        Tries a second time if a token has expired, or if a kept connection breaks and
        the call may be repeated.

        Args:
            endpoint: the member.
            call: the request.
            limit: time (`time.monotonic`) by which a repeatable call must have a reply,
                and by which any call must be connected.
            end: time by which a call that must not be repeated must have a reply.

        Raises:
            _Elsewhere: another member may be tried, because nothing was applied or the
                call may be repeated.
            StoreUnavailable: a call that must not be repeated may have been applied,
                the member refused the call, or this client is closed.
            ValueError: the request is invalid.
        """
        connection = self._connection(endpoint, call.operation)
        for last in (False, True):
            kept, sent, begun = connection.is_open, False, time.monotonic()
            wait_until = limit
            try:
                if not kept:
                    connection.open(limit)
                headers = self._headers(connection, call.operation, limit)
                sent, wait_until = True, limit if call.repeat else end
                answer = self._exchange(connection, call, headers, wait_until)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                broken = kept and not isinstance(error, TimeoutError)
                if broken and call.repeat and not last:
                    continue
                problem = self._problem(error, wait_until - begun)
                if not sent or call.repeat or self._closed:
                    raise problem from error
                self._members.failed(endpoint)
                text = endpoint_text(endpoint)
                raise self._unavailable(call.operation, {text: problem}) from error
            if self._closed:  # `close` may have run before the connection opened
                connection.close()
            reply = self._reply(endpoint, call, *answer)
            if reply is not None:
                self._members.answered(endpoint)
                return reply
            self._tokens.pop(endpoint, None)
        raise _Elsewhere("it takes none of the tokens that it gave", passing=True)

    def _exchange(
        self, connection: Connection, call: _Call, headers: dict[str, str], end: float
    ) -> tuple[int, bytes]:
        return connection.post(call.path, call.body, headers, end)

    def _reply(
        self, endpoint: tuple[str, int], call: _Call, status: int, body: bytes
    ) -> dict[str, Any] | None:
        """Parses a reply to `call`; returns None if it reports an invalid login token.

        `status` and `body` are the reply's HTTP status and body.

        Raises:
            _Elsewhere: another member may be tried.
            StoreUnavailable, ValueError: the member refused the request.
        """
        said = f"store {endpoint_text(endpoint)}: {call.operation}"
        reply = decode_reply(call.path, status, body)
        if "error" not in reply:
            return reply
        message = error_text(reply)
        if wants_token(message) and self._address.user:
            return None
        if not_applied(message):
            raise _Elsewhere(message, passing=True)
        if call.repeat and may_answer_elsewhere(reply):
            raise _Elsewhere(message, passing=True)
        raise refusal(said, reply)

    def _headers(
        self, connection: Connection, operation: str, end: float
    ) -> dict[str, str]:
        """Returns the headers of a request; logs in first if there is no token.

        Without a user there is no login. `operation` names the request in error texts.

        Raises:
            OSError: the login had no reply by `end`; the request was not sent.
            StoreRefused: the member refuses user and password, or the password cannot
                be read from its file.
            _Elsewhere: the member gave no token.
        """
        if not self._address.user:
            return _HEADERS
        token = self._tokens.get(connection.endpoint)
        if token is None:
            token = self._log_in(connection, operation, end)
            self._tokens[connection.endpoint] = token
        return {**_HEADERS, "Authorization": token}

    def _log_in(self, connection: Connection, operation: str, end: float) -> str:
        try:
            password = self._address.password()
        except ValueError as error:
            raise StoreRefused(f"store {self._address}: {error}") from error
        body = {"name": self._address.user, "password": password}
        call = _Call(
            operation=f"{operation}, as user {self._address.user}",
            path="auth/authenticate",
            body=json.dumps(body).encode(),
            repeat=True,
        )
        answer = self._exchange(connection, call, _HEADERS, end)
        reply = self._reply(connection.endpoint, call, *answer)
        if not reply or "token" not in reply:
            raise _Elsewhere("it gave no token")
        return str(reply["token"])

    def _connection(self, endpoint: tuple[str, int], operation: str) -> Connection:
        """Returns this thread's connection to a member, which may not be open yet.

        Closes the thread's connection to another member, and connections of ended
        threads. `operation` names the request in error texts.

        Raises:
            StoreUnavailable: this client is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(
                    f"store {self._address}: {operation}: this client is closed"
                )
            thread = threading.current_thread()
            found = self._connections.get(thread)
            if found is None:
                for ended in [it for it in self._connections if not it.is_alive()]:
                    self._connections.pop(ended).close()
            elif found.endpoint != endpoint:
                found.close()
                found = None
            if found is None:
                found = Connection(endpoint, self._context)
                self._connections[thread] = found
        return found

    def _problem(self, error: Exception, waited_s: float) -> _Elsewhere:
        """Makes the exception for a connection error, with the reason in words.

        `waited_s` is the number of seconds for which a reply was awaited.
        """
        if isinstance(error, TimeoutError):
            text = f"no answer within {waited_s:.2g} s"
            return _Elsewhere(text, passing=True, waited_s=waited_s)
        refused = ""
        if self._context is not None:
            refused = tls_refusal(error, self._address.certificate is not None)
        elif isinstance(error, http.client.RemoteDisconnected):
            return _Elsewhere(f"{error} (give --store-ca if it speaks TLS)")
        return _Elsewhere(refused or str(error) or repr(error), refused=bool(refused))

    def _unavailable(
        self, operation: str, problems: dict[str, _Elsewhere]
    ) -> StoreUnavailable:
        """Makes the error for a call that no member answered.

        The error is StoreRefused if every member refuses this client, else
        StoreUnavailable. `problems` maps each member, "host:port", to its error.
        `operation` names the request in the error text.
        """
        refused = all(problem.refused for problem in problems.values())
        kind = StoreRefused if refused else StoreUnavailable
        causes = {str(problem) for problem in problems.values()}
        if len(causes) == 1:
            return kind(f"store {','.join(problems)}: {operation}: {causes.pop()}")
        told = "; ".join(f"{endpoint}: {it}" for endpoint, it in problems.items())
        return kind(f"store {self._address}: {operation}: {told}")

    # ---------------------------------------------------------------- watches

    def _ended(self, stop: threading.Event) -> bool:
        return stop.is_set() or self._closed

    def _follow(
        self,
        endpoint: tuple[str, int],
        prefix: str,
        position: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]],
    ) -> Generator[tuple[Events, int], None, None]:
        """Yields a watch's batches from one member, each with the next start revision.

        A later watch continues at the revision that came with the last batch. Ends
        without an error when the watch is stopped, after a `Resync` (a batch with all
        keys), after 30 s (`_QUIET_S`) without received bytes, and once a failed call
        has made another member the first one that calls try.

        Args:
            endpoint: host and port of the member.
            prefix: prefix of the watched keys.
            position: revision of the first event.
            stop: event that ends the watch.
            known: returns conditions that fail if the store has lost data.

        Raises:
            StoreUnavailable, OSError, ValueError: the connection or the watch failed.
        """
        create = prefix_range(self._below + prefix) | {"progress_notify": True}
        body = {"create_request": create | {"start_revision": str(position)}}
        with self._stream(endpoint, prefix, body) as lines:
            while not self._ended(stop) and lines.quiet_s < _QUIET_S:
                message = lines.receive()
                if message is None:
                    self._see_to(endpoint, lines.quiet_s)
                    if endpoint != self._members.first:
                        return
                    continue
                if "error" in message:
                    said = f"store {endpoint_text(endpoint)}: watch {prefix}"
                    raise refusal(said, message)
                result = message["result"]
                resync = self._lost_history(prefix, position, result, known)
                if resync is not None:
                    yield resync, resync.revision + 1
                    return
                sent = [
                    event_value(event, self._below)
                    for event in result.get("events", [])
                ]
                # A member that lags behind `position` sends earlier events, too (etcd
                # issue 20221).
                events = [it for it in sent if it.kv.mod_revision >= position]
                position = max(position, next_position(position, result, sent))
                yield events, position

    def _stream(
        self, endpoint: tuple[str, int], prefix: str, body: dict[str, Any]
    ) -> EtcdStream:
        """Opens a watch's connection to one member; logs in if there is a user.

        Waits at most for the timeout of a call, divided by the number of members.

        Args:
            endpoint: host and port of the member.
            prefix: prefix of the watched keys, for error texts.
            body: the watch request.

        Raises:
            StoreUnavailable: there is no connection in time, or the member refuses.
        """
        share_s = self._timeout_s / len(self._address.endpoints)
        end = time.monotonic() + share_s
        headers = _HEADERS
        try:
            if self._address.user:
                connection = self._connection(endpoint, f"watch {prefix}")
                if not connection.is_open:
                    connection.open(end)
                headers = self._headers(connection, f"watch {prefix}", end)
            return EtcdStream(endpoint, self._context, body, headers, end)
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(str(self._problem(error, share_s))) from error
        except _Elsewhere as problem:
            raise StoreUnavailable(str(problem)) from problem

    def _see_to(self, endpoint: tuple[str, int], quiet_s: float) -> None:
        """Probes a member after 2 s of silence (`_ASK_S`) with a call.

        Does nothing if the cluster has no other member, or if the member has answered a
        call in these 2 s. `quiet_s` is the number of seconds for which the watch has
        received nothing.

        A watch without events is silent too, so only a call can detect that a member is
        stopped or cut off. A failed call moves calls and watches to the next member.
        """
        alone = len(self._address.endpoints) == 1
        if alone or min(quiet_s, self._members.silent_s(endpoint)) < _ASK_S:
            return
        with contextlib.suppress(StoreUnavailable):
            self._call("ask", "kv/range", {"key": encode(self._below + "none")})

    def _lost_history(
        self,
        prefix: str,
        position: int,
        result: dict[str, Any],
        known: Callable[[], Sequence[Compare]],
    ) -> Resync | None:
        """Lists all keys if the store may no longer have events that the watch needs.

        Returns the listing as a `Resync`, which the watch then yields. Returns None if
        no event is missing, so the watch can go on.

        Args:
            prefix: prefix of the watched keys.
            position: revision of the first event that the watch needs.
            result: field `result` of the watch's newest message.
            known: returns conditions that fail if the store has lost data; see
                `Store.watch`.

        Raises:
            StoreUnavailable: the store canceled the watch for another reason, or the
                keys cannot be listed.
        """
        revision = int(result["header"].get("revision", 0))
        if result.get("canceled"):
            if "compact_revision" not in result:
                raise StoreUnavailable(result.get("cancel_reason", "watch canceled"))
            return Resync(*self.list(prefix))
        if result.get("created") and revision + 1 < position:
            # Either a member lags or the store lost data. A listing is never stale.
            listing = Resync(*self.list(prefix))
            if listing.revision + 1 < position:
                return listing
        if result.get("created") and position and (compares := known()):
            # A store that lost data may have made more revisions than before. But it is
            # not full; before 3.5.7, a full etcd also refuses to compare.
            with contextlib.suppress(StoreFull):
                if not self.txn(compares, []):
                    return Resync(*self.list(prefix))
        return None
