"""Finds and connects to "host:port", with one deadline over all of it.

The system's resolver has no deadline, so a name is looked up on a thread of its own,
which is left behind when it hangs; an IP address needs no lookup.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from typing import Any

from dtft.checkpoint.addresses import parse_address

Found = list[tuple[int, Any]]
"""Address families and socket addresses, the best first."""


class _Lookup:
    """One lookup of one name; everybody who wants it waits for the same one."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found: Found = []
        self.error: OSError | None = None


_lock = threading.Lock()
_lookups: dict[tuple[str, int], _Lookup] = {}


def dial(address: str, timeout_s: float) -> socket.socket:
    """Connects to the first address of a host that answers.

    Args:
        address: "host:port".
        timeout_s: limit for the lookup and all tries.

    Returns:
        The socket; its timeout is what was left.

    Raises:
        ValueError: it is not "host:port".
        ConnectionRefusedError: nobody listens at any of the host's addresses.
        TimeoutError: not done in time.
        OSError: the name is not known, or there is no way there.
    """
    deadline = time.monotonic() + timeout_s
    found = resolve(*parse_address(address), timeout_s)
    refused: OSError | None = None
    other: OSError | None = None
    for number, (family, target) in enumerate(found):
        # One of many that drops packets must not take the time of those after it.
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
    """The addresses of a host.

    Raises:
        TimeoutError: the resolver has not answered in time.
        OSError: the name is not known.
    """
    with contextlib.suppress(socket.gaierror):
        return _ask(host, port, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = _Lookup()
            threading.Thread(
                target=_look_up, args=(lookup, host, port), name="lookup", daemon=True
            ).start()
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


def unreachable(host: str) -> str | None:
    """Why other hosts could not connect to an address of this host; None if they could.

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
        return "a link-local address counts on one network card only"
    return None
