"""Transport between hosts: authenticated connections, pushes and fetches of slices.

* `dialing`: parses and connects to addresses.
* `protocol`: encodes and checks frames (messages of a header and a payload) and the
  handshake, without I/O.
* `connection`: one socket that sends and receives frames.
* `server`: opens and serves authenticated connections.
* `outbound`: queues messages, so that the sender never waits.
* `push`, `fetch`: send slices to a peer and read slices from a peer, with a digest per
  chunk.
* `rdma`: reads slices from a peer's memory through NIXL.
* `bench`: `dtft bench transport`.

The caller decides which slices are sent to which host. The package does not import JAX.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.transport.bench import TransportBench, bench_transport
    from dtft.checkpoint.transport.connection import (
        Channel,
        ChannelClosed,
        check_tls,
        no_payload,
    )
    from dtft.checkpoint.transport.dialing import (
        dial,
        format_address,
        is_loopback,
        local_host,
        parse_address,
        with_port,
    )
    from dtft.checkpoint.transport.fetch import (
        STREAMS,
        FetchError,
        fetch_slices,
        serve_fetches,
        streams_each,
    )
    from dtft.checkpoint.transport.outbound import Outbound
    from dtft.checkpoint.transport.protocol import (
        MAX_DATA_HEADER,
        MAX_REQUEST_HEADER,
        AuthenticationError,
        Credentials,
        Packed,
        Tls,
        WireError,
    )
    from dtft.checkpoint.transport.push import (
        Outgoing,
        PushPace,
        receive_chunks,
        send_push,
    )
    from dtft.checkpoint.transport.rdma import Nixl, start_nixl
    from dtft.checkpoint.transport.server import TransportServer, connect

_PUBLIC = {
    "AuthenticationError": "protocol",
    "Channel": "connection",
    "ChannelClosed": "connection",
    "Credentials": "protocol",
    "FetchError": "fetch",
    "MAX_DATA_HEADER": "protocol",
    "MAX_REQUEST_HEADER": "protocol",
    "Nixl": "rdma",
    "Outbound": "outbound",
    "Outgoing": "push",
    "Packed": "protocol",
    "PushPace": "push",
    "STREAMS": "fetch",
    "Tls": "protocol",
    "TransportBench": "bench",
    "TransportServer": "server",
    "WireError": "protocol",
    "bench_transport": "bench",
    "check_tls": "connection",
    "connect": "server",
    "dial": "dialing",
    "fetch_slices": "fetch",
    "format_address": "dialing",
    "is_loopback": "dialing",
    "local_host": "dialing",
    "no_payload": "connection",
    "parse_address": "dialing",
    "receive_chunks": "push",
    "send_push": "push",
    "serve_fetches": "fetch",
    "start_nixl": "rdma",
    "streams_each": "fetch",
    "with_port": "dialing",
}

__all__ = [
    "AuthenticationError",
    "Channel",
    "ChannelClosed",
    "Credentials",
    "FetchError",
    "MAX_DATA_HEADER",
    "MAX_REQUEST_HEADER",
    "Nixl",
    "Outbound",
    "Outgoing",
    "Packed",
    "PushPace",
    "STREAMS",
    "Tls",
    "TransportBench",
    "TransportServer",
    "WireError",
    "bench_transport",
    "check_tls",
    "connect",
    "dial",
    "fetch_slices",
    "format_address",
    "is_loopback",
    "local_host",
    "no_payload",
    "parse_address",
    "receive_chunks",
    "send_push",
    "serve_fetches",
    "start_nixl",
    "streams_each",
    "with_port",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
