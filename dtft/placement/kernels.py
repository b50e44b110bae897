"""Decides which nodes can run an operator: by the kernels of devices, and by pins.

Registries (`DeviceType.kernels`, `Kernels.registered`) list the operators for which
devices have kernels. For JAX's platforms, lowering also shows whether a kernel exists
(`dtft.parallel.mpmd` lowers the operators). For other platforms the registries are the
only source. Pins are the entries of `affinity` of `place`: an operator, and the nodes
that may run it.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

from jax.extend.core import Primitive, primitives

from dtft.placement.nodes import Nodes
from dtft.planner.cluster import DeviceType, Platform
from dtft.planner.ir import COUNTED, Operator, OperatorKind

CLASSES: Mapping[str, str] = {
    "dense": "matmul", "conv": "convolution", "activation": "elementwise",
}  # fmt: skip
"""Map from a word that registries and pins may use to the kind of operators
(`OperatorKind`) that the word means."""
CUSTOM = frozenset({"pallas_call", "ffi_call", "custom_call"})
"""Primitives for which lowering does not show whether a kernel exists. On JAX's
platforms they run only with a kernel in `Kernels.registered` or
`DeviceType.kernels`."""
PLATFORMS: Mapping[str, tuple[str, ...]] = {"gpu": ("cuda", "rocm")}
"""Map from a word that registries and pins may use to the JAX platforms it means."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which operators devices can run, beyond what their device types say.

    Has the kernels that devices have in addition to those of their type
    (`DeviceType.kernels`). Also has, for each platform, the operators that JAX cannot
    lower for it, so that its devices cannot run them.
    """

    registered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Map from a device type or platform to the operators with kernels: primitives,
    kinds (`OperatorKind`), or "dense", "conv" and "activation"."""
    lacking: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Map from a JAX platform to the numbers of operators that do not lower on it."""

    def has(self, device: DeviceType, operator: Operator, number: int) -> bool:
        """Whether a device has a kernel for an operator.

        The first of these rules that applies decides:

        * True if `registered` lists the operator for the device's type or platform.
        * False if `DeviceType.kernels` is given and does not list the operator.
        * False if `DeviceType.kernels` is None and either the operator is a custom call
          (`CUSTOM`, such as a Pallas kernel) or the platform is `other`.
        * False if `lacking` lists the operator's `number` in the program for the
          platform. Skipped for custom calls and the platform `other`.
        * Otherwise True.

        In the example, the FPGA's device type lists element-wise operators and no
        matmuls.

        >>> from dtft.planner.cluster.catalog import device_type
        >>> tanh = Operator(primitive="tanh", kind="elementwise", inputs=(),
        ...     outputs=(), flops=1, trips=1)
        >>> dense = Operator(primitive="dot_general", kind="matmul", inputs=(),
        ...     outputs=(), flops=1, trips=1)
        >>> fpga = device_type("fpga-u280")
        >>> [Kernels().has(fpga, operator, 0) for operator in (tanh, dense)]
        [True, False]
        >>> mine = Kernels(registered={"fpga-u280": frozenset({"dense"})})
        >>> mine.has(fpga, dense, 0)
        True
        """
        names = names_of(operator)
        for known in (device.name, *platforms_of(device)):
            if names & self.registered.get(known, frozenset()):
                return True
        must_be_listed = device.platform == "other" or operator.primitive in CUSTOM
        if device.kernels is not None:
            listed = {CLASSES.get(name, name) for name in device.kernels}
            if not names & (listed | device.kernels):
                return False
        elif must_be_listed:
            return False
        lacking = self.lacking.get(device.platform, frozenset())
        return must_be_listed or number not in lacking


def names_of(operator: Operator) -> frozenset[str]:
    """Returns the names by which kernels and `affinity` may name an operator.

    These are its primitive, its kind, and the other word for this kind if there is one
    (`CLASSES`), such as "dot_general", "matmul" and "dense".
    """
    words = [word for word, kind in CLASSES.items() if kind == operator.kind]
    return frozenset((operator.primitive, operator.kind, *words))


def platforms_of(device: DeviceType) -> tuple[str, ...]:
    """Returns the names by which kernels and `affinity` may name a device's platform.

    For example ("cuda", "gpu").
    """
    return words_of_platform(device.platform)


def words_of_platform(platform: str) -> tuple[str, ...]:
    """Returns a platform's name, and other words that include it, such as "gpu".

    >>> words_of_platform("cuda"), words_of_platform("cpu")
    (('cuda', 'gpu'), ('cpu',))
    """
    return (platform, *(word for word, some in PLATFORMS.items() if platform in some))


def places_of(name: str, device: DeviceType) -> tuple[str, ...]:
    """Returns the names by which `affinity` may name a node.

    These are the node's own name, its device type's and its platform's. The part of the
    device type's name before the first "-" is a name too.

    >>> from dtft.planner.cluster.catalog import device_type
    >>> places_of("fpga-u280:0", device_type("fpga-u280"))
    ('fpga-u280:0', 'fpga-u280', 'fpga', 'other')
    """
    return (name, device.name, device.name.split("-")[0], *platforms_of(device))


def pinned(
    affinity: Mapping[str, str], operator: Operator, nodes: Nodes
) -> frozenset[int] | None:
    """Returns the nodes on which `affinity` allows an operator; None: it has no pin.

    An entry of `affinity` is a pin: it maps an operator's primitive, its kind, or the
    other word for the kind, such as "dense", to a node, device type or platform. The
    primitive's pin takes precedence; of the other pins the first in alphabetical order
    counts.
    """
    names = sorted(names_of(operator) & affinity.keys())
    if not names:
        return None
    name = operator.primitive if operator.primitive in affinity else names[0]
    each = zip(nodes.names, nodes.devices, strict=True)
    return frozenset(
        number
        for number, (node, device) in enumerate(each)
        if affinity[name] in places_of(node, device)
    )


# Checks of registries and pins. A misspelt name is refused; a name that the program
# happens not to contain is noted.


def check_kernels(
    kernels: Kernels, nodes: Nodes, operators: Sequence[Operator]
) -> None:
    """Checks that kernels name known operators, devices and platforms.

    Args:
        kernels: the kernels to check.
        nodes: the nodes, whose device types may list kernels too.
        operators: the operators of the program.

    Raises:
        ValueError: `kernels` is not a `Kernels` or has fields of other types, or a name
            or operator number is unknown; the message has the allowed values.
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
    """Raises a ValueError unless both fields of `kernels` are mappings to sets."""
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
    """Raises a ValueError unless `lacking` maps JAX platforms to operator numbers.

    The numbers must be those of operators of the program, which has `num_operators`.
    """
    platforms = [name for name in get_args(Platform) if name != "other"]
    for platform, operators in lacking.items():
        if platform not in platforms:
            raise ValueError(
                f"kernels: lacking has {platform!r}, for which JAX does not lower"
                f"{_near(platform, platforms)}. Allowed: {', '.join(platforms)}, as in "
                "dtft.parallel.mpmd.lacking(loss, params, batch, platforms=cluster)."
            )
        for number in operators:
            if type(number) is not int or not 0 <= number < num_operators:
                raise ValueError(
                    f"kernels: lacking[{platform!r}] has {number!r}. Allowed: numbers "
                    f"of operators of the program, 0 to {num_operators - 1}. Ask for "
                    "them with dtft.parallel.mpmd.lacking, of the same program."
                )


def check_pins(
    affinity: Any, nodes: Nodes, operators: Sequence[Operator]
) -> tuple[str, ...]:
    """Checks that `affinity` maps known operators to existing nodes.

    Its entries are pins: an operator, and the node, device type or platform that must
    run it.

    Returns:
        A note, as text, on each pin of an operator that this program lacks.

    Raises:
        ValueError: `affinity` is not a mapping, or a pin names an unknown operator or a
            node that the cluster does not have; the message has the allowed names.
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
                f"({', '.join(get_args(OperatorKind))}), or a primitive of JAX or of "
                "the program, such as dot_general."
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
    """Returns the names of operators that are valid for every program.

    These are JAX's primitives, the kinds of operators, and "dense", "conv" and
    "activation".
    """
    public = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    return frozenset((*public, *COUNTED, *CUSTOM, *CLASSES, *get_args(OperatorKind)))
