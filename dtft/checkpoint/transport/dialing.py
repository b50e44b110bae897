"""Parses addresses of the form "host:port" and connects to them.

`dial` has one deadline for name lookup and connection together. `local_host` finds the
address of this machine from which it would connect. The host of an address is a name,
an IPv4 address, or an IPv6 address in brackets, as in URLs.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from typing import Any

MAX_PORT = (1 << 16) - 1
_LONGEST = 300  # a DNS name has at most 253 characters
_ANY_PORT = 9  # no packet is sent to it


def parse_address(address: str) -> tuple[str, int]:
    """Splits an address into its host, without brackets, and its port.

    >>> parse_address("10.0.0.5:7000")
    ('10.0.0.5', 7000)
    >>> parse_address("[::1]:80")
    ('::1', 80)

    Raises:
        ValueError: the address is not "host:port"; the message names the allowed forms.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if (
        not (name and colon and port.isascii() and port.isdigit() and len(port) <= 5)
        or int(port) > MAX_PORT
        or len(address) > _LONGEST
        or bracketed != (":" in name)
        or any(letter in "[]/@" or not letter.isprintable() for letter in name)
        or " " in name
    ):
        raise ValueError(
            f"address={address[:_LONGEST]!r} is not HOST:PORT. Allowed: a name or IP "
            "address, a colon, and 0 to 65535, such as 10.0.0.5:7000; an IPv6 address "
            "stands in brackets, as in [fd00::5]:7000. Change the address."
        )
    return name, int(port)


def format_address(host: str, port: int) -> str:
    """Joins host and port to an address; inverse of `parse_address`.

    >>> format_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Replaces the port of an address.

    >>> with_port("[::1]:80", 443)
    '[::1]:443'

    Raises:
        ValueError: `address` is not "host:port".
    """
    return format_address(parse_address(address)[0], port)


Found = list[tuple[int, Any]]
"""Pairs of address family and socket address, in the resolver's order of preference."""


class _Lookup:
    """A running lookup of a host name and port, shared by threads that need it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found: Found = []
        self.error: OSError | None = None


_lock = threading.Lock()
_lookups: dict[tuple[str, int], _Lookup] = {}


def dial(address: str, timeout_s: float) -> socket.socket:
    """Connects to the first address of a host that accepts a connection.

    Args:
        address: "host:port".
        timeout_s: limit for the lookup and all attempts together, in seconds.

    Returns:
        The connected socket. It still has the timeout of the successful attempt.

    Raises:
        ValueError: the address is not "host:port".
        ConnectionRefusedError: all of the host's addresses refused the connection.
        TimeoutError: the lookup or an attempt exceeded its time.
        OSError: the name is not known, or no address is reachable.
    """
    deadline = time.monotonic() + timeout_s
    found = resolve(*parse_address(address), timeout_s)
    refused: OSError | None = None
    other: OSError | None = None
    for number, (family, target) in enumerate(found):
        # An address that drops packets must leave time for the addresses after it.
        left = max(deadline - time.monotonic(), 0.001) / (len(found) - number)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect(target)
            return connection
        except ConnectionRefusedError as error:
            refused = error
            connection.close()
        except OSError as error:
            other = other or error
            connection.close()
        except BaseException:
            connection.close()
            raise
    raise other or refused or OSError(f"{address} has no address")


def resolve(host: str, port: int, timeout_s: float) -> Found:
    """Resolves a host's name to socket addresses.

    The system's resolver has no deadline. So a name is looked up on a thread, which is
    abandoned if the resolver hangs. An IP address needs no lookup.

    Returns:
        Pairs of address family and socket address (with `port`), in the resolver's
        order of preference.

    Raises:
        TimeoutError: the resolver has not answered within `timeout_s` seconds.
        OSError: the name is not known, or no thread can be started.
    """
    with contextlib.suppress(socket.gaierror):
        return _ask(host, port, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _Lookup()
            thread = threading.Thread(
                target=_look_up, args=(lookup, host, port), name="lookup", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                reason = f"the name {host!r} cannot be looked up now: {error}"
                raise OSError(socket.EAI_AGAIN, reason) from error
            _lookups[host, port] = lookup  # the thread waits for the lock to remove it
    if not lookup.done.wait(max(timeout_s, 0)):
        raise TimeoutError(
            f"the name {host!r} was not found within {timeout_s:.3g} s: the resolver "
            "(DNS) does not answer. Give IP addresses, or an entry in /etc/hosts."
        )
    if lookup.error is not None:
        raise OSError(lookup.error.errno, lookup.error.strerror) from lookup.error
    return lookup.found


def _look_up(lookup: _Lookup, host: str, port: int) -> None:
    try:
        lookup.found = _ask(host, port, 0)
    except OSError as error:
        lookup.error = error
    finally:
        with _lock:
            del _lookups[host, port]
        lookup.done.set()


def _ask(host: str, port: int, flags: int) -> Found:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # such as "a..b"
        reason = f"{host!r} is no name of a host: {error}"
        raise socket.gaierror(socket.EAI_NONAME, reason) from error
    return [(family, address) for family, _, _, _, address in answers]


def local_host(host: str, timeout_s: float) -> str:
    """Returns the IP address of this machine from which it would connect to a host.

    If the host has several addresses, the first to which this machine has a route
    decides. Sends no packet to the host.

    Args:
        host: name or IP address, without brackets.
        timeout_s: limit for the lookup of the name, in seconds.

    Raises:
        TimeoutError: the resolver has not answered within `timeout_s` seconds.
        OSError: the name is not known, or there is no route to the host.

    >>> local_host("127.0.0.1", 1.0)
    '127.0.0.1'
    """
    problem: OSError | None = None
    for family, target in resolve(host, _ANY_PORT, timeout_s):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)  # a datagram socket only chooses its address
            except OSError as error:
                problem = problem or error
                continue
            return probe.getsockname()[0]
    raise problem or OSError(f"{host} has no address")


def is_loopback(address: str) -> bool:
    """Whether an IP address is one at which only this machine reaches itself.

    False for a name.

    >>> is_loopback("127.0.1.1"), is_loopback("::ffff:127.0.0.1"), is_loopback("::2")
    (True, True, False)
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def unreachable(host: str) -> str | None:
    """Returns why peers cannot connect to `host`, an address or name of this host.

    Returns None for a name, and for an address that peers may be able to connect to.

    >>> unreachable("::")
    'it stands for all addresses'
    >>> unreachable("node-5")
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None  # a name
    if address.is_unspecified:
        return "it stands for all addresses"
    if address.version == 6 and address.is_link_local:
        return "a link-local address is valid on one network link only"
    return None
