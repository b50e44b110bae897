"""Flags of hosts: where one is and how it talks, read and checked before anything."""

import stat
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.transport.connection import check_tls
from dtft.checkpoint.transport.protocol import Tls
from dtft.cli.commands import HostFlags, PlaceFlags
from dtft.drills import options
from dtft.drills.options import bind_address, handed_on, own_certificate
from dtft.drills.options import settings as settings_of
from dtft.elastic.store import StoreAddress


def settings(flags: HostFlags, host: str, domain: str = "") -> dict[str, Any]:
    return settings_of(flags, PlaceFlags(domain=domain), host)


def test_HostFlags(tmp_path: Path) -> None:
    path = tmp_path / "domains"
    path.write_text("h0 rack=7 power=p1\nh1 power=p1 rack=8\n")
    named = HostFlags(domain_file=str(path))
    assert settings(named, "h0")["domain"] == "power=p1,rack=7"
    assert settings(HostFlags(), "h0", "rack=7")["domain"] == "rack=7"
    assert settings(HostFlags(), "h0") == {"domain": "", "tls": None, "nixl": False}
    assert handed_on(named) == ["--domain-file", str(path)]
    with pytest.raises(ValueError, match="no line for this host, h9"):
        settings(named, "h9")
    with pytest.raises(ValueError, match="not both"):
        settings(HostFlags(domain_file=str(path)), "h0", "rack=7")
    with pytest.raises(ValueError, match="--domain: label 'shelf=1'"):
        settings(HostFlags(), "h0", "shelf=1")
    path.write_text("h0 rack=7\nh0 rack=8\n")
    with pytest.raises(ValueError, match=r"--domain-file .*: line 2: host 'h0'"):
        handed_on(named)
    with pytest.raises(ValueError, match="No such file"):
        handed_on(HostFlags(domain_file=str(tmp_path / "none")))


def test_certificates(tmp_path: Path) -> None:
    made = own_certificate(HostFlags(), tmp_path)
    given = dict(zip(made[::2], made[1::2], strict=True))
    cert, key = given["--tls-cert"], given["--tls-key"]
    assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600
    named = HostFlags(tls_cert=cert, tls_key=key)
    assert settings(named, "h0")["tls"] == Tls(certificate=Path(cert), key=Path(key))
    assert handed_on(named) == made
    assert handed_on(HostFlags(nixl=True)) == ["--nixl"]
    for wrong, text in [
        (HostFlags(tls_cert=cert), "belong together"),
        (HostFlags(tls_key=key), "belong together"),
        (HostFlags(tls_cert=cert, tls_key=key, nixl=True), "past TLS, unencrypted"),
        (HostFlags(tls_cert=key, tls_key=cert), "PEM files that belong together"),
        (HostFlags(tls_cert=cert, tls_key=str(tmp_path / "none")), "No such file"),
    ]:
        with pytest.raises(ValueError, match=text):
            settings(wrong, "h0")
    with pytest.raises(ValueError, match="give only one of"):
        own_certificate(HostFlags(tls_cert=cert), tmp_path)
    with pytest.raises(ValueError, match="whoever serves needs both"):
        check_tls(Tls())


def test_without_openssl_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--tls: openssl could not make"):
        own_certificate(HostFlags(), tmp_path)


ROUTES = {
    **{"127.0.0.1": "127.0.0.1", "::1": "::1", "localhost": "127.0.0.1"},
    **{"ip6-localhost": "::1", "localhost.localdomain": "127.0.0.1"},
    **{"etcd": "10.0.0.7", "fd00::9": "fd00::5", "10.0.0.7": "10.0.0.7"},
    "debian": "127.0.0.1",  # /etc/hosts has a machine's own name at 127.0.1.1
}


def routed(host: str, limit_s: float) -> str:
    """This machine's address towards a host, as `local_host` finds it."""
    if host not in ROUTES:
        raise OSError(2, "Name or service not known")
    return ROUTES[host]


def bound(store: str, bind: str = "") -> str:
    return bind_address(PlaceFlags(bind=bind), StoreAddress.parse(store))


@pytest.mark.parametrize(
    ("store", "bind", "listens"),
    [
        ("127.0.0.1:2379", "", "127.0.0.1:0"),
        ("[::1]:2379", "", "[::1]:0"),
        ("localhost:2379", "", "127.0.0.1:0"),
        ("ip6-localhost:2379", "", "[::1]:0"),
        ("localhost.localdomain:2379", "", "127.0.0.1:0"),
        ("etcd:2379", "", "10.0.0.7:0"),
        ("[fd00::9]:2379", "", "[fd00::5]:0"),
        ("gone:1,127.0.0.1:2379,etcd:2379", "", "10.0.0.7:0"),
        ("debian:2379,etcd:2379", "", "10.0.0.7:0"),
        ("etcd:2379", "10.0.0.7:70", "10.0.0.7:70"),
        ("gone:2379", "10.0.0.7:70", "10.0.0.7:70"),
        ("etcd:2379,[::1]:2379", "127.0.0.1:0", "127.0.0.1:0"),
        ("debian:2379", "localhost:0", "localhost:0"),
        ("etcd:2379", "unknown:0", "unknown:0"),  # refused when the host listens
    ],
)
def test_a_host_listens_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, store: str, bind: str, listens: str
) -> None:
    monkeypatch.setattr(options, "local_host", routed)
    assert bound(store, bind) == listens


@pytest.mark.parametrize(
    ("store", "bind", "text"),
    [
        ("etcd:2379", "127.0.0.1:0", "--bind 127.0.0.1:0 is on loopback, .* --store"),
        ("etcd:1,[fd00::9]:2", "[::1]:0", r"--bind \[::1\]:0 is on loopback"),
        ("gone:2379", "localhost:0", "--bind localhost:0 is on loopback"),
        ("etcd:2379", "10.0.0.7", "--bind 10.0.0.7: .*HOST:PORT"),
        ("gone:1,lost:2", "", "gone: Name or .*; lost: .* give --bind HOST:PORT"),
        ("debian:2379", "", "stands for 127.0.0.1 on .* give --bind 127.0.0.1:0"),
    ],
)
def test_a_host_that_others_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: str, bind: str, text: str
) -> None:
    monkeypatch.setattr(options, "local_host", routed)
    with pytest.raises(ValueError, match=text):
        bound(store, bind)
