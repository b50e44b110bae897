"""A short soak, in two parts: random faults, every episode judged."""

import json
import os

import pytest

from tests.support.harness import dtft

pytestmark = [
    pytest.mark.drill,
    pytest.mark.drill_all,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to cut hosts off"),
]


def test_a_soak_goes_on_where_it_was_interrupted(tmp_path):
    words = ("soak", "digits_cnn", "--hosts", "3", "--spares", "1", "--seed", "11")
    words += ("--stop.steps", "100", "--run-dir", str(tmp_path / "soak"))
    for episodes in (2, 3):
        done = dtft(*words, "--episodes", str(episodes), timeout=500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "2 episodes are in" in done.stdout
    assert "3 of 3 episodes passed" in done.stdout
    record = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert (record["episodes"], record["hangs"], record["wrong"]) == (3, 0, 0)
    assert [it["seed"] for it in record["records"]] == [11, 12, 13]
    assert not list((tmp_path / "soak").glob("episode-*"))  # those that failed
