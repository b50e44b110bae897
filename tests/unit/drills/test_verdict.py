"""How a drill says that a run which went on elsewhere ended as it should."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtft.checkpoint import storage
from dtft.config import load_experiment
from dtft.drills.compare import is_good, judge, say
from dtft.elastic.faults import FaultInjector, InjectedFault, parse_fault


@pytest.mark.parametrize(
    ("same", "resized", "within", "says"),
    [
        (True, False, True, "are equal bit for bit to the undisturbed run's"),
        (False, False, True, "are DIFFERENT from the undisturbed run's"),
        (False, True, True, "are those of the undisturbed run up to rounding"),
        (False, True, False, "are DIFFERENT from the undisturbed run's"),
    ],
)
def test_a_resized_run_is_said_to_be_within_rounding_only_if_it_is(
    same: bool,
    resized: bool,
    within: bool,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size: dict[str, Any] = {"hosts": [3, 2], "step": 4, "leaves": 5, "bit_exact": True}
    curve = {"steps": 9, "largest_difference": 1e-7, "tolerance": 1e-4}
    record = {"faults": [], "recoveries": [], "resized": [size] if resized else []}
    record |= {"bit_identical": same, "samples_exactly_once": True, "final_step": 9}
    record |= {"ok": True, "shares": [], "expected_step": 9}
    if resized:
        record["loss_curve"] = curve | {"within_tolerance": within}
    say(record)
    assert says in capsys.readouterr().out.splitlines()[-1]


BATCH = 2


def ran(directory: Path, last: int, events: list[dict[str, Any]]) -> Path:
    """A run that has committed each step, stored the last and used each sample once."""
    (directory / "checkpoints" / str(last)).mkdir(parents=True)
    (directory / "samples").mkdir()
    steps = range(1, last + 1)
    epoch = {"generation": 1, "attempt": 1}
    begin = {"event": "assignment", "step": 0, "slots": ["a"], **epoch}
    commits = [{"event": "commit", "step": it, "root": f"r{it}"} for it in steps]
    used = [
        {"step": step, "rows": rows, "ids": rows, **epoch}
        for step in steps
        for rows in [list(range((step - 1) * BATCH, step * BATCH))]
    ]
    for name, entries in (
        ("events.jsonl", [begin, *commits, *events]),
        ("samples/slot0.jsonl", used),
    ):
        (directory / name).write_text("".join(f"{json.dumps(it)}\n" for it in entries))
    return directory


def end(status: str, step: int) -> dict[str, Any]:
    return {"event": "end", "status": status, "step": step, "message": "", "code": 0}


def verdict(folder: Path, last: int, *events: dict[str, Any], **given: Any) -> Any:
    """The record of a run beside an undisturbed one that ended at step 30."""
    control = ran(folder / "control", 30, [end("done", 30)])
    if given.get("summary", True):
        (control / "summary.json").write_text('{"step": 30}')
    faulted = ran(folder / "faulted", last, list(events))
    injector = SimpleNamespace(injected=[], error=None, not_over=[], done=True)
    for text in given.get("faults", ()):
        injector.injected.append(InjectedFault(fault=parse_fault(text, 2)))
    words = ["--data.global_batch", str(BATCH), *given.get("words", ())]
    experiment = load_experiment("digits_cnn", words)
    return judge(control, faulted, cast(FaultInjector, injector), experiment)


@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize(("last", "good"), [(30, True), (5, False)])
def test_a_run_that_ends_early_is_not_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: int,
    good: bool,
    summary: bool,
) -> None:
    # The steps have no values; the digests of step 5 are compared.
    monkeypatch.setattr(storage, "compare_steps", lambda *_: [])
    record = verdict(tmp_path, last, end("done", last), summary=summary)
    assert record["bit_identical"] and record["samples_exactly_once"]
    assert record["expected_step"] == 30 and record["ok"] is good
    say(record)
    assert ("ended at step 5, not at step 30" in capsys.readouterr().out) is not good


@pytest.mark.parametrize(
    ("more", "last", "good"),
    [
        ([], 5, True),
        ([{"event": "commit", "step": 6, "root": "r6"}], 5, False),  # not exported
        ([{"event": "assignment", "step": 4, "slots": ["a"]}], 5, False),
    ],
)
def test_a_run_that_fails_as_it_should_has_stored_its_last_commit(
    tmp_path: Path, more: list[dict[str, Any]], last: int, good: bool
) -> None:
    again = {"generation": 2, "attempt": 1}
    events = [again | event for event in more]
    record = verdict(
        tmp_path, last, *events, end("error", last), faults=["fail:1@6:always"]
    )
    assert (record["expected_step"] == record["final_step"]) is good
    record |= {"bit_identical": True, "samples_exactly_once": True}
    assert is_good(record) is good


@pytest.mark.parametrize(
    ("words", "expected"), [([], 30), (["--stop.metric", "loss"], None)]
)
def test_a_resized_run_ends_at_the_same_step_unless_its_losses_decide(
    tmp_path: Path, words: list[str], expected: int | None
) -> None:
    resized = {"event": "resized", "step": 3, "differing": [], "leaves": 1}
    resized |= {"committed_root": "r3", "restored_root": "r3"}
    record = verdict(tmp_path, 5, resized, end("done", 5), words=words)
    assert record["resized"] and record["expected_step"] == expected
