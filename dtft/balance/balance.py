"""Decides from measured rounds of steps when to change the division of load.

A division is the load of each node, such as its number of microbatches. A round is a
series of training steps with one division. `Balance.after` is a pure function: it takes
the measured seconds of a round and returns the next `Balance`, perhaps with another
division. What is divided is a `Work`: `Microbatches`, `Operators` or `Layers`.

There are two policies:

* `proportional` gives nodes load in proportion to their weights, which stand for their
  relative speeds. After each round it raises the weights of the nodes that waited
  longer than the mean, and lowers the others.
* `exact` estimates the seconds of each node (`SpeedEstimator`) and computes the
  division with the shortest step by these estimates. It changes to this division if
  that saves more than the fraction d of a step's seconds. The threshold d is higher if
  the measured seconds vary more.

`exact` has a guarantee if a step takes as long as its slowest node. Let e be the
largest relative error of a node's estimated seconds. Once `exact` changes the division
no more, a step takes at most (1 + e) / ((1 - e) (1 - d)) times as long as with the best
division. If the last refused division was in force before, (1 + e) / (1 - e) is
squared. With d > 2 e / (1 + e) the number of changes is finite. The comment below the
imports has the proof.

The guarantee does not hold if a step also waits for other things, as a pipeline does,
or if a node's seconds do not follow from its load. Even then `exact` does not alternate
between two divisions: it accepts an earlier division again only if the measured steps
of that division save more than d, or if a node has drifted (its seconds have changed
relative to the other nodes). The seconds of nodes are kept for the last 6 divisions
(`speed_estimator.MOST`). If `after` gets the seconds of whole steps, these are kept for
all divisions since a node last drifted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtft.balance.load_shares import waits
from dtft.balance.speed_estimator import Load, SpeedEstimator, Speeds, key_of
from dtft.planner.arguments import check_choice, check_number, check_whole

# Proof of the guarantee of `exact`. Let a be the division at the end, a* the best
# division, T(x) the true and T(x; est) the estimated step seconds of division x, and K
# `Rules.patience`. The last candidate c was refused: (1 - d) T(a; est) <= T(c; est),
# and T(c; est) <= T(a*; est) because c is best for the estimates. Estimates are off by
# at most e: (1 - e) T(a) <= T(a; est) and T(a*; est) <= (1 + e) T(a*). Together:
#     T(a) <= T(a*) (1 + e) / ((1 - e) (1 - d)).
# If c was in force before, it was refused by the measured seconds of both divisions:
# then T(a) (1 - d) <= T(c) with an error e of each, and
#     T(c) <= T(a*) (1 + e) / (1 - e),
# so (1 + e) / (1 - e) counts twice. Each accepted division multiplies the true T by at
# most r = (1 - d) (1 + e) / (1 - e), which is below 1 if d > 2 e / (1 + e). So at most
#     ln(T(a0) / T(a*)) / ln(1 / r)
# divisions are accepted, with a0 the first division, each followed by at most K rounds.

# Seconds of whole steps by division. If a step takes longer than its slowest node (a
# pipeline fills and drains, nodes wait for transfers), the seconds of nodes do not
# decide which of two divisions is faster. Measured seconds of whole steps do.


@dataclass(frozen=True, kw_only=True)
class Took:
    """Measured steps of one division (the load of each node).

    The division was in force for one or more rounds (series of steps), each with a
    median of its step seconds. `step_s` is the mean of these medians, each weighted by
    the number of steps of its round. `num_steps` is the number of steps of all these
    rounds.
    """

    division: Any
    step_s: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of whole steps, for each load measured since a node last drifted.

    A node drifts if its seconds change relative to the other nodes. `took` maps a load
    (the units of work of each node) to the steps measured with it. `took` is empty if
    whole steps are not measured.
    """

    took: Mapping[Load, Took] = field(default_factory=dict)

    def after(
        self, division: Any, load: Load, step_s: ArrayLike, level: float
    ) -> "StepTimes":
        """Returns the step times with the steps of one more round included.

        A round is a series of steps with one division of the work between nodes.

        Args:
            division: The division in force (a value of `Work.best` or `by_weight`).
            load: Units of work of each node in the division, such as microbatches.
            step_s: Seconds of the whole steps of the round, `[steps]`.
            level: Factor by which all nodes were slower in this round than estimated
                (`SpeedEstimator.level`). The seconds of earlier rounds are multiplied
                by this factor.

        Raises:
            ValueError: `step_s` is empty, or has a number that is not above 0.
        """
        seconds = np.asarray(step_s, float)
        if seconds.ndim != 1 or not seconds.size or not (seconds > 0).all():
            raise ValueError(
                f"step_s={seconds.tolist()!r:.80}. Allowed: a number above 0 for each "
                "step of the round; None where whole steps are not measured."
            )
        now = float(np.median(seconds))
        took = {
            one: replace(it, step_s=level * it.step_s) for one, it in self.took.items()
        }
        before = took.get(load, Took(division=division, step_s=now, num_steps=0))
        total = before.num_steps + seconds.size
        mean_s = before.step_s + seconds.size / total * (now - before.step_s)
        here = Took(division=division, step_s=mean_s, num_steps=total)
        return StepTimes(took={**took, load: here})

    def gain(self, here: Load, there: Load) -> float | None:
        """Returns the fraction of a step's seconds that a change of load would save.

        The change is from load `here` to load `there` (the units of work of each node).
        The fraction is computed from measured steps. It is below 0 if `there` is
        slower, and None if either load has no measured steps.
        """
        if here not in self.took or there not in self.took:
            return None
        return 1 - self.took[there].step_s / self.took[here].step_s

    def fastest(self, here: Load) -> tuple[Any, float] | None:
        """Finds the division (load of each node) with the fastest measured steps.

        Returns the division, and the fraction of a step's seconds that a change from
        load `here` to this division would save. Returns None if `here` has no measured
        steps.
        """
        if here not in self.took:
            return None
        best = min(self.took.values(), key=lambda it: it.step_s)
        return best.division, 1 - best.step_s / self.took[here].step_s


Floats = NDArray[np.float64]
Policy = Literal["proportional", "exact"]
Division = TypeVar("Division")


class Work(Protocol[Division]):
    """Work that can be divided between nodes.

    A division is one way to divide the work, such as the number of microbatches of each
    node. A unit of load is a microbatch, or a second of the cost model.
    """

    @property
    def num_nodes(self) -> int:
        """The number of nodes that share the work."""
        ...

    def by_weight(self, weights: Floats) -> Division:
        """Returns a division for nodes whose relative speeds are the weights, `[n]`."""
        ...

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Division:
        """Returns the division (load of each node) with the shortest step.

        Each node takes `unit_s` seconds per unit of load, and `fixed_s` more seconds
        per step (None: 0); `[n]` each.
        """
        ...

    def load(self, division: Division) -> Floats:
        """Returns the units of load of each node in a step, `[n]`."""
        ...

    def seconds(
        self, division: Division, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Returns the seconds that a step takes with a division.

        Each node takes `unit_s` seconds per unit of load, and `fixed_s` more seconds
        per step (None: 0); `[n]` each.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of `Balance`: the policy, and when the division of load changes.

    A division counts as settled after `patience` rounds (series of steps) without a
    change of the division and without drift. A node drifts if its seconds change
    relative to the other nodes.
    """

    policy: Policy = "exact"
    least_gain: float = 0.01
    """Least fraction of a step's seconds that a new division must save for `exact` to
    change to it."""
    noise_factor: float = 2.0
    """`exact` accepts a gain only if it exceeds this many relative standard errors of
    the compared seconds."""
    step: float = 0.3
    """Relative increase of a node's weight by `proportional`, if the node waits a whole
    step longer than the mean node. Shorter waits increase it in proportion."""
    patience: int = 3
    """Rounds in a row without change or drift after which a division is settled."""

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, Policy)
        check_number("least_gain", self.least_gain, 0, 1)
        check_number("noise_factor", self.noise_factor, 0)
        # Beyond 1 the weight of the fastest node could become negative.
        check_number("step", self.step, 0.001, 1)
        check_whole("patience", self.patience, 1)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a round of steps showed, and whether the division of work was changed.

    Nodes wait in each step for the slowest node: `max_wait_s` is the mean over steps of
    the longest wait, `mean_wait_s` the mean over steps and nodes. The candidate is the
    division that the policy proposes, and `changed` whether it was accepted.
    """

    max_wait_s: float
    mean_wait_s: float
    gain: float
    """Fraction of a step's seconds that the candidate saves. With `proportional` the
    gain is 1 if the candidate differs from the division in force, else 0."""
    threshold: float
    """Gain that a candidate must exceed. The seconds that the candidate saves must also
    exceed the cost of the change."""
    changed: bool
    drifted: tuple[int, ...]
    """Nodes whose seconds per unit changed, relative to the others, beyond noise."""


@dataclass(frozen=True, kw_only=True)
class Balance(Generic[Division]):
    """The division of load in force, and the measured seconds of nodes and steps.

    A division is the load of each node. `weights` are the relative speeds of the nodes,
    `[n]`, by which `proportional` divides. `rounds` is the number of measured rounds
    (series of steps). `judgement` is that of the last round; None before the first.
    """

    work: Work[Division]
    rules: Rules
    division: Division
    weights: Floats
    tried: SpeedEstimator
    """Seconds per unit of load that were measured on each node, for each of the last
    divisions in force."""
    steps: StepTimes = StepTimes()
    """Measured seconds of whole steps for each load; empty if `after` gets no
    `step_s`."""
    unchanged: int = 0
    """Rounds since the division last changed or a node last drifted."""
    rounds: int = 0
    judgement: Judgement | None = field(default=None, compare=False)

    @classmethod
    def begin(cls, work: Work[Division], rules: Rules = Rules()) -> "Balance[Division]":
        """Makes the first balance: equal weights of all nodes, and no measurements.

        Raises:
            ValueError: `work` lacks the method `by_weight`, or `rules` is no `Rules`.
        """
        if not hasattr(work, "by_weight"):
            raise ValueError(
                f"work={work!r:.80}. Allowed: Microbatches, Layers, Operators, or what "
                "else has the methods of balance.Work."
            )
        if not isinstance(rules, Rules):
            raise ValueError(
                f"rules={rules!r:.80}. Allowed: balance.Rules, such as "
                "Rules(policy='exact')."
            )
        weights = np.ones(work.num_nodes)
        return cls(
            work=work,
            rules=rules,
            division=work.by_weight(weights),
            weights=weights,
            tried=SpeedEstimator(num_nodes=work.num_nodes),
        )

    @property
    def settled(self) -> bool:
        """Whether the last `patience` rounds had no change of division and no drift.

        `patience` is a field of `rules`; a round is a series of steps with one
        division. A node drifts if its seconds per unit change relative to the other
        nodes. A settled division can still change: after a drift, or once more measured
        steps have reduced the threshold below the gain of another division.
        """
        return self.unchanged >= self.rules.patience

    def after(
        self,
        busy_s: ArrayLike,
        *,
        step_s: ArrayLike | None = None,
        remaining_steps: float = np.inf,
        cost_s: float = 0.0,
    ) -> "Balance[Division]":
        """Returns the balance after one more round, perhaps with another division.

        A round is a series of steps with one division. The policy of `rules` proposes a
        division, the candidate. The division changes to the candidate if the gain (the
        fraction of a step's seconds that the candidate saves) exceeds the policy's
        threshold, and if the seconds saved in `remaining_steps` exceed `cost_s`. The
        threshold of `proportional` is 0. That of `exact` is the larger of
        `rules.least_gain` and `rules.noise_factor` times the largest relative standard
        error of a node's seconds.

        Args:
            busy_s: Seconds of local work of each node in each step of the round,
                `[steps, n]`.
            step_s: Seconds of whole steps, `[steps]`, if these exceed the seconds of
                the slowest node. `exact` then compares measured divisions by step
                seconds. None: a step takes as long as its slowest node.
            remaining_steps: The number of steps that remain, in which a new division
                would be in force.
            cost_s: Seconds to change the division (compiling, moving state).

        Raises:
            ValueError: `busy_s` has another shape; a node with load has seconds that
                are not finite and above 0; `step_s` is empty or has a number that is
                not above 0; or `cost_s` or `remaining_steps` is below 0.
        """
        if not (remaining_steps >= 0 and cost_s >= 0):
            raise ValueError(
                f"remaining_steps={remaining_steps}, cost_s={cost_s}. Allowed: 0 or "
                "more each."
            )
        busy, load = np.asarray(busy_s, float), self.work.load(self.division)
        tried, gone = self.tried.after(busy, load)
        steps = StepTimes() if gone else self.steps
        if step_s is not None:
            steps = steps.after(self.division, key_of(load), step_s, tried.level)
        measured = replace(self, tried=tried, steps=steps)
        policy = _proportional if self.rules.policy == "proportional" else _exact
        division, weights, gain, threshold = policy(measured, busy)
        took_s = float(np.mean(busy.max(1) if step_s is None else np.asarray(step_s)))
        saved = gain * took_s * remaining_steps
        changed = gain > threshold and not saved <= cost_s
        waited = waits(busy)
        return replace(
            measured,
            division=division if changed else self.division,
            weights=weights,
            unchanged=0 if changed or gone else self.unchanged + 1,
            rounds=self.rounds + 1,
            judgement=Judgement(
                max_wait_s=float(waited.max(1).mean()),
                mean_wait_s=float(waited.mean()),
                gain=gain,
                threshold=threshold,
                changed=changed,
                drifted=gone,
            ),
        )


def _exact(now: Balance[Division], _: Floats) -> tuple[Division, Floats, float, float]:
    speeds = now.tried.speeds()
    candidate = now.work.best(speeds.unit_s, speeds.fixed_s)
    here, there = (now.work.load(it) for it in (now.division, candidate))
    gain, error = _gain(now, candidate, speeds)
    threshold = max(now.rules.least_gain, now.rules.noise_factor * error)
    measured = now.steps.gain(key_of(here), key_of(there))
    gain = gain if measured is None else measured
    fastest = now.steps.fastest(key_of(here))
    if gain <= threshold and fastest is not None and fastest[1] > threshold:
        candidate, gain = fastest
    return candidate, speeds.weights(now.work.load(candidate)), gain, threshold


def _gain(
    now: Balance[Division], candidate: Division, speeds: Speeds
) -> tuple[float, float]:
    """Returns the fraction of a step's seconds that a candidate saves, and its error.

    The candidate is a division that may replace the division of `now`. The fraction is
    computed from the seconds of each node in both divisions. These are measured seconds
    if both divisions were measured (`SpeedEstimator.measured`), else the estimates
    `speeds`. The error is the largest relative standard error of the seconds of a node
    in either division.
    """
    loads = [now.work.load(it) for it in (now.division, candidate)]
    here, there = (now.tried.measured(load) for load in loads)
    if here is None or there is None:
        here = there = speeds
    was_s = now.work.seconds(now.division, here.unit_s, here.fixed_s)
    is_s = now.work.seconds(candidate, there.unit_s, there.fixed_s)
    return 1 - is_s / was_s, max(here.error, there.error)


_LEAST_WEIGHT = 0.001
"""Least weight of a node under `proportional`, relative to the mean weight. Without a
limit, the weight of a node that already has its least load would fall in every round:
it would take as many rounds to rise again, and in the end become 0."""


def _proportional(
    now: Balance[Division], busy: Floats
) -> tuple[Division, Floats, float, float]:
    """Raises the weights of nodes that wait longer than the mean; lowers the others.

    Nodes get load in proportion to their weights, which stand for their relative
    speeds. The new weights are scaled to a mean of 1; then weights below 0.001
    (`_LEAST_WEIGHT`) are raised to 0.001. `now` has the former weights and the division
    in force. `busy` has the seconds of local work of each node in each step,
    `[steps, n]`.

    Returns:
        The division by the new weights (the candidate), the new weights, the gain and
        the threshold. The gain is 1 if the candidate gives a node another load than the
        division in force, else 0. The threshold is 0.
    """
    wait = waits(busy).mean(0)
    step_s = float(busy.max(1).mean())
    before = now.weights / now.weights.max()  # those of a checkpoint may be near 1e308
    weights = before * (1 + now.rules.step * (wait - wait.mean()) / step_s)
    weights = np.maximum(weights / weights.mean(), _LEAST_WEIGHT)
    candidate = now.work.by_weight(weights)
    same = np.array_equal(now.work.load(candidate), now.work.load(now.division))
    return candidate, weights, 0.0 if same else 1.0, 0.0
