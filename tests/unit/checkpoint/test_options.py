"""Options that cannot be are refused by the name that the user gave them."""

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from dtft.checkpoint import ReplicatedCheckpointManager, ReplicatedOptions
from dtft.checkpoint.replication.snapshot_interval import Automatic


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_interval_steps", 3, "8 or more .with fewer.*cannot be told"),
        ("save_interval_steps", "x", "1 or more, or 'auto'"),
        ("save_interval_steps", 2.5, "1 or more, or 'auto'"),
        ("save_interval_steps", None, "1 or more, or 'auto'"),
        ("storage_interval_steps", None, r"1 or more\."),
        ("storage_interval_steps", True, r"1 or more\."),
        ("max_to_keep", 0, "1 or more, or None for all"),
        ("max_to_keep", [], "1 or more, or None for all"),
        ("memory_to_keep", 1.5, r"1 or more\."),
        ("chunk_bytes", 1.5, r"1 to 268435456\."),
        ("chunk_bytes", 0, r"1 to 268435456\."),
        ("chunk_bytes", (256 << 20) + 1, r"1 to 268435456\."),
        ("storage_timeout_s", "5", "above 0 and below inf"),
        ("storage_timeout_s", float("nan"), "above 0 and below inf"),
        ("storage_timeout_s", float("inf"), "above 0 and below inf"),
        ("stall_budget", 1, "above 0 and below 1"),
        ("best_fn", "loss", "a function from the metrics"),
        ("best_mode", "least", "'max', 'min'"),
    ],
)
def test_an_option_that_cannot_be_is_named(name: str, value: Any, allowed: str) -> None:
    changes: Any = {name: value}
    with pytest.raises(ValueError, match=f"^{name}=.*Allowed: .*{allowed}"):
        ReplicatedOptions(**changes)


def test_numbers_of_numpy_become_plain_ones() -> None:
    chunk, timeout_s, keep = np.int64(8), np.float32(1.5), np.uint8(4)
    loose: Any = {"chunk_bytes": chunk, "storage_timeout_s": timeout_s}
    options = ReplicatedOptions(**loose, max_to_keep=keep)  # pyright: ignore[reportArgumentType]
    assert type(options.chunk_bytes) is int and type(options.max_to_keep) is int
    assert type(options.storage_timeout_s) is float
    assert ReplicatedOptions(max_to_keep=None).max_to_keep is None


def test_orbaxs_options_are_answered_with_ours(tmp_path: Path) -> None:
    stock: Any = ocp.CheckpointManagerOptions(max_to_keep=2)
    with pytest.raises(
        ValueError, match="options is CheckpointManagerOptions.*ReplicatedOptions"
    ):
        ReplicatedCheckpointManager(tmp_path, options=stock)


def test_a_maximum_that_is_too_small_says_why() -> None:
    with pytest.raises(ValueError, match="maximum=3 is too small.*8 steps or more"):
        Automatic(maximum=3)
