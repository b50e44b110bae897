"""The address of a store: members, TLS, user and password, key prefix.

`StoreAddress` is made from the --store flags and is checked before any connection. The
password is read from its file for the check and at each login. No field, log line or
error text contains the password.
"""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

DEFAULT_PREFIX = "/dtft"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """The address of an etcd cluster and the credentials of one client.

    >>> str(StoreAddress.parse("etcd-0:2379,[::1]:2380"))
    'etcd-0:2379,[::1]:2380'
    """

    endpoints: tuple[tuple[str, int], ...]
    """Host and client port of each etcd member to which requests may be sent."""
    ca: Path | None = None
    """PEM file of the authority that signed the members' certificates; None: no TLS."""
    certificate: Path | None = None
    """PEM file of the client's certificate, for members that require a certificate."""
    key: Path | None = None
    """PEM file of the private key of `certificate`."""
    user: str = ""
    """etcd user; empty for an etcd without authentication."""
    password_file: Path | None = None
    """File whose first line is the user's password."""
    prefix: str = DEFAULT_PREFIX
    """Prefix of every key of this client, such as "/dtft"."""
    private: bool = False
    """Whether dtft is the only user of this etcd, so its history may be compacted."""

    def __post_init__(self) -> None:
        if not self.endpoints or len(set(self.endpoints)) < len(self.endpoints):
            raise ValueError(
                f"--store {str(self)!r}: must name one or more members, each once, as "
                "in etcd-0:2379,etcd-1:2379. Change --store."
            )
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.prefix):
            raise ValueError(
                f"--store-prefix {self.prefix!r}: must be one or more names of "
                "letters, digits, '.', '_', '-', each after a '/', as in /team-a/dtft. "
                "Change --store-prefix."
            )
        if bool(self.certificate) != bool(self.key):
            raise ValueError(
                "--store-cert FILE and --store-key FILE belong together: give both, "
                "or neither."
            )
        if self.certificate and not self.ca:
            raise ValueError(
                f"--store-cert {self.certificate} needs TLS, which --store-ca FILE "
                "turns on: give the PEM file that signed etcd's certificate."
            )
        if bool(self.user) != bool(self.password_file):
            raise ValueError(
                "--store-user NAME and --store-password-file FILE belong together: "
                "give both, or neither."
            )
        self.context()
        if self.password_file:
            self.password()

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        user: str | None = None,
        password_file: str | Path | None = None,
        prefix: str | None = None,
        private: bool = False,
    ) -> Self:
        """Parses the texts of the --store flags; an empty text counts as not given.

        Args:
            text: HOST:PORT or [IPV6]:PORT of each member, separated by commas.
            ca: value of --store-ca.
            certificate: value of --store-cert.
            key: value of --store-key.
            user: value of --store-user.
            password_file: value of --store-password-file.
            prefix: value of --store-prefix; "/dtft" if not given.
            private: whether dtft is the only user of this etcd.

        Raises:
            ValueError: a flag has an invalid value, a file cannot be read, or a flag
                is given without a flag that it requires.
        """
        return cls(
            endpoints=tuple(_endpoint(text, part) for part in text.split(",")),
            ca=_path(ca),
            certificate=_path(certificate),
            key=_path(key),
            user=user or "",
            password_file=_path(password_file),
            prefix=prefix or DEFAULT_PREFIX,
            private=private,
        )

    def __str__(self) -> str:
        return ",".join(endpoint_text(endpoint) for endpoint in self.endpoints)

    def warning(self) -> str:
        """Returns a warning if the password is sent unencrypted on a network, else "".

        There is no warning without a user, with TLS, or if all members are on loopback.

        >>> StoreAddress.parse("etcd-0:2379").warning()
        ''
        """
        here = all(host in _LOOPBACK for host, _ in self.endpoints)
        if not self.user or self.ca or here:
            return ""
        return (
            f"--store-user {self.user}: the password and every key travel unencrypted "
            f"to {self}. Give --store-ca FILE, the certificate authority of an etcd "
            "that speaks TLS."
        )

    def context(self) -> ssl.SSLContext | None:
        """Makes the TLS context for connections to members; returns None without TLS.

        Raises:
            ValueError: a file cannot be read, or certificate and key do not match.
        """
        if self.ca is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise ValueError(
                f"--store-ca {self.ca}: {_reason(error)}. Give the PEM file of the "
                "certificate authority that signed etcd's certificate."
            ) from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as error:
                raise ValueError(
                    f"--store-cert {self.certificate}, --store-key {self.key}: "
                    f"{_reason(error)}. Give a PEM certificate and its own private key."
                ) from error
        return context

    def password(self) -> str:
        """Reads the user's password from the first line of its file.

        Raises:
            ValueError: the file cannot be read, or its first line is empty.
        """
        try:
            text = (self.password_file or Path()).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--store-password-file {self.password_file}: {_reason(error)}. Give a "
                "text file whose first line is the password."
            ) from error
        password = text.partition("\n")[0].rstrip("\r")
        if not password:
            raise ValueError(
                f"--store-password-file {self.password_file}: its first line is empty. "
                "Write the password there."
            )
        return password

    def flags(self) -> list[str]:
        """Returns command-line flags that give another process the same address."""
        given = {
            "--store": str(self),
            "--store-ca": self.ca and self.ca.resolve(),
            "--store-cert": self.certificate and self.certificate.resolve(),
            "--store-key": self.key and self.key.resolve(),
            "--store-user": self.user,
            "--store-password-file": self.password_file
            and self.password_file.resolve(),
            "--store-prefix": self.prefix if self.prefix != DEFAULT_PREFIX else "",
        }
        found = [word for flag in given.items() if flag[1] for word in flag]
        return [str(word) for word in found] + ["--store-private"] * self.private


def endpoint_text(endpoint: tuple[str, int]) -> str:
    """Formats an endpoint as HOST:PORT, with brackets around an IPv6 address.

    >>> endpoint_text(("::1", 2379))
    '[::1]:2379'
    """
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _endpoint(text: str, part: str) -> tuple[str, int]:
    found = re.fullmatch(r"\s*(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/\[\]]+)):(\d+)\s*", part)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ValueError(
            f"store address {text!r}: {part!r} must be host:port without a scheme, as "
            "in 127.0.0.1:2379 or [::1]:2379; several members have commas between. "
            "Change --store."
        )
    return found[1] or found[2], int(found[3])


def _path(name: str | Path | None) -> Path | None:
    return Path(name) if name else None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
