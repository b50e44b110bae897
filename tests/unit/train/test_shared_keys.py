"""Keys of a coordination service that are passed on, and those that come."""

import queue
import time
from collections.abc import Mapping

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
    services.keys["dtft/plan/1.1"] = b"\x01"
    assert services.published.get(timeout=20) == {"dtft/plan/1.1": "01"}
    assert "elsewhere/x" not in services.keys
    assert services.published.empty()
