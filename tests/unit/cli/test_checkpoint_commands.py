"""`dtft checkpoint` on a storage directory, and its errors."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from dtft.checkpoint import ReplicatedCheckpointManager
from dtft.checkpoint.storage import inspect
from dtft.checkpoint.storage.directory import StorageTier
from dtft.checkpoint.storage.inspect import missing_from
from dtft.checkpoint.storage.stored_steps import StoredSteps
from dtft.cli.dispatch import main
from tests.support.states import same_bits, state

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    with jax.enable_x64(False):  # the command reads 64-bit values as they are
        yield call
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A run directory with steps 5 and 9, and what an export left behind."""
    directory = tmp_path / "run" / "checkpoints"
    tier = StorageTier(directory)
    for step in (5, 9):
        arrays = {path: jax.numpy.asarray(value) for path, value in state().items()}
        tier.save(step, arrays, {"step": step, "position": 96 * step})
    tier.close()
    (directory / "12.orbax-checkpoint-tmp").mkdir()
    return directory


def damage(directory: Path) -> None:
    """Flips a bit in the middle of the largest file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    good = largest.read_bytes()
    place = len(good) // 2
    largest.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])


def test_a_run_directory_leads_to_its_storage_directory(
    run: Run, storage: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = {"checkpoint": {"storage_directory": str(storage)}}
    (other / "config.json").write_text(json.dumps(config))
    code, text, _ = run("ls", other)
    assert code == 0 and "2 checkpoints" in text and str(storage) in text
    (other / "config.json").write_text('{"checkpoint": {}}')  # of before the key
    assert ": 0 checkpoints" in run("ls", other)[1]


def test_ls_and_show(run: Run, storage: Path) -> None:
    code, text, _ = run("ls", storage.parent)
    assert code == 0 and "2 checkpoints" in text
    assert "unfinished, not offered: 12.orbax-checkpoint-tmp" in text
    code, text, _ = run("ls", storage, "--json")
    found = json.loads(text)
    assert [step["step"] for step in found["steps"]] == [5, 9]
    assert all(step["num_bytes"] > 200 for step in found["steps"])
    code, text, _ = run("show", storage)
    assert code == 0 and f"step 9: {len(state())} leaves" in text
    assert "item position: 864" in text
    code, text, _ = run("show", storage, "--step", "5", "--json")
    leaves: dict[str, Any] = {it["path"]: it for it in json.loads(text)["leaves"]}
    assert leaves["params/w"]["shape"] == [8, 6]
    assert leaves["params/bf16"]["dtype"] == "bfloat16"
    assert len(leaves["params/w"]["fingerprint"]) == 16


def test_verify_names_the_step_that_is_damaged(run: Run, storage: Path) -> None:
    code, text, _ = run("verify", storage)
    assert code == 0 and text.count("every leaf is right") == 2
    damage(storage / "9" / "state" / "d")
    code, text, _ = run("verify", storage)
    assert code == 1 and "step 5: every leaf is right" in text
    assert f"step 9: {storage}/9 exists but cannot be read" in text


def test_export_is_read_by_stock_orbax(run: Run, storage: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    code, text, _ = run("export", storage, "--step", "5", "--to", target)
    assert code == 0 and f"step 5 copied to {target}" in text
    with ocp.CheckpointManager(target) as manager:
        assert manager.latest_step() == 5
        restored = manager.restore(
            5,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(), items=ocp.args.JsonRestore()
            ),
        )
    assert same_bits(restored["state"]["params"]["w"], state()["params/w"])
    assert restored["items"]["position"] == 480
    code, _, error = run("export", storage, "--step", "5", "--to", target)
    assert code == 2 and "has step 5 already" in error


def test_a_copy_that_fails_is_removed_and_names_its_target(
    run: Run, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    code, _, error = run("export", storage, "--to", tmp_path / "file")
    assert code == 2 and f"--to {tmp_path}/file: step 9 cannot be copied" in error
    assert "Not a directory" in error and error.count("\n") == 1

    copied = shutil.copytree

    def full(source: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(
        shutil, "copytree", lambda of, to, *_: copied(of, to, copy_function=full)
    )
    code, _, error = run("export", storage, "--to", tmp_path / "to")
    assert code == 2 and "No space left on device" in error and "bytes of" in error
    assert not list((tmp_path / "to").iterdir())


def test_a_torn_copy_of_a_step_is_not_offered(run: Run, storage: Path) -> None:
    shutil.rmtree(storage / "9" / "state")
    (storage / "10").mkdir()
    (storage / "11").write_text("a file")
    code, text, _ = run("ls", storage)
    assert code == 0 and "1 checkpoint\n" in text
    assert "step 9, not offered here: incomplete: it has no item state" in text
    assert "step 10, not offered here" in text and "step 11" not in text
    assert "step 5: " in run("show", storage)[1]  # the newest whole one
    for action in ("show", "export", "verify"):
        to = ("--to", storage.parent / "to") if action == "export" else ()
        code, text, error = run(action, storage, "--step", "9", *to)
        assert code == (1 if action == "verify" else 2), action
        assert "incomplete: it has no item state" in text + error
        assert not (storage.parent / "to").exists()
    code, text, _ = run("verify", storage)
    assert code == 1 and "step 5: every leaf is right" in text


def test_a_step_without_what_orbax_reads_it_by_is_not_right(
    run: Run, storage: Path
) -> None:
    tree = storage / "9" / "state" / "_METADATA"
    half = tree.read_bytes()[:40]
    for item, name in (
        ("items", "metadata"),
        ("state", "manifest.ocdbt"),
        ("state", "_METADATA"),
    ):
        (storage / "9" / item / name).unlink()
        found = missing_from(storage / "9")
        assert found == f"incomplete: item {item} has no readable {name}"
        (storage / "9" / item / name).write_text("{}")
    tree.write_bytes(half)
    assert f"step 9, not offered here: {found}" in run("ls", storage)[1]
    code, text, _ = run("verify", storage, "--step", "9")
    assert code == 1 and found in text


@pytest.mark.parametrize("name", ["_bytes_below", "missing_from", "items_in"])
def test_a_step_that_is_deleted_while_steps_are_listed_is_left_out(
    run: Run, storage: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    look = getattr(inspect, name)

    def late(path: Path) -> Any:
        if path == storage / "5":
            shutil.rmtree(path, ignore_errors=True)
        return look(path)

    monkeypatch.setattr(inspect, name, late)
    code, text, _ = run("ls", storage, "--json")
    assert code == 0 and [it["step"] for it in json.loads(text)["steps"]] == [9]
    assert run("show", storage)[0] == 0


def test_a_file_that_vanishes_while_steps_are_listed_is_left_out(
    run: Run, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = os.walk

    def late(path: Path) -> Iterator[Any]:
        yield from walk(path)
        yield str(path), [], ["vanished"]

    monkeypatch.setattr(os, "walk", late)
    code, text, _ = run("ls", storage)
    assert code == 0 and "2 checkpoints" in text


def test_a_step_that_is_deleted_while_it_is_read_is_no_error(
    run: Run, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = StoredSteps.record

    def late(stored: StoredSteps, step: int) -> Any:
        if step == 5:
            shutil.rmtree(storage / "5", ignore_errors=True)
        return record(stored, step)

    shutil.copytree(storage / "5", storage.parent / "5")
    monkeypatch.setattr(StoredSteps, "record", late)
    code, text, _ = run("verify", storage)
    assert code == 0 and text == "step 9: every leaf is right\n"
    to = storage.parent / "to"
    for action, *words in (["show"], ["verify"], ["export", "--to", to]):
        shutil.copytree(storage.parent / "5", storage / "5")
        code, _, error = run(action, storage, "--step", "5", *words)
        assert code == 2 and "step 5 was deleted meanwhile" in error, action
    monkeypatch.undo()
    copytree = shutil.copytree

    def deleted(source: Path, copy: Path) -> None:
        shutil.rmtree(source)
        copytree(source, copy)

    copytree(storage.parent / "5", storage / "5")
    monkeypatch.setattr(shutil, "copytree", deleted)
    code, _, error = run("export", storage, "--step", "5", "--to", to)
    assert code == 2 and "step 5 was deleted meanwhile" in error
    assert not to.exists()


def test_the_directory_of_one_step_is_named_as_what_it_is(
    run: Run, storage: Path
) -> None:
    for wrong in (storage / "9", storage / "9" / "state"):
        code, _, error = run("ls", wrong)
        assert code == 2 and f"Give the storage directory, {storage};" in error


def test_damage_inside_a_step_is_one_clear_error(run: Run, storage: Path) -> None:
    (storage / "9" / "dtft" / "metadata").write_text("{")
    code, _, error = run("show", storage)
    assert code == 2 and f"{storage}/9 exists but cannot be read" in error
    assert error.count("\n") == 1


def test_a_directory_without_checkpoints_says_what_one_is(
    run: Run, tmp_path: Path
) -> None:
    code, text, _ = run("ls", tmp_path)
    assert code == 0 and "0 checkpoints" in text and "a directory for each step" in text
    code, _, error = run("verify", tmp_path)
    assert code == 2 and "has no complete checkpoint" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rate", "-1"], "--rate -1: Allowed: a whole number, 0 or more"),
        (["--timeout", "0"], "--timeout 0.0: Allowed: seconds, above 0"),
        (["--rate", "5"], "--rate 5 is for the hosts of a live job, but DIR is"),
    ],
)
def test_limits_of_a_verification_that_mean_nothing_are_refused(
    run: Run, tmp_path: Path, words: list[str], text: str
) -> None:
    code, _, error = run("verify", tmp_path, *words)
    assert code == 2 and text in error and error.count("\n") == 1


@pytest.mark.timeout(120)  # a process that imports jax and Orbax
def test_steps_of_the_public_manager_and_of_stock_orbax(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": jax.numpy.arange(6.0), "key": jax.random.key(0), "n": 3}
    saved = ocp.args.StandardSave(state)
    with ReplicatedCheckpointManager(tmp_path / "ours") as manager:
        manager.save(3, args=saved, custom_metadata={"note": 1})
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        manager.save(4, args=saved)
    code, text, _ = run("show", tmp_path / "ours")
    assert code == 0 and "step 3: 3 leaves" in text and "default/w" in text
    assert 'item custom_metadata: {"note": 1}' in text
    monkeypatch.chdir(tmp_path)  # Orbax itself refuses a relative directory
    assert run("verify", "ours")[1] == "step 3: every leaf is right\n"
    code, text, _ = run("export", "ours", "--to", "copy")
    assert code == 0 and "step 3 copied" in text
    with ReplicatedCheckpointManager(tmp_path / "copy") as manager:
        assert manager.restore(3)["w"].tolist() == state["w"].tolist()
    damage(tmp_path / "copy" / "3" / "default")
    assert run("verify", tmp_path / "copy")[0] == 1
    code, text, _ = run("show", tmp_path / "stock", "--json")
    assert {leaf["path"] for leaf in json.loads(text)["leaves"]} >= {"w"}
    code, text, _ = run("verify", tmp_path / "stock")
    assert code == 1 and "written by stock Orbax, which keeps no fingerprints" in text
    code, _, error = run("export", tmp_path / "stock", "--to", tmp_path / "copy")
    assert code == 2 and "written by stock Orbax" in error


@pytest.mark.timeout(120)  # a process that imports jax and Orbax
def test_a_step_of_several_items_is_shown_and_every_one_is_verified(
    run: Run, tmp_path: Path
) -> None:
    one, steps = jax.numpy.ones(2), tmp_path / "steps"
    saved = ocp.args.Composite(
        model=ocp.args.StandardSave({"w": one, "layers": [one, (one, None)]}),
        other=ocp.args.StandardSave({"empty": one[:0], "n": 1}),
        data=ocp.args.JsonSave({"position": 41}),
    )
    with ReplicatedCheckpointManager(steps) as manager:
        manager.save(3, args=saved, metrics={"loss": 0.5})
    code, text, _ = run("show", steps)
    assert code == 0 and "step 3: 5 leaves" in text
    for part in ("model/layers/1/0", "other/empty", 'item data: {"position": 41}'):
        assert part in text
    assert 'item metrics: {"loss": 0.5}' in text
    assert run("verify", steps)[:2] == (0, "step 3: every leaf is right\n")
    for name, before, after, hint in (
        ("data", "41", "43", "item 'data' is corrupt"),
        ("dtft", "0.5", "0.7", "its record does not match its digest"),
    ):
        file = steps / "3" / name / "metadata"
        good = file.read_text()
        file.write_text(good.replace(before, after))
        code, text, _ = run("verify", steps)
        assert code == 1 and hint in text
        file.write_text(good)
    assert run("verify", steps)[0] == 0


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (("ls", "/nowhere"), "DIR /nowhere: there is no such directory"),
        (("ls",), "give either DIR"),
        (("ls", "/tmp", "--job", "j"), "give either DIR"),
        (("ls", "--store", "s:1"), "both --store HOST:PORT and --job"),
        (("ls", "--job", "j"), "both --store HOST:PORT and --job"),
        (("verify", "--store", "s:1", "--job", "j", "--step", "3"), "--step 3 is for"),
    ],
)
def test_wrong_input_is_one_clear_error(
    run: Run, arguments: tuple[str, ...], hint: str
) -> None:
    code, _, error = run(*arguments)
    assert code == 2 and hint in error and error.count("\n") == 1, error


def test_a_step_that_is_not_there_names_those_that_are(run: Run, storage: Path) -> None:
    code, _, error = run("show", storage, "--step", "6")
    assert code == 2 and "It has: 5, 9." in error
    code, _, error = run("export", storage)
    assert code == 2 and "--to DIR is missing" in error
