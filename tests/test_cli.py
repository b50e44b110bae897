"""The commands as they are typed: what reaches the code behind them."""

from pathlib import Path

import pytest

from dtft.cli import main


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
