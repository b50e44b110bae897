"""Which trainer is stuck: limits of phases, what agents see, whom leaders name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.managers.progress import PHASES, Phase
from dtft.checkpoint.timeouts import Timeouts
from dtft.elastic.hang_detection import (
    BLIND_S,
    JobProgress,
    Observation,
    ProgressWatch,
    culprit,
    limit_of,
    stuck,
    verdict,
)

FAST = [0.01] * 10
SLOTS = {"a": 0, "b": 1, "c": 2}


def seen(phase: Phase, since: float, computing: int = 5, **more: Any) -> Observation:
    at = {"computing": computing, "finished": computing - 2, "state": "S"}
    return Observation(phase=phase, since=since, **{**at, **more})


def progress(
    phase: Phase, for_s: float, computing: int = 5, **more: Any
) -> JobProgress:
    limit_s, timeout = limit_of(phase, FAST, Timeouts(), more.get("state", "S"))
    fields: dict[str, Any] = {
        **{"computing": computing, "finished": computing - 2, "state": "S"},
        **{"limit_s": limit_s, "timeout": timeout, "busy": 0.0, **more},
    }
    return JobProgress(phase=phase, for_s=for_s, **fields)


@pytest.mark.parametrize(
    "phase, steps, given, limit",
    [
        ("step", FAST, {}, (10.0, "step")),
        ("step", [2.0, 2.0, 2.0], {}, (40.0, "step")),
        ("step", [2.0, 2.0], {}, (180.0, "start")),  # too few to know
        ("step", [], {"step": 4.0}, (4.0, "step")),
        ("compile", FAST, {}, (180.0, "start")),
        ("start", FAST, {"start": 90.0}, (90.0, "start")),
        ("data", FAST, {}, (60.0, "data")),
        ("evaluate", FAST, {"evaluate": 7.0}, (7.0, "evaluate")),
        ("save", FAST, {}, (60.0, "save")),
        ("save", FAST, {"replicate": 50.0}, (80.0, "save")),
    ],
)
def test_each_phase_has_its_limit(
    phase: Phase, steps: list[float], given: dict[str, Any], limit: tuple[float, str]
) -> None:
    assert limit_of(phase, steps, Timeouts(**given)) == limit
    assert stuck(phase, limit[0], steps, Timeouts(**given)) is None
    found = stuck(phase, limit[0] + 0.1, steps, Timeouts(**given))
    assert found is not None and found.timeout == limit[1]


def test_a_trainer_without_a_phase_is_never_stuck() -> None:
    assert stuck("", 1e9, FAST, Timeouts()) is None


def test_a_stopped_process_may_not_last_longer_than_a_step_in_any_phase() -> None:
    assert limit_of("save", FAST, Timeouts(), "T") == (10.0, "step")
    assert limit_of("step", FAST, Timeouts(), "D") == (10.0, "step")
    assert limit_of("data", FAST, Timeouts(), "t") == (60.0, "data")  # a debugger


def test_the_text_names_host_slot_phase_seconds_and_flag() -> None:
    found = stuck("step", 12.4, FAST, Timeouts())
    assert found is not None
    assert found.text("node7", 3, 41) == (
        "trainer of slot 3 on node7 is stuck: 12 s in phase step of step 41 (limit "
        "10 s; raise --timeouts.step if it takes that long)"
    )


# ----------------------------------------------------------------- an agent's looks


def test_steps_are_learned_and_a_stuck_one_is_seen() -> None:
    watch = ProgressWatch(Timeouts())
    now = 100.0
    told = watch.look(now, seen("compile", now, 0))
    assert (told.limit_s, told.timeout) == (180.0, "start")
    for _ in range(5):  # three steps a second
        now += 1.0
        told = watch.look(now, seen("step", now - 0.1, int(now - 100) * 3))
    assert (told.limit_s, told.timeout) == (10.0, "step")
    since = now - 0.1
    for _ in range(10):
        assert told.stuck() is None
        now += 1.0
        told = watch.look(now, seen("step", since, 15))
    assert told.stuck() is not None and told.for_s == pytest.approx(10.1)


def test_slow_steps_have_a_longer_limit() -> None:
    watch = ProgressWatch(Timeouts())
    looks = range(0, 40)  # a step takes four seconds
    told = [
        watch.look(float(now), seen("step", now // 4 * 4.0, now // 4)) for now in looks
    ][-1]
    assert told.limit_s == pytest.approx(80.0)


def test_a_compile_of_three_minutes_is_no_hang_and_no_step_time() -> None:
    watch = ProgressWatch(Timeouts())
    for now in range(0, 180):
        assert watch.look(float(now), seen("compile", 0.0, 0)).stuck() is None
    looks = range(180, 190)
    told = [
        watch.look(float(now), seen("step", float(now), (now - 180) * 100))
        for now in looks
    ][-1]
    assert told.limit_s == 10.0


def test_an_agent_that_was_stopped_does_not_blame_its_trainer() -> None:
    watch = ProgressWatch(Timeouts(step=10.0))
    watch.look(0.0, seen("step", 0.0))
    told = watch.look(60.0, seen("step", 0.0))  # both were stopped for a minute
    assert told.for_s <= BLIND_S and told.stuck() is None
    told = watch.look(61.0, seen("step", 0.0))
    assert told.for_s == pytest.approx(BLIND_S + 1.0)


def test_an_agent_that_begins_to_look_late_counts_from_then() -> None:
    told = ProgressWatch(Timeouts(step=10.0)).look(60.0, seen("step", 0.0))
    assert told.for_s == BLIND_S


def test_the_stack_is_asked_for_once_and_before_the_limit() -> None:
    watch = ProgressWatch(Timeouts(step=10.0))
    asked = []
    for now in range(0, 30):
        told = watch.look(float(now), seen("step", 0.0))
        if watch.dump_due(told):
            asked.append(told.for_s)
    assert asked == [9.0]
    watch.look(30.0, seen("step", 30.0, 6))
    for now in range(31, 40):
        told = watch.look(float(now), seen("step", 30.0, 6))
        if watch.dump_due(told):
            asked.append(told.for_s)
    assert asked == [9.0, 9.0]


def test_reports_are_rare_unless_a_phase_lasts() -> None:
    watch, sent = ProgressWatch(Timeouts()), []
    for tenth in range(0, 1000):
        now = tenth / 10
        since = now - 0.05 if now < 60 else 60.0
        told = watch.look(now, seen("step", since, min(tenth, 600)))
        if watch.report_due(now, told):
            sent.append(now)
    moving = [at for at in sent if at < 62]
    lasting = [at for at in sent if at >= 62]
    assert len(moving) == 7 and 36 <= len(lasting) <= 39
    ended = watch.look(101.0, seen("", 0.0))
    assert watch.report_due(101.0, ended) and ended.stuck() is None
    assert not watch.report_due(120.0, ended)


def test_the_end_of_a_phase_that_lasted_is_told_at_once() -> None:
    watch, sent = ProgressWatch(Timeouts()), []
    for tenth in range(0, 200):
        now = tenth / 10
        since, step = (0.0, 1) if now < 12 else (now - 0.05, tenth)
        if watch.report_due(now, told := watch.look(now, seen("step", since, step))):
            sent.append((now, told.for_s))
    assert sent[-1][0] == 12.0 and sent[-1][1] < 1.0 and sent[-2][1] > 10.0


def test_what_was_heard_long_ago_accuses_nobody() -> None:
    told = dict.fromkeys("abc", (100.0, progress("step", 10.5)))
    assert verdict(told, SLOTS, 101.0) is not None
    assert verdict(told, SLOTS, 104.0) is None  # nobody has looked since


def test_processor_time_is_told_as_processors() -> None:
    watch = ProgressWatch(Timeouts())
    watch.look(0.0, seen("step", 0.0, cpu_s=10.0))
    assert watch.look(2.0, seen("step", 0.0, cpu_s=13.0)).busy == 1.5
    assert watch.look(3.0, seen("step", 0.0, cpu_s=1.0)).busy == 0.0  # another process


# ------------------------------------------------------------ whom the leader names


@pytest.mark.parametrize(
    "reports, hosts, why",
    [
        # The one that is stopped, also where all have dispatched the same step.
        ([("step", 5, "S"), ("step", 5, "T"), ("step", 5, "S")], "b", "state T"),
        ([("step", 5, "S"), ("save", 5, "T"), ("save", 5, "S")], "b", "state T"),
        # Fewer steps dispatched: it never came to the collective of step 5.
        ([("step", 5, "S"), ("step", 4, "S"), ("step", 5, "S")], "b", "step 5"),
        ([("save", 5, "S"), ("data", 4, "S"), ("step", 5, "S")], "b", "step 5"),
        ([("step", 5, "S"), ("step", 4, "S"), ("data", 4, "S")], "c", "step 5"),
        # It compiles or reads, the others wait.
        ([("step", 5, "S"), ("step", 5, "S"), ("compile", 5, "S")], "c", "another"),
        ([("data", 5, "S"), ("step", 5, "S"), ("save", 5, "S")], "a", "another"),
        # Uninterruptible sleep.
        ([("step", 5, "S"), ("step", 5, "S"), ("step", 5, "D")], "c", "state D"),
        # Stopped wins over behind.
        ([("step", 4, "S"), ("step", 5, "T"), ("step", 5, "S")], "b", "state T"),
        # Trainers without a phase take no part.
        ([("", 9, "S"), ("step", 5, "S"), ("step", 4, "S")], "c", "step 5"),
        ([("step", 5, "S")] * 3, "abc", "none is behind"),
    ],
)
def test_the_host_that_is_behind_is_named(
    reports: list[tuple[Phase, int, str]], hosts: str, why: str
) -> None:
    told = {
        host: progress(phase, 20.0, step, state=state)
        for host, (phase, step, state) in zip("abc", reports, strict=True)
    }
    blame = culprit(told)
    assert blame.hosts == tuple(hosts) and why in blame.why


def test_the_one_that_has_not_finished_the_step_is_behind() -> None:
    told = {host: progress("step", 20.0, finished=5) for host in "ab"}
    told["c"] = progress("step", 20.0, finished=3)
    assert culprit(told).hosts == ("c",)


def test_the_one_that_computes_is_behind_those_that_sleep() -> None:
    told = {host: progress("step", 20.0) for host in "ab"}
    told["c"] = progress("step", 20.0, busy=1.0)
    blame = culprit(told)
    assert blame.hosts == ("c",) and "computes" in blame.why


def test_nothing_is_said_while_the_one_behind_may_take_longer() -> None:
    """Others pass their limit of a step while one reads data, which may take 60 s."""
    told = {host: (100.0, progress("step", 30.0)) for host in "ab"}
    told["c"] = (100.0, progress("data", 31.0))
    assert verdict(told, SLOTS, 100.0) is None
    told["c"] = (100.0, progress("data", 61.0))
    found = verdict(told, SLOTS, 100.0)
    assert found is not None and found.hosts == ("c",)
    assert "slot 2 on c is stuck: 61 s in phase data" in found.text
    assert "--timeouts.data" in found.text


def test_nothing_is_said_while_a_new_host_may_take_longer() -> None:
    """It has measured no steps, and uses too little of a processor to be told apart."""
    told = {host: (100.0, progress("step", 30.0)) for host in "ab"}
    new = {"limit_s": 180.0, "timeout": "start", "busy": 0.15}
    told["c"] = (100.0, progress("step", 30.0, **new))
    assert verdict(told, SLOTS, 100.0) is None
    told |= {host: (100.0, progress("step", 181.0)) for host in "ab"}
    told["c"] = (100.0, progress("step", 181.0, **new))
    found = verdict(told, SLOTS, 100.0)
    assert found is not None and found.hosts == tuple(SLOTS)


def test_the_time_since_a_report_counts() -> None:
    told = {host: (100.0, progress("step", 9.5)) for host in SLOTS}
    assert verdict(told, SLOTS, 100.4) is None
    found = verdict(told, SLOTS, 100.6)
    assert found is not None and found.hosts == tuple(SLOTS)


def test_a_silent_agent_is_named_and_not_those_that_wait_for_its_trainer() -> None:
    told = {host: (100.0, progress("step", 11.0)) for host in "ab"}
    told["c"] = (90.0, progress("step", 0.1))
    assert verdict(told, SLOTS, 100.0) is None  # it may have begun to last just now
    told |= {host: (103.0, progress("step", 14.0)) for host in "ab"}
    found = verdict(told, SLOTS, 103.0)
    assert found is not None and found.hosts == ("c",)
    assert "agent of slot 2 on c has not said for 13 s" in found.text
    del told["c"]
    found = verdict(told, SLOTS, 103.0)
    assert found is not None and "has not said yet" in found.text


def test_a_trainer_that_has_ended_is_not_silent() -> None:
    told = {host: (100.0, progress("save", 80.0)) for host in "ab"}
    told["c"] = (10.0, progress("", 0.0))
    found = verdict(told, SLOTS, 100.0)
    assert found is not None and found.hosts == ("a", "b")


def test_hosts_without_a_slot_do_not_count() -> None:
    told = {host: (100.0, progress("step", 1.0)) for host in SLOTS}
    told["spare"] = (100.0, progress("step", 500.0, 1, state="T"))
    assert verdict(told, SLOTS, 100.0) is None


PROGRESS = st.builds(
    progress,
    st.sampled_from(PHASES),
    st.floats(0, 300),
    st.integers(2, 6),
    state=st.sampled_from("SRDTt?"),
    busy=st.floats(0, 2),
)


@settings(max_examples=300, deadline=None)
@given(reports=st.dictionaries(st.sampled_from("abcdef"), PROGRESS, min_size=1))
def test_whoever_is_named_has_a_phase_and_somebody_always_is(
    reports: dict[str, JobProgress],
) -> None:
    blame = culprit(reports)
    running = {host for host, it in reports.items() if it.phase}
    assert set(blame.hosts) <= running and bool(blame.hosts) == bool(running)
    slots = {host: slot for slot, host in enumerate(sorted(reports))}
    told = {host: (0.0, it) for host, it in reports.items()}
    found = verdict(told, slots, 0.0)
    late = {host for host, it in reports.items() if it.stuck()}
    if found is not None:
        assert late >= set(found.hosts) == set(blame.hosts)
    if late and all(it.stuck() for it in reports.values() if it.phase):
        assert found is not None


@settings(max_examples=200, deadline=None)
@given(
    late=st.sampled_from(sorted(SLOTS)),
    waiting=st.sampled_from(["step", "save", "evaluate"]),
    phase=st.sampled_from(PHASES[1:]),
    behind=st.integers(0, 2),
    state=st.sampled_from("ST"),
)
def test_a_hang_is_found_in_every_phase_and_by_nobody_elses_name(
    late: str, waiting: Phase, phase: Phase, behind: int, state: str
) -> None:
    """One trainer stops in some phase; the others come to wait for it."""
    if behind == 0 and state == "S":
        behind = 1
    watches = {host: ProgressWatch(Timeouts()) for host in SLOTS}
    told: dict[str, tuple[float, JobProgress]] = {}
    found, now = None, 0.0
    while found is None and now < 400.0:
        now += 1.0
        for host in SLOTS:
            stopped = host == late
            where = phase if stopped else waiting
            step = 10 - behind if stopped else 10
            look = seen(where, 0.5, step, state=state if stopped else "S")
            told[host] = now, watches[host].look(now, look)
        found = verdict(told, SLOTS, now)
    assert found is not None and found.hosts == (late,)
    limit_s = told[late][1].limit_s
    assert limit_s < now <= limit_s + 2.0


def test_a_report_travels_as_its_fields() -> None:
    told = progress("step", 3.0)
    assert JobProgress(**dataclasses.asdict(told)) == told
