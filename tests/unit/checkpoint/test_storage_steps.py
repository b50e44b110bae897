"""Which steps a storage directory holds."""

from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from etils import epath

from dtft.checkpoint.storage.step_directories import storage_steps


def test_complete_steps_are_listed_as_stock_orbax_does(tmp_path: Path) -> None:
    for name in ("12", "3", "4.orbax-checkpoint-tmp", "logs", "100"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("a file")
    assert storage_steps(tmp_path) == (3, 12, 100)
    with ocp.CheckpointManager(tmp_path) as stock:
        assert sorted(stock.all_steps()) == [3, 12, 100]


def test_where_no_directory_is_there_are_no_steps(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert storage_steps(tmp_path / "none") == ()
    assert storage_steps(tmp_path / "file" / "steps") == ()


@pytest.mark.parametrize("kind", [Path, epath.Path])
@pytest.mark.parametrize("name", [".", "7"])
def test_what_cannot_be_read_is_not_taken_for_absent(
    tmp_path: Path, kind: type[Path], name: str
) -> None:
    """A link that leads to itself is there, and no user can read it."""
    storage = tmp_path / "storage"
    broken = storage / name
    if broken != storage:
        (storage / "5").mkdir(parents=True)
    broken.symlink_to(broken)
    with pytest.raises(OSError, match="symbolic links"):
        storage_steps(kind(storage))
