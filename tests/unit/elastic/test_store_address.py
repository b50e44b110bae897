"""The --store flags as a value: what is allowed, and that no password is shown."""

from pathlib import Path
from typing import Any

import pytest

from dtft.elastic.store.address import StoreAddress
from tests.support.etcd_cluster import Authority


def test_members_with_names_and_addresses() -> None:
    made = StoreAddress.parse("etcd-0:2379, 10.0.0.2:2380,[fe80::1]:2381")
    assert made.endpoints == (("etcd-0", 2379), ("10.0.0.2", 2380), ("fe80::1", 2381))
    assert str(made) == "etcd-0:2379,10.0.0.2:2380,[fe80::1]:2381"
    assert made.prefix == "/dtft" and not made.private and made.context() is None
    assert made.flags() == ["--store", str(made)]


def test_flags_make_the_same_address_and_hold_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.pair("client")
    Path("secret").write_text("hunter2\n")
    made = StoreAddress.parse(
        "etcd:2379",
        ca=authority.certificate,
        certificate=certificate,
        key=key,
        user="me",
        password_file="secret",
        prefix="/team/dtft",
        private=True,
    )
    assert made.password() == "hunter2" and made.context() is not None
    assert "hunter2" not in repr(made) + " ".join(made.flags())
    flags = made.flags()
    assert flags.pop() == "--store-private"
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--store-password-file"] == str(tmp_path / "secret")
    assert given["--store-ca"] == str(authority.certificate)
    assert given["--store-prefix"] == "/team/dtft"


@pytest.mark.parametrize(
    "text",
    ["", "h", ":2379", "http://h:2379", "h:port", "h:0", "h:70000", "::1:2379", "h:1,"],
)
def test_what_is_no_member_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"store address .* must be host:port"):
        StoreAddress.parse(text)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"prefix": "dtft"}, "--store-prefix 'dtft'"),
        ({"prefix": "/a/"}, "--store-prefix '/a/'"),
        ({"certificate": "c"}, "--store-cert FILE and --store-key FILE belong"),
        ({"certificate": "c", "key": "k"}, "needs TLS, which --store-ca"),
        ({"user": "me"}, "--store-user NAME and --store-password-file FILE belong"),
        ({"password_file": "p"}, "--store-user NAME and --store-password-file FILE"),
        ({"user": "me", "password_file": "none"}, "none: No such file"),
        ({"user": "me", "password_file": "empty"}, "first line is empty"),
        ({"ca": "none"}, "--store-ca none: No such file"),
        ({"ca": "empty"}, "--store-ca empty: "),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    with pytest.raises(ValueError, match=text):
        StoreAddress.parse("h:2379", **given)


def test_a_member_is_named_once() -> None:
    with pytest.raises(ValueError, match="each once"):
        StoreAddress.parse("h:1,h:1")


@pytest.mark.parametrize(
    ("store", "warns"), [("etcd-0:2379", True), ("[::1]:1", False)]
)
def test_a_password_without_tls_is_warned_of_unless_it_stays_here(
    tmp_path: Path, store: str, warns: bool
) -> None:
    (tmp_path / "password").write_text("secret\n")
    address = StoreAddress.parse(
        store, user="dtft", password_file=tmp_path / "password"
    )
    assert ("--store-ca" in address.warning()) is warns
    assert "secret" not in address.warning()
    assert not StoreAddress.parse(store).warning()
