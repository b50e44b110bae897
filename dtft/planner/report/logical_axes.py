"""A plan as Flax's rules from logical names of dims to axes of the mesh.

The rules are for models whose parameters have logical names ("embed", "mlp",..). A rule
gives a name the same axes in all arrays, but a plan can divide each array differently.
So each rule has the axes that the plan uses for the most elements, and the arrays that
the plan divides in another way are listed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dtft.planner.types import Spec

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Rules for `flax.core.spmd.logical_axis_rules`, and the exceptions to them."""

    rules: tuple[tuple[str, Axes], ...]
    """Pairs of a logical name and its mesh axes, sorted by name; each name once."""
    exceptions: tuple[str, ...]
    """Paths of arrays that the rules divide in another way than the plan."""


def axis_rules(
    specs: Mapping[str, Spec],
    names: Mapping[str, Sequence[str | None]],
    shapes: Mapping[str, Sequence[int]],
) -> AxisRules:
    """Chooses the mesh axes of each logical name.

    If the plan divides dims of one name by different axes, the axes are chosen that
    divide the arrays with the most elements in total.

    Args:
        specs: the plan's spec of each array, by path.
        names: logical names of each array, one per dim; None for a dim without a name.
        shapes: shapes of the same arrays.

    Raises:
        ValueError: an array does not have one name per dim, or has no spec.

    >>> specs = {"up": (("fsdp",), ("tensor",)), "down": (("tensor",), ("fsdp",))}
    >>> names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    >>> axis_rules(specs, names, {"up": (8, 32), "down": (32, 8)}).rules
    (('embed', 'fsdp'), ('mlp', 'tensor'))
    """
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for path, of_dims in names.items():
        _check(path, of_dims, specs)
        for name, axes in zip(of_dims, specs[path], strict=True):
            if name is not None:
                found.setdefault(name, Counter())[axes] += prod(shapes[path])
    rules = {name: votes.most_common(1)[0][0] for name, votes in found.items()}
    return AxisRules(
        rules=tuple((name, _flax(rules[name])) for name in sorted(rules)),
        exceptions=tuple(
            path
            for path, of_dims in names.items()
            if tuple(rules.get(name, ()) if name else () for name in of_dims)
            != specs[path]
        ),
    )


def _flax(axes: tuple[str, ...]) -> Axes:
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes


def _check(path: str, names: Sequence[str | None], specs: Mapping[str, Spec]) -> None:
    if path not in specs:
        raise ValueError(
            f"the array {path!r} has logical names but no spec in the plan. Allowed: "
            "the parameters (entry step: the state) that the plan was made for."
        )
    if len(names) != len(specs[path]):
        raise ValueError(
            f"the array {path!r} has {len(names)} logical names {tuple(names)} for "
            f"{len(specs[path])} dims. Give one name per dim, None for a dim without."
        )
