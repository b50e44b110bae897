"""When load is divided anew between nodes, from what rounds of steps measured.

One value, `Balance`, goes through rounds: divide, train, measure, judge. Pure: it is
handed seconds and returns the next value. What is divided is a `Work`: `Microbatches`,
`Operators` or `Layers`.

Two policies. `proportional` is the seeds' rule: a node's weight follows its wait.
`exact` takes the division that is best for the seconds of `SpeedEstimator`, if its gain
is above the noise. Its guarantee, where a step is its slowest node's work:
let e be the largest relative error of the seconds that nodes are estimated to need, d
the least gain that is accepted, a the division at the end and a* the best. The last
candidate c was refused: (1 - d) T(a; est) <= T(c; est), and T(c; est) <= T(a*; est) as
c is best for the estimates. Estimates are off by e at most: (1 - e) T(a) <= T(a; est)
and T(a*; est) <= (1 + e) T(a*). Together: T(a) <= T(a*) (1 + e) / ((1 - e) (1 - d)).
If c was tried before, it was refused by what both took: then T(a) (1 - d) <= T(c) with
an error e of each, and T(c) <= T(a*) (1 + e) / (1 - e), so (1 + e) / (1 - e) counts
twice. Each accepted division multiplies the true T by at most
r = (1 - d) (1 + e) / (1 - e); with d > 2 e / (1 + e) that is below 1, so there are at
most ln(T0 / T*) / ln(1 / r) of them, each followed by at most K rounds.

Where estimates say less than that (a pipeline waits too; a node is not quite what its
load says) there is no such bound. Still, between two drifts of a node a division that
is remembered (`speed_estimator.MOST`; all of them if `after` is told of whole steps)
comes back only if it was measured to be faster by d than the one in force.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtft.balance.speed_estimator import Load, SpeedEstimator, Speeds, key_of
from dtft.balance.work import waits
from dtft.planner.arguments import check_choice, check_number, check_whole

# Seconds of steps by division. If a step takes longer than its slowest node's work (a
# pipeline fills and drains, nodes wait for transfers), seconds of nodes do not say
# which of two divisions is faster. Measured steps of both do.


@dataclass(frozen=True, kw_only=True)
class Took:
    """Steps of one division."""

    division: Any
    step_s: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of the divisions tried since a node drifted last; none where nobody says."""

    took: Mapping[Load, Took] = field(default_factory=dict)

    def after(
        self, division: Any, load: Load, step_s: ArrayLike, level: float
    ) -> "StepTimes":
        """With another round.

        Args:
            division: The one in force.
            load: That of the division.
            step_s: Seconds of whole steps, `[steps]`.
            level: By how much everything is slower than before.

        Raises:
            ValueError: no seconds above 0.
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
        """Share of a step that the second saves; None if one of them was not tried."""
        if here not in self.took or there not in self.took:
            return None
        return 1 - self.took[there].step_s / self.took[here].step_s

    def fastest(self, here: Load) -> tuple[Any, float] | None:
        """The division whose steps took least, and the share of a step that it saves;
        None if nothing was tried."""
        if here not in self.took:
            return None
        best = min(self.took.values(), key=lambda it: it.step_s)
        return best.division, 1 - best.step_s / self.took[here].step_s


Floats = NDArray[np.float64]
Policy = Literal["proportional", "exact"]
Division = TypeVar("Division")


class Work(Protocol[Division]):
    """What is divided between nodes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that share the work."""
        ...

    def by_weight(self, weights: Floats) -> Division:
        """The division in proportion to weights, `[n]`."""
        ...

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Division:
        """The division that ends first if a unit takes these seconds, and each step so
        many more whatever a node holds; `[n]` each."""
        ...

    def load(self, division: Division) -> Floats:
        """Units that each node has to work on in a step, `[n]`."""
        ...

    def seconds(
        self, division: Division, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Until the last node is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a division changes and when the loop stops."""

    policy: Policy = "exact"
    least_gain: float = 0.01
    """`exact` does not change for less (a share of the step)."""
    noise_factor: float = 2.0
    """`exact` accepts a gain above this many relative standard errors."""
    step: float = 0.3
    """`proportional`: how far weights follow waits."""
    patience: int = 3
    """Unchanged rounds after which the division is final."""

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, Policy)
        check_number("least_gain", self.least_gain, 0, 1)
        check_number("noise_factor", self.noise_factor, 0)
        # Beyond 1 the weight of the fastest node could become negative.
        check_number("step", self.step, 0.001, 1)
        check_whole("patience", self.patience, 1)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a round said."""

    max_wait_s: float
    mean_wait_s: float
    gain: float
    """Share of the step that the best known division saves (`exact`)."""
    threshold: float
    """Gain from which it is accepted."""
    changed: bool
    drifted: tuple[int, ...]
    """Nodes whose speed changed."""


@dataclass(frozen=True, kw_only=True)
class Balance(Generic[Division]):
    """The division in force and all that is known about the nodes."""

    work: Work[Division]
    rules: Rules
    division: Division
    weights: Floats
    tried: SpeedEstimator
    """What nodes took with the divisions so far."""
    steps: StepTimes = StepTimes()
    """What whole steps took, where `after` is told."""
    unchanged: int = 0
    """Rounds since the division changed last."""
    rounds: int = 0
    judgement: Judgement | None = field(default=None, compare=False)

    @classmethod
    def begin(cls, work: Work[Division], rules: Rules = Rules()) -> "Balance[Division]":
        """Equal weights and nothing known.

        Raises:
            ValueError: no work, or no rules.
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
        """Nothing is left to find: it stays so until a node drifts, joins or leaves, or
        more steps have made the noise smaller than a gain."""
        return self.unchanged >= self.rules.patience

    def after(
        self,
        busy_s: ArrayLike,
        *,
        step_s: ArrayLike | None = None,
        remaining_steps: float = np.inf,
        cost_s: float = 0.0,
    ) -> "Balance[Division]":
        """With one more round.

        Args:
            busy_s: Seconds of local work, `[steps, n]`.
            step_s: Seconds of whole steps, `[steps]`, where these are more than the
                slowest node's work: divisions that were tried are compared by them.
            remaining_steps: Steps that a new division would serve.
            cost_s: Of changing the division (compiling, moving state).

        Raises:
            ValueError: see `SpeedEstimator.after` and `StepTimes.after`; or a cost or
                steps below 0.
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
    return candidate, speeds.weights(there), gain, threshold


def _gain(
    now: Balance[Division], candidate: Division, speeds: Speeds
) -> tuple[float, float]:
    """By seconds of nodes: what a division saves, and the error of that; as these were
    measured, where both divisions were tried."""
    loads = [now.work.load(it) for it in (now.division, candidate)]
    here, there = (now.tried.measured(load) for load in loads)
    if here is None or there is None:
        here = there = speeds
    was_s = now.work.seconds(now.division, here.unit_s, here.fixed_s)
    is_s = now.work.seconds(candidate, there.unit_s, there.fixed_s)
    return 1 - is_s / was_s, max(here.error, there.error)


def _proportional(
    now: Balance[Division], busy: Floats
) -> tuple[Division, Floats, float, float]:
    """The literal rule: weights follow waits; any change of the division is taken."""
    wait = waits(busy).mean(0)
    step_s = float(busy.max(1).mean())
    weights = now.weights * (1 + now.rules.step * (wait - wait.mean()) / step_s)
    candidate = now.work.by_weight(weights)
    same = np.array_equal(now.work.load(candidate), now.work.load(now.division))
    return candidate, weights, 0.0 if same else 1.0, 0.0
