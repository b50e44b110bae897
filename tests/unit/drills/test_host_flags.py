"""Flags of hosts: where one is and how it talks, read and checked before anything."""

import stat
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.transport.connection import check_tls
from dtft.checkpoint.transport.protocol import Tls
from dtft.cli.commands import HostFlags, PlaceFlags
from dtft.drills.options import handed_on, own_certificate
from dtft.drills.options import settings as settings_of


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
