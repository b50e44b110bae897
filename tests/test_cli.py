"""The commands as they are typed: what reaches the code behind them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtft import __version__
from dtft.cli import main


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dtft {__version__}\n"


def test_odds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "odds", "--hosts", "8", "--copies", "2"]) == 0
    assert "8 hosts" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--hosts", "--run-dir"])
def test_the_transport_bench_refuses_what_it_would_ignore(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "transport", option, "3"]) == 2
    shown = capsys.readouterr().err
    assert option in shown and "Traceback" not in shown


def test_the_transport_bench_refuses_no_rounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "transport", "--rounds", "0"])
    assert ended.value.code == 2
    assert "rounds=0 is not positive" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, hint",
    [
        (["digits_cnn"], "CONFIG digits_cnn"),
        (["--optim.learning_rate", "1"], "--optim.learning_rate"),
        (["--hosts", "1"], "--hosts 1"),
        (["--share", "divided"], "--share: a process that is restarted"),
        (["--checkpoint.share=divided"], "keeps all of its slices. Leave it out"),
        (["--nixl", "--tls-cert", "c", "--tls-key", "k"], "give either --nixl or"),
        (["--tls-cert", "c"], "belong together"),
        (["--domain", "rack"], "--domain: "),
        (["--domain-file", "/nothing"], "--domain-file /nothing: No such file"),
        (["--min-replicas", "1"], "--min-replicas: `dtft agent --serve-only` trains"),
        (["--arena_directory", "/nothing"], "arena_directory=/nothing: there is no"),
        (["--host-name", "a/b"], "--host-name 'a/b' has '/'. Allowed: letters"),
    ],
)
def test_an_agent_that_only_serves_refuses_what_it_would_ignore(
    words: list[str],
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    job = ["--store", "s:1", "--job", "j", "--secret-file", str(tmp_path / "secret")]
    assert main(["agent", "--serve-only", *words, *job]) == 2
    shown = capsys.readouterr().err
    assert hint in shown and "Traceback" not in shown


def test_the_help_of_an_agent_that_only_serves_explains_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["agent", "--serve-only", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "ReplicatedCheckpointManager" in shown and "CONFIG" not in shown
    assert "--min-replicas" not in shown


@pytest.mark.parametrize(
    "command",
    [
        ["agent", "--serve-only"],
        ["agent", "digits_cnn"],
        ["scale", "--replicas", "2"],
        ["checkpoint", "ls"],
    ],
)
def test_a_job_has_a_name_that_can_be_a_directory(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--store", "s:1", "--job", "a/b c"]) == 2
    assert "--job 'a/b c' has '/', ' '. Allowed: letters" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["launch"], ["drill", "--fault", "kill-host:0@3"]])
def test_an_arena_directory_is_never_made(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere, run = tmp_path / "shm", ["--run-dir", str(tmp_path / "run")]
    words = ["digits_cnn", *run, "--checkpoint.arena_directory", str(nowhere)]
    assert main([command[0], *words, *command[1:]]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert not nowhere.exists()


@pytest.mark.parametrize(
    "words, hint",
    [
        (["--optim.lerning_rate", "1"], "--optim.learning_rate"),
        (["--hosts", "3", "--data.global_batch", "97"], "not divisible by 3"),
        (["--hosts", "2", "--checkpoint.copies", "3"], "more than the number of hosts"),
        (["--hosts", "3", "--mesh.fsdp", "2"], "does not fit 3 devices"),
        (["--hosts", "3", "--min-replicas", "4"], "Allowed: 1, 2, 3, or 0"),
    ],
)
def test_wrong_input_of_a_launch_is_one_clear_error(
    words: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    try:
        code = main(["launch", "digits_cnn", *words, "--run-dir", str(run)])
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr().err
    assert code == 2 and hint in shown and "Traceback" not in shown
    assert not run.exists()


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dtft.cli", "config", "digits_cnn"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
