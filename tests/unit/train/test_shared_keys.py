"""Keys of a coordination service that are passed on, and those that come."""

import queue
import time
from collections.abc import Callable, Mapping

import pytest

from dtft import _jax_internals
from dtft.train.shared_keys import SharedKeys


class Services:
    """The keys of this process's service, without JAX."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[str, bytes] = {}
        self.published: queue.Queue[Mapping[str, str]] = queue.Queue()
        monkeypatch.setattr(_jax_internals, "service_keys", self._directory)
        monkeypatch.setattr(_jax_internals, "set_service_key", self.keys.__setitem__)
        monkeypatch.setattr(_jax_internals, "delete_service_keys", self._delete)
        monkeypatch.setattr(_jax_internals, "tell_of_keys", self._tell)
        self.tell: Callable[[str, bytes], None] = lambda key, value: None

    def _tell(self, listener: Callable[[str, bytes], None]) -> None:
        self.tell = listener

    def _delete(self, directory: str) -> None:
        for key in self._directory(directory):
            del self.keys[key]

    def _directory(self, name: str) -> dict[str, bytes]:
        found = list(self.keys.items())
        return {key: value for key, value in found if key.startswith(f"{name}/")}


def test_keys_go_out_once_and_those_that_come_do_not_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = Services(monkeypatch)
    shared = SharedKeys(services.published.put)
    shared.take({"cpu:gloo/1,2/2": "not hexadecimal"})
    shared.take({"cpu:gloo/1,2/1": "0b", "elsewhere/x": "00"})  # before it starts
    shared.hurry(60.0)
    shared.start()
    services.keys["cpu:gloo/1,2/0"] = b"\x0a"
    services.keys["private"] = b"x"
    assert services.published.get(timeout=20) == {"cpu:gloo/1,2/0": "0a"}
    until = time.monotonic() + 20
    while "cpu:gloo/1,2/1" not in services.keys:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert services.keys["cpu:gloo/1,2/1"] == b"\x0b"
    shared.calm()
    services.tell("dtft/plan/1.1", b"\x01")
    assert services.published.get(timeout=20) == {"dtft/plan/1.1": "01"}
    services.keys["cpu:gloo/3,4/0"] = b"\x0c"  # of an evaluation
    assert services.published.get(timeout=20) == {"cpu:gloo/3,4/0": "0c"}
    assert "elsewhere/x" not in services.keys
    assert services.published.empty()


def test_keys_of_collectives_that_were_left_are_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = Services(monkeypatch)
    shared = SharedKeys(services.published.put)
    shared.start()
    services.keys |= {"cpu:gloo/1,2/0": b"\x0a", "dtft/ready/1.1/0": b"1"}
    assert services.published.get(timeout=20) == {"cpu:gloo/1,2/0": "0a"}
    shared.forget()
    assert services.keys == {"dtft/ready/1.1/0": b"1"}
    services.keys["cpu:gloo/1,3/0"] = b"\x0b"
    assert services.published.get(timeout=20) == {"cpu:gloo/1,3/0": "0b"}
