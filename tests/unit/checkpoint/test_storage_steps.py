"""Which steps a storage directory holds."""

from pathlib import Path

import orbax.checkpoint as ocp

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
