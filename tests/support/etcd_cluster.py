"""A real etcd cluster on loopback with TLS, client certificates, user and password.

`TlsEtcdCluster` is what an operator would run: each member a process of its own, one
certificate authority, authentication switched on, and one user who may read and write
below one prefix only. Members can be killed, stopped (SIGSTOP), let go on, restarted.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dtft.elastic.processes import die_with_parent, free_port
from dtft.elastic.store.address import StoreAddress
from dtft.elastic.store.api import StoreUnavailable
from dtft.elastic.store.embedded import etcd_binary
from dtft.elastic.store.etcd import EtcdStore

USER = "dtft"
PASSWORD = "open: sesame"
PREFIX = "/team-a/dtft"
READY_S = 30.0


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def _openssl(*words: str) -> None:
    command = ["openssl", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class Authority:
    """A certificate authority in a folder, and the pairs that it signs."""

    def __init__(self, folder: Path, name: str) -> None:
        """Makes the authority's own pair."""
        self._folder, self._name = folder, name
        self.certificate = folder / f"{name}.pem"
        _openssl(*self._new_key(name), "-x509", "-out", str(self.certificate))

    def _new_key(self, name: str, subject: str = "CN") -> list[str]:
        words = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        words += ["-nodes", "-days", "2", "-subj", f"/{subject}={name}"]
        return [*words, "-keyout", str(self._folder / f"{name}.key")]

    def pair(self, name: str, subject: str = "O") -> tuple[Path, Path]:
        """Certificate and key for loopback, for either side of a connection.

        Args:
            name: in the certificate's subject.
            subject: "CN" gives it a common name, which etcd's gateway does not take.
        """
        made, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extra = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extra.write_text(
            "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost\n"
            # etcd's JSON gateway is a client of its own member, with this certificate.
            "extendedKeyUsage=serverAuth,clientAuth\n"
        )
        _openssl(*self._new_key(name, subject), "-out", str(request))
        sign = ["x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"]
        sign += ["-CA", str(self.certificate), "-extfile", str(extra)]
        sign += ["-CAkey", str(self._folder / f"{self._name}.key")]
        _openssl(*sign, "-out", str(made))
        return made, key


class Member:
    """One etcd process of a cluster."""

    def __init__(self, name: str, directory: Path, flags: list[str], port: int) -> None:
        """Starts nothing yet."""
        self.name, self.address = name, f"127.0.0.1:{port}"
        self.log = directory / f"{name}.log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process, while it runs."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def start(self) -> None:
        """Starts it, on the data that it has."""
        environment = {key: it for key, it in os.environ.items() if key[:5] != "ETCD_"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(etcd_binary()), *self._flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def kill(self) -> None:
        """SIGKILL; its data stays. Nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody, as a cut host does.

        Returns when all its threads have stopped: on a busy machine some go on a while.
        """
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def revive(self) -> None:
        """Lets it go on, or starts it again, whichever it needs."""
        if self._process is None:
            self.start()
        else:
            self.go_on()


class TlsEtcdCluster:
    """Several members; a context manager that starts them and leaves nothing behind."""

    def __init__(self, directory: Path, members: int = 3) -> None:
        """Makes certificates and the password file; starts nothing.

        Args:
            directory: gets certificates, logs and data.
            members: how many.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.authority = Authority(directory, "authority")
        self._server = self.authority.pair("server")
        self._client = self.authority.pair("client")
        self._password_file = directory / "password"
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(PASSWORD + "\n")
        ports: list[int] = []
        while len(ports) < 2 * members:
            port = free_port()
            ports += [port] * (port not in ports)
        peers = {f"m{at}": ports[members + at] for at in range(members)}
        self.members = [
            Member(name, directory, self._flags(name, ports[at], peers), ports[at])
            for at, name in enumerate(peers)
        ]

    def _flags(self, name: str, port: int, peers: dict[str, int]) -> list[str]:
        (certificate, key), ca = self._server, self.authority.certificate
        client, peer = f"https://127.0.0.1:{port}", f"https://127.0.0.1:{peers[name]}"
        cluster = [f"{it}=https://127.0.0.1:{peers[it]}" for it in peers]
        flags = [
            f"--name={name}",
            f"--data-dir={self._directory / name}",
            f"--listen-client-urls={client}" + f",https://[::1]:{port}" * has_ipv6(),
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(cluster)}",
            f"--initial-cluster-token={self._directory.name}",
            "--log-level=error",
            "--unsafe-no-fsync",
            "--bcrypt-cost=4",  # a log-in takes 1 ms instead of 70
        ]
        for side in ("", "peer-"):
            flags += [f"--{side}cert-file={certificate}", f"--{side}key-file={key}"]
            flags += [f"--{side}trusted-ca-file={ca}", f"--{side}client-cert-auth"]
        return flags

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            self._add_user()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills every member and removes the data."""
        for member in self.members:
            member.kill()
            shutil.rmtree(self._directory / member.name, ignore_errors=True)

    def _add_user(self) -> None:
        """Authentication: `root`, and a user with rights below one prefix."""
        self._ctl("endpoint", "health", retry=True)
        self._ctl("user", "add", "root:root password")
        self._ctl("user", "grant-role", "root", "root")
        self._ctl("role", "add", USER)
        grant = ["role", "grant-permission", "--prefix=true", USER, "readwrite"]
        self._ctl(*grant, PREFIX + "/")
        self._ctl("user", "add", f"{USER}:{PASSWORD}")
        self._ctl("user", "grant-role", USER, USER)
        self._ctl("auth", "enable")

    def as_root(self, *words: str) -> None:
        """Runs `etcdctl` with all rights, once authentication is on."""
        self._ctl("--user=root:root password", *words)

    def leader(self) -> Member:
        """The member that leads the cluster; none may be stopped.

        Raises:
            LookupError: none does.
        """
        running = ",".join(it.address for it in self.members if it.runs)
        words = ("--user=root:root password", "endpoint", "status", "--write-out=json")
        told = self._ctl(*words, retry=True, endpoints=running)
        for said in json.loads(told):
            status = said["Status"]
            if status["leader"] == status["header"]["member_id"]:
                return self.member_at(said["Endpoint"])
        raise LookupError("no member leads")

    def used_by(self, pid: int) -> Counter[str]:
        """How many connections a process has to each member, by the member's name."""
        inodes = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(path.readlink().name)
        names = {}
        for member in self.members:
            port = int(member.address.rpartition(":")[2])
            names[f"0100007F:{port:04X}"] = member.name
        found: Counter[str] = Counter()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            peer, state, inode = fields[2], fields[3], fields[9]
            if peer in names and state == "01" and f"socket:[{inode}]" in inodes:
                found[names[peer]] += 1
        return found

    def _ctl(self, *words: str, retry: bool = False, endpoints: str = "") -> str:
        """Runs `etcdctl` with a client certificate; with `retry` until it works.

        Returns:
            What it prints.
        """
        certificate, key = self._client
        command = [str(etcd_binary().with_name("etcdctl"))]
        command += [f"--cacert={self.authority.certificate}", f"--cert={certificate}"]
        command += [f"--key={key}", f"--endpoints={endpoints or self.addresses}"]
        command += words
        environment = {**os.environ, "ETCDCTL_API": "3"}
        end = time.monotonic() + READY_S
        while True:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=30, env=environment
            )
            if done.returncode == 0:
                return done.stdout
            if not retry or time.monotonic() > end:
                raise RuntimeError(f"etcdctl {words}: {done.stderr}")
            time.sleep(0.1)

    def wait_ready(self) -> None:
        """Waits until every member that runs answers the user."""
        end = time.monotonic() + READY_S
        for member in self.members:
            store = EtcdStore(self.address(endpoints=member.address))
            while True:
                try:
                    store.get("ready")
                    break
                except StoreUnavailable:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
            store.close()

    @property
    def addresses(self) -> str:
        """The members as --store names them."""
        return ",".join(member.address for member in self.members)

    def address(self, **changes: Any) -> StoreAddress:
        """What a host of a job is told, but for some arguments of `parse`.

        Args:
            changes: `endpoints` in place of all members, and whatever
                `StoreAddress.parse` takes; None for what is left out.
        """
        certificate, key = self._client
        given: dict[str, Any] = {
            "ca": self.authority.certificate,
            "certificate": certificate,
            "key": key,
            "user": USER,
            "password_file": self._password_file,
            "prefix": PREFIX,
        }
        text = changes.pop("endpoints", self.addresses)
        return StoreAddress.parse(text, **{**given, **changes})

    def store_flags(self) -> list[str]:
        """The --store flags of every agent."""
        return self.address().flags()

    def member_at(self, address: str) -> Member:
        """The member of this address, as `EtcdStore.endpoint` tells it."""
        return next(member for member in self.members if member.address == address)


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Waits for a condition; the seconds that it took.

    Raises:
        AssertionError: it did not come true.
    """
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + limit_s, "the condition did not come true"
        time.sleep(0.02)
    return time.monotonic() - begun
