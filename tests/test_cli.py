"""The commands as they are typed: what reaches the code behind them."""

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
