"""Which names of operators, devices and platforms a registry or a pin may have.

Decides what is misspelt, which is refused, and what a program only happens to lack,
which is noted. Must not know speeds, links or schedules.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from typing import Any, get_args

from jax.extend.core import Primitive, primitives

from dtft.planner.device import DeviceType, Platform
from dtft.planner.flops import COUNTED
from dtft.planner.graph import Kind, Operator
from dtft.planner.kernels import (
    CLASSES,
    CUSTOM,
    PLATFORMS,
    Kernels,
    names_of,
    places_of,
    platforms_of,
)
from dtft.planner.nodes import Nodes


def check_kernels(
    kernels: Kernels, nodes: Nodes, operators: Sequence[Operator]
) -> None:
    """Refuses kernels of operators, and devices, that there are not.

    Args:
        kernels: what is registered.
        nodes: with their types, which may list kernels too.
        operators: of the program.

    Raises:
        ValueError: names what is misspelt, and what is allowed.
    """
    if not isinstance(kernels, Kernels):
        raise ValueError(
            f"kernels={kernels!r:.80} is no Kernels. Allowed: such as "
            "Kernels(registered={'fpga-u280': frozenset({'dense'})})."
        )
    _check_form(kernels)
    _check_lacking(kernels.lacking, len(operators))
    known = _known(operators)
    for device in _types(nodes):
        _check_words(f"kernels of device {device.name!r}", device.kernels or (), known)
    types = [device.name for device in _types(nodes)]
    platforms = [*get_args(Platform), *PLATFORMS]
    for where, words in kernels.registered.items():
        if where not in (*types, *platforms):
            raise ValueError(
                f"kernels: registered has {where!r}, of which the cluster has no "
                f"device{_near(where, types)}. Allowed: a type ({', '.join(types)}) "
                f"or a platform ({', '.join(platforms)})."
            )
        _check_words(f"kernels: registered[{where!r}]", words, known)


def _check_form(kernels: Kernels) -> None:
    """Refuses what is no mapping to sets."""
    for name, of in (("registered", "names"), ("lacking", "numbers")):
        value = getattr(kernels, name)
        if not isinstance(value, Mapping) or not all(
            isinstance(some, Set) for some in value.values()
        ):
            raise ValueError(
                f"kernels: {name}={value!r:.80}. Allowed: a mapping to sets of {of} of "
                "operators, such as {'fpga-u280': frozenset({'dense'})} for registered."
            )


def _check_lacking(lacking: Mapping[str, Set[int]], num_operators: int) -> None:
    """Refuses platforms that JAX does not lower for, and operators there are not."""
    platforms = [name for name in get_args(Platform) if name != "other"]
    for platform, operators in lacking.items():
        if platform not in platforms:
            raise ValueError(
                f"kernels: lacking has {platform!r}, for which JAX does not lower"
                f"{_near(platform, platforms)}. Allowed: {', '.join(platforms)}, as in "
                "dtft.train.lowering.lacking(loss, params, batch, platforms=cluster)."
            )
        for number in operators:
            if type(number) is not int or not 0 <= number < num_operators:
                raise ValueError(
                    f"kernels: lacking[{platform!r}] has {number!r}. Allowed: numbers "
                    f"of operators of the program, 0 to {num_operators - 1}. Ask for "
                    "them with dtft.train.lowering.lacking, of the same program."
                )


def check_pins(
    affinity: Any, nodes: Nodes, operators: Sequence[Operator]
) -> tuple[str, ...]:
    """Refuses pins of what is no operator, or to what is no node.

    Returns:
        Notes: pins of operators that this program does not have.

    Raises:
        ValueError: names the pin, and what may be pinned, and where.
    """
    if not isinstance(affinity, Mapping):
        raise ValueError(
            f"affinity={affinity!r:.80} is no mapping. Allowed: operator to node, "
            "such as {'conv': 'fpga'}."
        )
    there = frozenset[str]().union(*map(names_of, operators))
    _check_words("affinity", affinity, _known(operators))
    for name, place in affinity.items():
        _check_place(f"affinity[{name!r}]={place!r}", place, nodes)
    return tuple(
        f"affinity: the program has no {name}, which is wanted on {place}."
        for name, place in affinity.items()
        if name not in there
    )


def _check_place(what: str, place: str, nodes: Nodes) -> None:
    each = zip(nodes.names, nodes.devices, strict=True)
    if any(place in places_of(name, device) for name, device in each):
        return
    platforms = {word for device in nodes.devices for word in platforms_of(device)}
    types = [device.name for device in _types(nodes)]
    raise ValueError(
        f"{what}: the cluster has no such node. Allowed: a node "
        f"({', '.join(nodes.names)}), a type of device ({', '.join(sorted(types))}), "
        f"or a platform ({', '.join(sorted(platforms))})."
    )


def _check_words(where: str, words: Iterable[str], known: frozenset[str]) -> None:
    for word in sorted(words, key=str) if not isinstance(words, str) else [words]:
        if word not in known:
            raise ValueError(
                f"{where} has {word!r}, which is no operator{_near(word, known)}. "
                f"Allowed: a word ({', '.join(CLASSES)}), a kind "
                f"({', '.join(get_args(Kind))}), or a primitive of JAX or of the "
                "program, such as dot_general."
            )


def _near(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), sorted(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _types(nodes: Nodes) -> list[DeviceType]:
    return list({device.name: device for device in nodes.devices}.values())


def _known(operators: Sequence[Operator]) -> frozenset[str]:
    return _of_jax() | {op.primitive for op in operators}


@cache
def _of_jax() -> frozenset[str]:
    """Names that no program is needed for."""
    public = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    return frozenset((*public, *COUNTED, *CUSTOM, *CLASSES, *get_args(Kind)))
