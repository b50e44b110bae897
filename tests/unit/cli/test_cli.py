"""The commands as they are typed: what reaches the code behind them."""

import errno
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from dtft import __version__
from dtft.cli import dispatch, jobs
from dtft.cli.commands import COMMANDS
from dtft.cli.dispatch import main, read
from dtft.cli.out_files import check_writable
from dtft.drills import options


def code_of(words: list[str]) -> int:
    """The exit code of a command, whoever ends it."""
    try:
        return main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def values(command: Any) -> dict[str, Any]:
    """The values of all flags that were given, by the names of their fields."""
    found: dict[str, Any] = {}
    for field in fields(command):
        value = getattr(command, field.name)
        if is_dataclass(value):
            found |= values(value)
        elif value is not False and value not in ("", None, ()):
            found[field.name] = value
    return found


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dtft {__version__}\n"


STORE = (
    "--store s:1,[::1]:2 --store-ca a --store-cert b --store-key c --store-user u "
    "--store-password-file p --store-prefix /x --store-private --job j --secret-file F"
)
STORE_VALUES = {
    "store": "s:1,[::1]:2",
    "store_ca": "a",
    "store_cert": "b",
    "store_key": "c",
    "store_user": "u",
    "store_password_file": "p",
    "store_prefix": "/x",
    "store_private": True,
    "name": "j",
    "secret_file": "F",
}
HOST = "--domain-file f --tls-cert c --tls-key k --nixl"
HOST_VALUES = {"domain_file": "f", "tls_cert": "c", "tls_key": "k", "nixl": True}
PLACE = "--host-name h --domain power=p1,rack=r7 --bind 10.0.0.1:0"
PLACE_VALUES = {
    "host_name": "h",
    "domain": "power=p1,rack=r7",
    "bind": "10.0.0.1:0",
}
SIZES = "--hosts 3 --run-dir r --min-replicas 0"
SIZES_VALUES = {"hosts": 3, "run_dir": "r", "min_replicas": 0}


@pytest.mark.parametrize(
    ("line", "told", "rest"),
    [
        ("train X --run-dir r --seed 1", {"config": "X", "run_dir": "r"}, "--seed 1"),
        ("train --run-dir=r X", {"config": "X", "run_dir": "r"}, ""),
        (
            "config X --optim.b1=-1e-3 --k -2",
            {"config": "X"},
            "--optim.b1=-1e-3 --k -2",
        ),
        (
            f"launch {SIZES} X --spares 2 --tls {HOST} --a.b 4 8",
            {"config": "X", "spares": 2, "tls": True, **SIZES_VALUES, **HOST_VALUES},
            "--a.b 4 8",
        ),
        (
            f"agent X {SIZES} {STORE} {PLACE} {HOST} --log.every 5",
            {"config": "X"}
            | {**SIZES_VALUES, **STORE_VALUES, **PLACE_VALUES, **HOST_VALUES},
            "--log.every 5",
        ),
        (
            f"agent --hosts 3 --run-dir r {STORE} --serve-only {PLACE} {HOST} "
            "--copies 3 --timeouts.lease 2",
            {"hosts": 3, "run_dir": "r"}
            | {**STORE_VALUES, **PLACE_VALUES, **HOST_VALUES},
            "--copies 3 --timeouts.lease 2",
        ),
        (
            f"drill X {SIZES} {HOST} --spares 1 --fault a:1@2 --fault=b@3:pair "
            "--host-memory h=4 --host-memory g=2 --deadline -5 --rejoin -1.5 --seed -3 "
            "--control c --json j",
            {
                **{"config": "X", "spares": 1, "fault": ("a:1@2", "b@3:pair")},
                **{"host_memory": ("h=4", "g=2"), "deadline": -5.0, "rejoin": -1.5},
                **{"seed": -3, "control": "c", "json": "j"},
                **SIZES_VALUES,
                **HOST_VALUES,
            },
            "",
        ),
        (
            "bench X --hosts 3 --run-dir r --rounds 5 --json j --seed 1",
            {"config": "X", "hosts": 3, "run_dir": "r", "rounds": 5, "json": "j"},
            "--seed 1",
        ),
        ("bench transport --json j --rounds 5", {"json": "j"}, "--rounds 5"),
        (
            f"scale {STORE} --replicas 4 --timeout 9 --json",
            {"replicas": 4, "timeout": 9.0, "json": True, **STORE_VALUES},
            "",
        ),
        (
            "plan X --cluster 8xH100 --pin tensor=8 --pin zero=3 --html h --json j "
            "--what-if --calibration c --trial 2 --seed 1",
            {
                **{"config": "X", "cluster": "8xH100", "html": "h", "json": "j"},
                **{"pin": ("tensor=8", "zero=3"), "what_if": True, "trial": 2},
                "calibration": "c",
            },
            "--seed 1",
        ),
        ("plan X --verify", {"config": "X", "verify": 4}, ""),
        ("plan X --verify --seed 1", {"config": "X", "verify": 4}, "--seed 1"),
        ("plan --verify X --json j", {"config": "X", "verify": 4, "json": "j"}, ""),
        ("plan --verify 3 X --json j", {"config": "X", "verify": 3, "json": "j"}, ""),
        ("plan X --verify=3", {"config": "X", "verify": 3}, ""),
        (
            "plan predict r.csv --cluster a100 --out o.csv",
            {"rows": "r.csv", "cluster": "a100", "out": "o.csv"},
            "",
        ),
        (
            "calibrate --out o --from f --runs a b c --devices 2",
            {"out": "o", "given": "f", "runs": ("a", "b", "c"), "devices": 2},
            "",
        ),
        ("checkpoint ls D --json", {"directory": "D", "json": True}, ""),
        (f"checkpoint ls {STORE}", STORE_VALUES, ""),
        ("checkpoint show D --step 3", {"directory": "D", "step": 3}, ""),
        ("checkpoint verify --step 3 D", {"directory": "D", "step": 3}, ""),
        (
            f"checkpoint verify {STORE} --rate 5000000 --timeout 60",
            {**STORE_VALUES, "rate": 5_000_000, "timeout": 60.0},
            "",
        ),
        (
            "checkpoint export D --step 4 --to x",
            {"directory": "D", "step": 4, "to": "x"},
            "",
        ),
        ("checkpoint odds --hosts 64 --copies 3", {"hosts": 64, "copies": 3}, ""),
    ],
)
def test_every_flag_is_read_and_the_rest_is_left(
    line: str, told: dict[str, Any], rest: str
) -> None:
    command, words = read(line.split())
    defaults = {"spares": 0, "timeout": 600.0, "copies": 2}
    defaults |= {"deadline": 600.0, "rounds": 3, "verify": 0, "trial": 0, "seed": 0}
    defaults |= {"rate": 0}
    assert {**defaults, **told} == {**defaults, **values(command)}
    assert words == rest.split()


def test_help_is_printed_without_jax_or_configs() -> None:
    code = (
        "import sys; from dtft.cli.dispatch import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main([*line.split(), '--help'])\n"
        "    except SystemExit as ended: assert ended.code == 0, line\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    lines = ["", "checkpoint", *COMMANDS]
    command = [sys.executable, "-c", code, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: dtft {line}".rstrip() in done.stdout for line in lines)
    assert not set(done.stderr.split()) & {"jax", "flax", "dtft.config.experiment"}


def test_the_list_of_commands_has_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code_of(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"• {name} " in shown for name in COMMANDS)
    assert "dtft --version" in shown


def test_help_after_a_config_has_the_configs_keys_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code_of(["launch", "digits_cnn", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--spares" in shown and "--optim.learning-rate" in shown
    assert code_of(["bench", "transport", "-h"]) == 0
    assert "--num-slices" in capsys.readouterr().out
    assert code_of(["train", "digit_cnn", "--help"]) == 2
    shown = capsys.readouterr()
    assert "--run-dir" in shown.out and "Did you mean digits_cnn?" in shown.err


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("", ["no command", "train, config, launch"]),
        ("lauch digits_cnn", ["dtft lauch", "Did you mean launch?"]),
        ("checkpoint lss", ["dtft checkpoint lss", "Did you mean ls?", "verify"]),
        ("checkpoint", ["no command", "ls, show, verify, export, odds"]),
        ("launch", ["CONFIG"]),
        ("launch digits_cnn --hosts x", ["--hosts", "'x'", "int"]),
        ("launch digits_cnn --spares -1", ["--spares -1", "0 or more"]),
        ("launch digits_cnn --min-replicas -1", ["--min-replicas -1", "0 or more"]),
        ("plan digits_cnn --trial -1", ["--trial -1", "0 or more"]),
        ("bench digits_cnn --rounds 0", ["--rounds 0", "1 or more"]),
        ("bench digits_cnn --json /nothing/b.json", ["--json /nothing/b.json: no"]),
        ("bench transport --json /nothing/b.json", ["--json /nothing/b.json: no"]),
        ("drill digits_cnn --json /dev", ["--json /dev: no file can be written"]),
        ("drill digits_cnn --json /dev/null/a/b", ["--json /dev/null/a/b: no file"]),
        ("soak digits_cnn --json /dev/null/a/b", ["--json /dev/null/a/b: no file"]),
        ("soak digits_cnn --json /dev/null/x --run-dir /dev/null/y", ["/dev/null/x"]),
        ("launch digits_cnn --spares", ["--spares", "Missing value"]),
        ("launch digits_cnn --hots 3", ["--hots", "--cluster.hosts"]),
        ("train digits_cnn stray", ["'stray'"]),
        ("agent digits_cnn", ["--job", "--store"]),
        (
            "scale --job j --store s:1 --replicas 2 --timout 3",
            ["--timout", "--timeout"],
        ),
        (
            "scale --job j --store s:1 --replicas 2 --model.channels 1",
            ["--model.chann"],
        ),
        ("calibrate --fast", ["--fast", "dtft calibrate --help"]),
        ("checkpoint ls d --jsn", ["--jsn", "--json"]),
        ("calibrate --runs", ["--runs names no file"]),
        ("plan predict r.csv --out o", ["--cluster"]),
    ],
)
def test_a_wrong_line_ends_with_2_and_says_what_is_wrong(
    line: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    told = " ".join(re.sub("[│|]", " ", shown.err).split())  # lines are broken
    assert all(text in told for text in texts), told


def test_odds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    # Few hosts: the simulation is a loop for every number of lost hosts.
    assert main(["checkpoint", "odds", "--hosts", "2", "--copies", "2"]) == 0
    assert "2 hosts" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--hosts", "--run-dir"])
def test_the_transport_bench_refuses_what_it_would_ignore(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(["bench", "transport", option, "3"]) == 2
    shown = capsys.readouterr().err
    assert option in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--rounds", "0", "rounds=0 is not positive"),
        ("--chunk_mib", "257", "chunk_mib=257 is more than a fetch can send. Allowed"),
    ],
)
def test_the_transport_bench_refuses_impossible_numbers(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(["bench", "transport", option, value]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


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
    assert code_of(["agent", "--serve-only", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "ReplicatedCheckpointManager" in shown and "CONFIG" not in shown
    assert "--min-replicas" not in shown
    job = ["--job", "j", "--store", "127.0.0.1:1"]
    assert code_of(["agent", "--serve-only", *job, "--help"]) == 0
    assert "ReplicatedCheckpointManager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("store", "host"),
    [("192.0.2.1:2379", "192.0.2.7"), ("127.0.0.1:2379", "127.0.0.1")],
)
def test_an_agent_listens_at_the_address_from_which_it_reaches_etcd(
    store: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = {"192.0.2.1": "192.0.2.7", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(options, "local_host", lambda to, limit_s: routes[to])
    (tmp_path / "secret").write_text("0123456789abcdef")
    job = ["--store", store, "--job", "j", "--secret-file", str(tmp_path / "secret")]
    job += ["--run-dir", str(tmp_path / "run")]
    command, words = read(["agent", "digits_cnn", *job])
    assert jobs._agent_config(command, words).bind == f"{host}:0"
    command, words = read(["agent", "--serve-only", *job])
    assert jobs._serving_config(command, words).bind == f"{host}:0"


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
    code = code_of(["launch", "digits_cnn", *words, "--run-dir", str(run)])
    shown = capsys.readouterr().err
    assert code == 2 and hint in shown and "Traceback" not in shown
    assert not run.exists()


@pytest.mark.parametrize("words", [["config", "digits_cnn"], ["drill", "--help"]])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dtft.cli", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["drill", "bench"])
def test_runs_that_are_compared_share_no_storage_directory(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = ["--checkpoint.storage_directory", str(tmp_path / "storage")]
    assert main([command, "digits_cnn", *flag, "--run-dir", str(tmp_path / "run")]) == 2
    assert "Leave --checkpoint.storage_directory out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "soak.json"),
        IsADirectoryError(errno.EISDIR, "Is a directory", "soak.json"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    ],
)
def test_an_error_of_the_system_is_one_line_but_in_an_agents_log(
    error: OSError,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(given: list[str]) -> int:
        raise error

    monkeypatch.setattr(dispatch, "_run", failing)
    assert main(["soak", "digits_cnn"]) == 2
    assert capsys.readouterr().err == f"dtft: error: {error}\n"
    with pytest.raises(OSError, match=str(error.strerror)):
        main(["agent", "digits_cnn"])


def test_a_file_may_be_in_a_folder_that_the_command_makes(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "drill.json")
    check_writable("--json", path, folder_is_made=True)
    with pytest.raises(ValueError, match=f"--json {path}: no file can be written"):
        check_writable("--json", path)
    assert not list(tmp_path.iterdir())
