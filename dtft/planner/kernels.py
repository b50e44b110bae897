"""Which devices have a kernel for which operators, and where a user wants them.

For platforms that JAX knows lowering says it (`dtft.train.lowering` asks, and hands in
the answer); for everything else a registry is the only source, and what is not in it is
not there. Pure; must not know speeds, links or schedules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtft.planner.device import DeviceType
from dtft.planner.graph import Operator
from dtft.planner.nodes import Nodes

CLASSES: Mapping[str, str] = {
    "dense": "matmul", "conv": "convolution", "activation": "elementwise",
}  # fmt: skip
"""Words for kinds of operators (`graph.Kind`) that a registry or a pin may use."""
CUSTOM = frozenset({"pallas_call", "ffi_call", "custom_call"})
"""Primitives that lower everywhere and run only where somebody wrote the kernel."""
PLATFORMS: Mapping[str, tuple[str, ...]] = {"gpu": ("cuda", "rocm")}
"""Words for several of JAX's platforms."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What is known of kernels beside the cluster (`DeviceType.kernels`)."""

    registered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Type of device, or platform, to operators that it has kernels for: primitives,
    kinds (`graph.Kind`), or words of `CLASSES`."""
    lacking: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Platform of JAX to the numbers of operators that it cannot lower."""

    def has(self, device: DeviceType, operator: Operator, number: int) -> bool:
        """Whether a device has a kernel for an operator of the program.

        >>> from dtft.planner.catalog import device_type
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
        if device.kernels is not None:
            listed = {CLASSES.get(name, name) for name in device.kernels}
            if not names & (listed | device.kernels):
                return False
        elif device.platform == "other":
            return False
        if device.platform == "other":
            return True
        is_custom = operator.primitive in CUSTOM
        return not is_custom and number not in self.lacking.get(
            device.platform, frozenset()
        )


def names_of(operator: Operator) -> frozenset[str]:
    """What a registry or a pin may call an operator."""
    words = [word for word, kind in CLASSES.items() if kind == operator.kind]
    return frozenset((operator.primitive, operator.kind, *words))


def platforms_of(device: DeviceType) -> tuple[str, ...]:
    """What a registry or a pin may call the platform of a device."""
    return words_of_platform(device.platform)


def words_of_platform(platform: str) -> tuple[str, ...]:
    """What a platform may be called.

    >>> words_of_platform("cuda"), words_of_platform("cpu")
    (('cuda', 'gpu'), ('cpu',))
    """
    return (platform, *(word for word, some in PLATFORMS.items() if platform in some))


def places_of(name: str, device: DeviceType) -> tuple[str, ...]:
    """What a pin may call a node: its name, type (or its first part), or platform.

    >>> from dtft.planner.catalog import device_type
    >>> places_of("fpga-u280:0", device_type("fpga-u280"))
    ('fpga-u280:0', 'fpga-u280', 'fpga', 'other')
    """
    return (name, device.name, device.name.split("-")[0], *platforms_of(device))


def pinned(
    affinity: Mapping[str, str], operator: Operator, nodes: Nodes
) -> frozenset[int] | None:
    """The nodes that a user wants an operator on; None: any.

    The primitive's pin comes before the one of its kind or class.
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
