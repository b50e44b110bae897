"""The exact solver against trying everything, on many small random problems."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.search.elimination import (
    CostProblem,
    Factor,
    eliminate,
    elimination_order,
)
from dtft.planner.search.solver import Assignment, prune, solve, solve_each


def brute_force(problem: CostProblem) -> tuple[tuple[int, ...], float]:
    """The lexicographically smallest assignment of least cost."""
    values = np.indices(problem.sizes)
    total = np.zeros(problem.sizes)
    for factor in problem.factors:
        total += factor.costs[tuple(values[v] for v in factor.variables)]
    best = np.unravel_index(total.argmin(), total.shape)  # the first of equal ones
    return tuple(int(value) for value in best), float(total.min())


def problem_over(
    rng: np.random.Generator,
    sizes: tuple[int, ...],
    scopes: list[tuple[int, ...]],
    *,
    forbidden: float = 0.0,
    integers: bool = False,
) -> CostProblem:
    """Random tables; `forbidden` is the share of entries that are +inf."""
    factors: list[Factor] = []
    for scope in scopes:
        shape = [sizes[variable] for variable in scope]
        costs = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 3)
        if integers:  # sums are exact, so ties are ties
            costs = rng.integers(0, 3, shape).astype(float)
        costs[rng.random(shape) < forbidden] = np.inf
        factors.append(Factor(variables=scope, costs=costs))
    return CostProblem(sizes=sizes, factors=tuple(factors))


def random_scopes(rng: np.random.Generator, num_variables: int) -> list:
    """Some factors over one to four variables."""
    return [
        tuple(
            rng.permutation(num_variables)[
                : rng.integers(1, min(4, num_variables) + 1)
            ].tolist()
        )
        for _ in range(rng.integers(1, 2 * num_variables))
    ]


def random_sizes(rng: np.random.Generator, num: int, most: int = 4) -> tuple[int, ...]:
    return tuple(rng.integers(1, most + 1, num).tolist())


def chain(num: int) -> list[tuple[int, ...]]:
    return [(at, at + 1) for at in range(num - 1)] + [(at,) for at in range(num)]


def tree(rng: np.random.Generator, num: int) -> list[tuple[int, ...]]:
    """Every parent has a smaller number than its children."""
    return [(int(rng.integers(at)), at) for at in range(1, num)] + [
        (at,) for at in range(num)
    ]


def loop(num: int) -> list[tuple[int, ...]]:
    return [(at, (at + 1) % num) for at in range(num)]


def assert_best(problem: CostProblem, found: Assignment) -> None:
    _, least = brute_force(problem)
    scale = max(np.abs(f.costs[np.isfinite(f.costs)]).max() for f in problem.factors)
    assert found.cost == pytest.approx(least, abs=1e-9 * scale, rel=1e-9)
    assert problem.cost(found.values) == pytest.approx(found.cost, abs=1e-9 * scale)
    assert found.bound == pytest.approx(found.cost, abs=1e-9 * scale)


SEEDS = range(100)


@pytest.mark.parametrize("shape", ["chain", "tree", "loop", "any"])
def test_least_cost_is_found_on(shape: str) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        num = int(rng.integers(3, 7))
        scopes = {
            "chain": chain(num),
            "tree": tree(rng, num),
            "loop": loop(num),
            "any": random_scopes(rng, num),
        }[shape]
        sizes = random_sizes(rng, num)
        problem = problem_over(rng, sizes, scopes, forbidden=0.1)
        if math.isinf(brute_force(problem)[1]):
            with pytest.raises(ValueError, match="forbidden"):
                solve(problem)
            continue
        found = solve(problem)
        assert found.method == "elimination"
        assert_best(problem, found)


def test_mixed_integer_program_finds_the_least_cost() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num = int(rng.integers(2, 6))
        sizes = tuple(rng.integers(2, 5, num).tolist())
        problem = problem_over(rng, sizes, random_scopes(rng, num), forbidden=0.1)
        if math.isinf(brute_force(problem)[1]):
            with pytest.raises(ValueError, match="forbidden"):
                solve(problem, max_entries=1)
            continue
        assert_best(problem, solve(problem, max_entries=1))


@st.composite
def problems(draw: st.DrawFn) -> CostProblem:
    num = draw(st.integers(1, 5))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=num, max_size=num)))
    factors: list[Factor] = []
    for _ in range(draw(st.integers(1, 6))):
        scope = draw(
            st.lists(st.integers(0, num - 1), min_size=1, max_size=4, unique=True)
        )
        shape = [sizes[variable] for variable in scope]
        entry = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])
        count = math.prod(shape)
        costs = draw(st.lists(entry, min_size=count, max_size=count))
        factors.append(
            Factor(variables=tuple(scope), costs=np.array(costs).reshape(shape))
        )
    return CostProblem(sizes=sizes, factors=tuple(factors))


@settings(max_examples=150)
@given(problems())
def test_elimination_equals_trying_everything(problem: CostProblem) -> None:
    least = brute_force(problem)[1]
    if math.isinf(least):
        with pytest.raises(ValueError, match="forbidden"):
            solve(problem)
    else:
        found = solve(problem)
        assert problem.cost(found.values) == found.cost == found.bound == least


@settings(max_examples=150)
@given(problems())
def test_pruning_never_removes_the_optimum(problem: CostProblem) -> None:
    pruned = prune(problem)
    assert all(len(kept) >= 1 for kept in pruned.kept)
    values, least = brute_force(pruned.problem)
    assert least == brute_force(problem)[1]
    assert problem.cost(pruned.restored(values)) == least
    assert prune(pruned.problem).problem.sizes == pruned.problem.sizes


def test_pruning_never_removes_the_optimum_of_costs_in_seconds() -> None:
    removed = 0
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        num = int(rng.integers(2, 6))
        sizes = random_sizes(rng, num, 5)
        problem = problem_over(rng, sizes, random_scopes(rng, num), forbidden=0.1)
        pruned = prune(problem)
        removed += sum(problem.sizes) - sum(pruned.problem.sizes)
        assert brute_force(pruned.problem)[1] == brute_force(problem)[1]
    assert removed > 100


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_of_equal_costs_the_lexicographically_smallest_is_taken(shape: str) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        num = int(rng.integers(2, 7))
        scopes = chain(num) if shape == "chain" else tree(rng, num)
        problem = problem_over(rng, random_sizes(rng, num), scopes, integers=True)
        assert solve(problem).values == brute_force(problem)[0]


def test_same_problem_gives_the_same_assignment() -> None:
    rng = np.random.default_rng(0)
    problem = problem_over(rng, (3,) * 8, random_scopes(rng, 8), integers=True)
    again = CostProblem(sizes=problem.sizes, factors=problem.factors)
    assert solve(problem) == solve(again)
    assert solve(problem, max_entries=1) == solve(again, max_entries=1)


def test_long_chain_of_shared_tables_is_eliminated() -> None:
    rng = np.random.default_rng(0)
    step = rng.random((12, 12))
    own = rng.random((3840, 12))
    factors = [Factor(variables=(at, at + 1), costs=step) for at in range(3839)]
    factors += [Factor(variables=(at,), costs=own[at]) for at in range(3840)]
    problem = CostProblem(sizes=(12,) * 3840, factors=tuple(factors))
    found = solve(problem)
    ahead = own[0]
    for at in range(1, 3840):
        ahead = (ahead[:, np.newaxis] + step).min(axis=0) + own[at]
    assert found.cost == pytest.approx(ahead.min(), rel=1e-12)
    assert problem.cost(found.values) == pytest.approx(found.cost, rel=1e-12)


def test_grid_too_wide_for_small_tables_gives_the_same_least_cost() -> None:
    rng = np.random.default_rng(1)
    cells = np.arange(36).reshape(6, 6)
    pairs = np.stack([cells[:, :-1].ravel(), cells[:, 1:].ravel()], axis=1).tolist()
    pairs += np.stack([cells[:-1].ravel(), cells[1:].ravel()], axis=1).tolist()
    scopes = [(first, second) for first, second in pairs]
    problem = problem_over(rng, (2,) * 36, scopes)
    exact = solve(problem)
    assert exact.method == "elimination"
    program = solve(problem, max_entries=16)
    assert program.method == "mixed-integer"
    assert program.cost == pytest.approx(exact.cost, rel=1e-6)
    assert program.bound <= program.cost


def test_pruned_problem_may_fit_the_tables() -> None:
    rng = np.random.default_rng(2)
    scopes = list(itertools.combinations(range(6), 2))
    clique = problem_over(rng, (3,) * 6, scopes)
    own = [Factor(variables=(v,), costs=np.array([0, 1e9, 1e9])) for v in range(6)]
    ordered = [
        Factor(variables=f.variables, costs=np.sort(np.sort(f.costs, 0), 1))
        for f in clique.factors
    ]
    found = solve(CostProblem(sizes=(3,) * 6, factors=(*ordered, *own)), max_entries=4)
    assert found.method == "elimination"
    assert found.values == (0,) * 6


def test_deadline_that_passes_at_once_gives_a_local_optimum_and_a_bound() -> None:
    rng = np.random.default_rng(4)
    scopes = list(itertools.combinations(range(30), 2))
    problem = problem_over(rng, (4,) * 30, scopes)
    found = solve(problem, deadline_s=0.0, max_entries=1)
    assert found.method == "descent"
    assert -math.inf < found.bound < found.cost == problem.cost(found.values)
    for variable, value in itertools.product(range(30), range(4)):
        other = list(found.values)
        other[variable] = value
        assert problem.cost(other) >= found.cost - 1e-9


def test_deadline_that_passes_with_all_that_was_tried_forbidden_is_an_error() -> None:
    different = np.where(np.eye(3, dtype=bool), np.inf, 0.0)
    pairs = [*itertools.combinations(range(3), 2), (3, 4)]
    factors = [Factor(variables=pair, costs=different) for pair in pairs]
    # Where all start, any single change leaves something forbidden.
    swap = np.full((3, 3, 3), np.inf)
    swap[2, 1, 0] = 0.0
    problem = CostProblem(
        sizes=(3,) * 5, factors=(*factors, Factor(variables=(0, 1, 2), costs=swap))
    )
    with pytest.raises(
        TimeoutError, match=r"deadline_s=0: no allowed .* is at least 0"
    ):
        solve(problem, deadline_s=0.0, max_entries=1)
    assert solve(problem).values == (2, 1, 0, 0, 1)


def test_conflict_names_the_variables_that_cannot_have_values_together() -> None:
    different = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    odd_loop = [(1, 4), (4, 6), (6, 1)]
    others = [(0, 1), (2, 3), (3, 4), (5, 6), (6, 7)]
    factors = [Factor(variables=scope, costs=different) for scope in odd_loop]
    factors += [Factor(variables=scope, costs=1 - np.eye(2)) for scope in others]
    factors += [Factor(variables=(2, 3), costs=different)]
    problem = CostProblem(
        sizes=(2,) * 8, factors=tuple(factors), names=tuple("abcdefgh")
    )
    with pytest.raises(ValueError, match=r"values of b, e, g is forbidden"):
        solve(problem)
    with pytest.raises(ValueError, match=r"values of b, e, g is forbidden"):
        solve(problem, max_entries=1)


def test_conflict_of_one_variable_is_named() -> None:
    never = Factor(variables=(1,), costs=np.full(3, np.inf))
    problem = CostProblem(sizes=(2, 3), factors=(never,))
    with pytest.raises(ValueError, match=r"values of variable 1 is forbidden"):
        solve(problem)


def test_conflicts_are_smallest_and_real() -> None:
    seen = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        num = int(rng.integers(2, 6))
        scopes = random_scopes(rng, num)
        names = tuple(f"v{at}" for at in range(num))
        problem = problem_over(rng, (2,) * num, scopes, forbidden=0.6)
        problem = CostProblem(sizes=problem.sizes, factors=problem.factors, names=names)
        if not math.isinf(brute_force(problem)[1]):
            continue
        seen += 1
        with pytest.raises(ValueError) as error:
            solve(problem)
        words = str(error.value).split("values of ")[1].split(" is forbidden")[0]
        named = {names.index(word) for word in words.split(", ")}
        within = tuple(f for f in problem.factors if named >= set(f.variables))
        assert math.isinf(
            brute_force(CostProblem(sizes=problem.sizes, factors=within))[1]
        )
    assert seen > 30


def test_problem_without_factors_or_choices_is_solved() -> None:
    assert solve(CostProblem(sizes=(2, 1), factors=())).values == (0, 0)
    only = Factor(variables=(0, 1), costs=np.array([[4.0]]))
    assert solve(CostProblem(sizes=(1, 1), factors=(only,))).cost == 4.0


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (Factor(variables=(0, 0), costs=np.zeros((2, 2))), "take the diagonal"),
        (Factor(variables=(2,), costs=np.zeros(2)), "positions from 0 to 1"),
        (Factor(variables=(), costs=np.zeros(())), "positions from 0 to 1"),
        (
            Factor(variables=(0, 1), costs=np.zeros((3, 2))),
            "shape (3, 2) over a, b",
        ),
        (Factor(variables=(1,), costs=np.array([0, 0, np.nan])), "over b has an entry"),
        (Factor(variables=(1,), costs=np.array([0, 0, -np.inf])), "NaN or -inf"),
    ],
)
def test_what_is_no_problem_is_refused(factor: Factor, words: str) -> None:
    with pytest.raises(ValueError) as error:
        CostProblem(sizes=(2, 3), factors=(factor,), names=("a", "b"))
    assert words in str(error.value)


def test_variables_need_values_and_names() -> None:
    with pytest.raises(ValueError, match="variable 1 has 0 values"):
        CostProblem(sizes=(2, 0), factors=())
    with pytest.raises(ValueError, match="names has 1 entries for 2 variables"):
        CostProblem(sizes=(2, 2), factors=(), names=("a",))


def test_order_of_a_chain_is_its_reverse_and_a_wide_clique_has_none() -> None:
    limits = {"max_entries": 100, "max_total": 10_000}
    assert elimination_order((3,) * 5, chain(5), **limits) == [4, 3, 2, 1, 0]
    clique = list(itertools.combinations(range(6), 2))
    assert elimination_order((3,) * 6, clique, **limits) is None
    ample = {"max_entries": 729, "max_total": 10_000}
    assert elimination_order((3,) * 6, clique, **ample) is not None
    many = {"max_entries": 9, "max_total": 30}
    assert elimination_order((3,) * 5, chain(5), **many) is None


def test_any_order_of_elimination_gives_the_least_cost() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        problem = problem_over(rng, (3,) * 5, random_scopes(rng, 5))
        tables = [(factor.variables, factor.costs) for factor in problem.factors]
        order = rng.permutation(5).tolist()
        values, cost = eliminate(problem.sizes, tables, order)
        assert cost == pytest.approx(brute_force(problem)[1], rel=1e-9)
        assert problem.cost(values) == pytest.approx(cost, rel=1e-9)


@settings(max_examples=60)
@given(problems(), st.data(), st.sampled_from([1, 64, 2**22]))
def test_each_value_of_a_variable_gets_what_solving_it_alone_gives(
    problem: CostProblem, data: st.DataObject, max_entries: int
) -> None:
    """At once, in parts, and where tables are too large each by itself."""
    given_variable = data.draw(st.integers(0, len(problem.sizes) - 1))
    alone = [
        brute_force(problem.restricted(kept))[1]
        for kept in _with_each(problem, given_variable)
    ]
    if np.isinf(alone).any():
        with pytest.raises(ValueError, match="forbidden"):
            solve_each(problem, given=given_variable, max_entries=max_entries)
        return
    found = solve_each(problem, given=given_variable, max_entries=max_entries)
    assert found[:, given_variable].tolist() == list(range(len(alone)))
    assert [problem.cost(values) for values in found] == pytest.approx(alone, rel=1e-9)


def _with_each(problem: CostProblem, variable: int) -> Iterator[list[np.ndarray]]:
    for value in range(problem.sizes[variable]):
        kept = [np.arange(size) for size in problem.sizes]
        kept[variable] = np.array([value])
        yield kept
