"""Addresses as text, "host:port": the one place that reads and writes them. Pure.

The host is a name, an IPv4 address, or an IPv6 address in brackets, as in URLs.
"""

MAX_PORT = (1 << 16) - 1
_LONGEST = 300  # a DNS name has at most 253 characters


def parse_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port.

    >>> parse_address("10.0.0.5:7000")
    ('10.0.0.5', 7000)
    >>> parse_address("[::1]:80")
    ('::1', 80)

    Raises:
        ValueError: it is not "host:port"; says what is allowed.
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
    """The text of an address; `parse_address` reads it.

    >>> format_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Another port of the same host.

    >>> with_port("[::1]:80", 443)
    '[::1]:443'

    Raises:
        ValueError: as `parse_address`.
    """
    return format_address(parse_address(address)[0], port)
