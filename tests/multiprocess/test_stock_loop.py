"""The guide in the README: the stock loop, and the same with three lines changed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dtft.checkpoint

README = Path(dtft.checkpoint.__path__[0]) / "README.md"
Train = Callable[[Path, int], tuple[int, Any]]


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def loops() -> tuple[Train, Train]:
    """The guide's loop as it is, and with the guide's changes."""
    stock = ours = block("python")
    changes = block("diff").splitlines()
    old = [line[1:] for line in changes if line.startswith("-")]
    added, *new = [line[1:] for line in changes if line.startswith("+")]
    assert len(old) == len(new) == 2
    for before, after in zip(old, new, strict=True):
        assert ours.count(before) == 1
        ours = ours.replace(before, after)
    first, second = {}, {}
    exec(compile(stock, "stock loop", "exec"), first)
    exec(compile(f"{added}\n{ours}", "changed loop", "exec"), second)
    return first["train"], second["train"]


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.timeout(180)
def test_both_loops_end_alike_and_read_each_others_steps(tmp_path: Path) -> None:
    stock, ours = loops()
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        _, whole = stock(tmp_path / "stock", 16)
        _, half = ours(tmp_path / "ours", 13)
        assert sorted(p.name for p in (tmp_path / "stock").iterdir()) == ["0", "10"]
        assert "12" in {p.name for p in (tmp_path / "ours").iterdir()}
        resumed, same = stock(tmp_path / "ours", 16)
        assert resumed == 13 and bits(same) == bits(whole) != bits(half)
        resumed, same = ours(tmp_path / "stock", 16)
        assert resumed == 11 and bits(same) == bits(whole)
