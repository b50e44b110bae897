"""Flags of hosts: where one is and how it talks, read and checked before anything."""

import stat
from argparse import Namespace
from pathlib import Path

import pytest

from dtft.checkpoint.stream import check_tls
from dtft.checkpoint.wire import Tls
from dtft.train.host_flags import handed_on, own_certificate, settings


def flags(**given: str | bool | None) -> Namespace:
    names = ("domain", "domain_file", "tls_cert", "tls_key")
    return Namespace(**{**dict.fromkeys(names), "nixl": False, **given})


def test_flags(tmp_path: Path) -> None:
    path = tmp_path / "domains"
    path.write_text("h0 rack=7 power=p1\nh1 power=p1 rack=8\n")
    named = flags(domain_file=str(path))
    assert settings(named, "h0")["domain"] == "power=p1,rack=7"
    assert settings(flags(domain="rack=7"), "h0")["domain"] == "rack=7"
    assert settings(flags(), "h0") == {"domain": "", "tls": None, "nixl": False}
    assert handed_on(named) == ["--domain-file", str(path)]
    with pytest.raises(ValueError, match="no line for this host, h9"):
        settings(named, "h9")
    with pytest.raises(ValueError, match="not both"):
        settings(flags(domain="rack=7", domain_file=str(path)), "h0")
    with pytest.raises(ValueError, match="--domain: label 'shelf=1'"):
        settings(flags(domain="shelf=1"), "h0")
    path.write_text("h0 rack=7\nh0 rack=8\n")
    with pytest.raises(ValueError, match=r"--domain-file .*: line 2: host 'h0'"):
        handed_on(named)
    with pytest.raises(ValueError, match="No such file"):
        handed_on(flags(domain_file=str(tmp_path / "none")))


def test_certificates(tmp_path: Path) -> None:
    made = own_certificate(flags(tls=True), tmp_path)
    given = dict(zip(made[::2], made[1::2], strict=True))
    cert, key = given["--tls-cert"], given["--tls-key"]
    assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600
    named = flags(tls_cert=cert, tls_key=key)
    assert settings(named, "h0")["tls"] == Tls(certificate=Path(cert), key=Path(key))
    assert handed_on(named) == made
    assert handed_on(flags(nixl=True)) == ["--nixl"]
    assert own_certificate(flags(tls=False), tmp_path) == []
    for wrong, text in [
        (flags(tls_cert=cert), "belong together"),
        (flags(tls_key=key), "belong together"),
        (flags(tls_cert=cert, tls_key=key, nixl=True), "past TLS, unencrypted"),
        (flags(tls_cert=key, tls_key=cert), "PEM files that belong together"),
        (flags(tls_cert=cert, tls_key=str(tmp_path / "none")), "No such file"),
    ]:
        with pytest.raises(ValueError, match=text):
            settings(wrong, "h0")
    with pytest.raises(ValueError, match="give only one of"):
        own_certificate(flags(tls=True, tls_cert=cert), tmp_path)
    with pytest.raises(ValueError, match="whoever serves needs both"):
        check_tls(Tls())


def test_without_openssl_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--tls: openssl could not make"):
        own_certificate(flags(tls=True), tmp_path)
