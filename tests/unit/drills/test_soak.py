"""Random schedules of faults, and the sums of a soak."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.cli.dispatch import main
from dtft.drills import soak
from dtft.drills.fault_schedule import STEADY, SoakedJob, kinds_of, schedule
from dtft.drills.soak import (
    failed_episode,
    former_episodes,
    judged_episode,
    line_of,
    lines,
    sums,
    tracebacks,
)
from dtft.elastic.faults.schedule import check_together, parse_fault
from dtft.train import only_run_in

jobs = st.builds(
    SoakedJob,
    slots=st.integers(1, 5),
    spares=st.integers(0, 2),
    steps=st.integers(10, 300),
    sizes=st.sampled_from([(), (2, 4)]),
)


@given(st.integers(0, 10**6), jobs)
def test_a_schedule_is_one_that_a_drill_takes(seed: int, job: SoakedJob) -> None:
    faults = schedule(seed, job)
    assert faults == schedule(seed, job)
    assert {*kinds_of(faults)} <= {*STEADY, "scale"}
    assert 1 <= len(faults) - sum(kind == "corrupt" for kind in kinds_of(faults)) <= 3
    parsed = [parse_fault(text, job.slots) for text in faults]
    assert [parse_fault(str(fault), job.slots) for fault in parsed] == parsed
    assert all(fault.step < job.steps for fault in parsed)
    check_together(parsed)


def test_every_kind_is_drawn() -> None:
    job = SoakedJob(slots=3, spares=1, steps=100, sizes=(2, 4))
    drawn = [fault for seed in range(400) for fault in schedule(seed, job)]
    assert {*kinds_of(drawn)} == {*STEADY, "scale"}
    for option in (":recovery", ":collective", ":30", ":pair", ":store"):
        assert any(option in fault for fault in drawn), option


def record(**changes: Any) -> dict[str, Any]:
    good = {
        "resized": [],
        "shares": [],
        "bit_identical": True,
        "final_step": 100,
        "expected_step": 100,
        "samples_exactly_once": True,
        "fault_error": None,
        "faults_not_over": [],
        "status": "done",
        "message": "",
        "expected_status": "done",
        "ended_in_time": True,
        "left_behind": [],
        "recoveries": [recovery(0, 0.25), recovery(2, 2.5)],
    }
    return good | changes


def recovery(rung: int, gap_s: float | None) -> dict[str, Any]:
    return {
        "rung": rung,
        "cause": "h1 was lost",
        "gap_s": gap_s,
        "phases_s": {},
        "steps_lost": 1,
        "survivors": 2,
        "survivors_restarted": 0,
        "restarted_because": "",
        "more": "left out",
    }


def judged(traced: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    episode = judged_episode(3, 9, ["kill-leader@5"], record(**changes), traced or [])
    return episode | {"seconds": 12.25}


def test_an_episode_passes_or_says_why() -> None:
    good = judged()
    assert good["passed"] and not good["why"] and not good["hung"]
    assert "rungs 0, 2" in line_of(good) and "passed" in line_of(good)
    assert judged(faults_not_over=["kill-leader@5"])["passed"]
    hung = judged(ended_in_time=False, status="none", bit_identical=False)
    assert hung["hung"] and not hung["wrong"] and not hung["passed"]
    wrong = judged(bit_identical=False)
    assert wrong["wrong"] and wrong["why"] == ["another final state"]
    assert judged(samples_exactly_once=False)["wrong"]
    early = judged(final_step=50)
    assert early["wrong"] and early["why"] == ["ended at step 50, not 100"]
    assert not judged(["a.log"])["passed"] and not judged(left_behind=["x"])["passed"]
    assert "FAILED: traceback in a.log" in line_of(judged(["a.log"]))


def test_a_run_with_another_size_is_judged_by_its_losses() -> None:
    resized = {"resized": [{"bit_exact": True}], "bit_identical": False}
    good = judged(**resized, loss_curve={"within_tolerance": True})
    assert good["passed"] and not good["expects_bits"]
    wrong = judged(**resized, loss_curve={"within_tolerance": False})
    assert wrong["wrong"] and not wrong["passed"]


def test_another_state_or_other_shares_than_committed_are_wrong() -> None:
    close = {"loss_curve": {"within_tolerance": True}, "bit_identical": False}
    state = judged(**close, resized=[{"bit_exact": True}, {"bit_exact": False}])
    assert state["wrong"] and not state["passed"]
    assert state["why"] == ["a restored state that is not the committed one"]
    shares = judged(**close, shares=[{"replayed": False}])
    assert shares["wrong"] and not shares["passed"]
    assert shares["why"] == ["a restart with other shares than committed"]
    assert not judged(**close, shares=[{"replayed": True}])["wrong"]


def test_sums_count_what_was_expected() -> None:
    one, other = judged(), judged(ended_in_time=False, bit_identical=False)
    found = sums([one, one, other])
    assert (found["episodes"], found["passed"], found["hangs"]) == (3, 2, 1)
    assert (found["bit_identical"], found["bit_identical_expected"]) == (2, 3)
    assert found["rungs"] == {0: 3, 2: 3} and found["gaps_s"][2] == (2.5, 2.5)
    assert "2 of 3 episodes passed" in lines(found)[0]
    assert lines(sums([]))[0].startswith("dtft: 0 of 0")


def test_only_unexpected_tracebacks_count(tmp_path: Path) -> None:
    head = "Traceback (most recent call last):\n  File\n"
    (tmp_path / "a.log").write_text(f"x\n{head}RuntimeError: drill: fail at step 3\n")
    (tmp_path / "b.log").write_text(f"x\n{head}KeyError: 3\n")
    (tmp_path / "h.exporter.log").write_text(f"{head}OSError: read-only\n")
    assert tracebacks(tmp_path, ["fail:1@3", "full-storage@9:2"]) == ["b.log"]
    assert tracebacks(tmp_path, ["fail:1@3"]) == ["b.log", "h.exporter.log"]


def test_an_episode_without_a_record_has_failed() -> None:
    episode = failed_episode(1, 2, ["kill-leader@5"], "the drill failed: no etcd")
    assert "FAILED: the drill failed: no etcd" in line_of(episode | {"seconds": 1.0})
    assert sums([episode | {"seconds": 1.0}])["passed"] == 0
    assert episode.keys() | {"seconds"} == judged().keys()


def test_a_soak_goes_on_with_its_own_file_only(tmp_path: Path) -> None:
    file, what = tmp_path / "soak.json", {"config": "digits_cnn", "seed": 1}
    assert former_episodes(file, what) == []
    file.write_text(json.dumps(what | {"records": [judged()]}))
    assert former_episodes(file, what) == [judged()]
    with pytest.raises(ValueError, match="another soak: {'seed': 1} there"):
        former_episodes(file, what | {"seed": 2})
    # A file of before these settings were recorded has their defaults.
    now = {"deadline": 180.0, "rejoin": 3.0, "min_replicas": None, "host_flags": []}
    now |= what | {"kinds": ["cut"]}
    assert former_episodes(file, now) == [judged()]
    for key, value in (
        ("deadline", 60.0),
        ("rejoin", 9.0),
        ("min_replicas", 1),
        ("host_flags", ["--nixl"]),
    ):
        with pytest.raises(ValueError, match=f"of another soak: .'{key}': "):
            former_episodes(file, now | {key: value})
    file.write_text(json.dumps(now | {"records": [judged()]}))
    assert former_episodes(file, now) == [judged()]
    with pytest.raises(ValueError, match="another soak: {'kinds': .'cut'.} there"):
        former_episodes(file, now | {"kinds": ["fail"]})
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds no soak"):
        former_episodes(file, what)


@pytest.mark.parametrize(
    ("flags", "differs"),
    [
        ([], ""),
        (["--deadline", "90"], "deadline"),
        (["--rejoin", "9"], "rejoin"),
        (["--min-replicas", "1"], "min_replicas"),
        (["--nixl"], "host_flags"),
        (["--spares", "2"], "spares"),
    ],
)
def test_a_soak_with_other_flags_is_another_soak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    differs: str,
) -> None:
    monkeypatch.setattr(soak, "_can", lambda check: False)  # no cuts and no mounts
    monkeypatch.setattr(soak, "_episode", lambda *_: judged())
    command = ["soak", "digits_cnn", "--run-dir", str(tmp_path / "run")]
    assert main([*command, "--episodes", "1"]) == 0
    capsys.readouterr()
    assert main([*command, *flags, "--episodes", "2"]) == (2 if differs else 0)
    told = capsys.readouterr()
    found = json.loads((tmp_path / "run" / "soak.json").read_text())
    assert found["episodes"] == (1 if differs else 2)
    assert not differs or f"of another soak: {{'{differs}': " in told.err


def test_two_soaks_do_not_share_a_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(soak, "_can", lambda check: False)
    monkeypatch.setattr(soak, "_episode", lambda *_: judged())
    command = ["soak", "digits_cnn", "--run-dir", str(tmp_path / "run")]
    with only_run_in(tmp_path / "run", mark=".soak"):
        assert main(command) == 2
    told = capsys.readouterr().err
    assert f"log.run_dir={tmp_path / 'run'} belongs to a run that has not" in told
    with only_run_in(tmp_path / "run"):  # as the drill of an episode does
        assert main([*command, "--episodes", "1"]) == 0
