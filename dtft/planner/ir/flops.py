"""Classifies JAX primitives and counts the operations of one execution.

A multiplication or an addition of floating-point numbers is one operation. So is any
other elementwise function (exp, tanh, max ...) of one element, as in XLA's and JAX's
own counts; `PER_ELEMENT` holds the exceptions. Comparisons, selections, conversions and
all operations on integers and booleans count 0, except matmuls and convolutions of
integers: they run on the same units as those of floats and count like them.

A convolution's products with padding are counted. Its products with the zeros between
the elements of a dilated operand are not counted: so the gradient of a convolution with
strides has as many operations as its forward pass. A sort counts its comparisons. A
matrix decomposition counts the leading term of its formula. Both count for any dtype.

The operations of a kernel that XLA does not make come from a rule: cuDNN's attention
has a rule, Pallas kernels have a `cost_estimate`, and `register_kernel` adds rules of
other kernels. A primitive without a rule is `opaque`: only its bytes are known.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, get_args

from dtft.planner.cluster import Platform
from dtft.planner.ir.graph import OperatorKind


class Shaped(Protocol):
    """An object with the shape and dtype of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> Any: ...  # noqa: D102


Arrays = Sequence[Shaped]
Count = Callable[[Arrays, Arrays, Mapping[str, Any]], float]
"""A function from operands, results and the primitive's parameters to the number of
floating-point operations of one execution."""

PER_ELEMENT: Mapping[str, float] = {
    "clamp": 2, "one_minus_square": 2,
    "sign": 0, "copysign": 0, "real": 0, "imag": 0, "complex": 0, "conj": 0,
    "select_n": 0, "is_finite": 0, "nextafter": 0, "reduce_precision": 0,
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "and", "or",
         "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic",
         "population_count", "clz", "mulhi"), 0),
    **dict.fromkeys(
        ("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "abs",
         "square", "sqrt", "rsqrt", "cbrt", "pow", "exp", "exp2", "expm1", "log",
         "log2", "log1p", "logistic", "tanh", "sin", "cos", "tan", "asin", "acos",
         "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "floor", "ceil",
         "round", "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "igamma",
         "igammac", "igamma_grad_a", "zeta", "bessel_i0e", "bessel_i1e",
         "regularized_incomplete_beta"), 1),
}  # fmt: skip
"""Operations per element of the result, for elementwise primitives on floats."""

SPECIAL = frozenset(
    ("exp", "exp2", "expm1", "log", "log2", "log1p", "logistic", "tanh", "sin", "cos",
     "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh",
     "pow", "cbrt", "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma",
     "igamma", "igammac", "igamma_grad_a", "zeta", "bessel_i0e", "bessel_i1e",
     "regularized_incomplete_beta")
)  # fmt: skip
"""Elementwise functions that processors evaluate as a series.

Each counts as one operation per element, but takes several times the work of an
addition.
"""

ATTENTION = (
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
)  # fmt: skip
"""cuDNN's attention, forward and backward."""

_LAYOUT = (
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice",
    "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "rev", "iota",
    "convert_element_type", "bitcast_convert_type", "copy", "copy_p", "split", "stack",
    "unstack", "tile", "broadcast", "broadcast_to", "empty", "empty2", "zeros_like",
    "optimization_barrier", "sharding_constraint", "layout_constraint", "reshard",
    "stop_gradient", "name", "device_put", "pvary", "axis_index", "create_token",
    "after_all", "random_wrap", "random_unwrap", "random_clone", "random_seed",
    "platform_index", "to_edtype", "from_edtype", "lu_pivots_to_permutation",
)  # fmt: skip
_RANDOM = (
    "random_bits", "random_split", "random_fold_in", "random_gamma", "threefry2x32",
    "threefry4x32", "philox2x32", "philox4x32", "rng_bit_generator", "rng_uniform",
    "iota_2x32_shape",
)  # fmt: skip
_COLLECTIVE = (
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
    "all_gather_reduced", "reduce_scatter", "unreduced_psum",
    "unreduced_reduce_scatter", "all_to_all", "ragged_all_to_all", "ppermute",
    "pbroadcast",
)  # fmt: skip
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "reduce", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin",
)  # fmt: skip
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max",
            "reduce_window_min", "select_and_gather_add")  # fmt: skip
_SCATTERS = ("scatter-add", "scatter-sub", "scatter-mul", "scatter_add", "scatter_sub",
             "scatter_mul")  # fmt: skip


def count(
    primitive: str, operands: Arrays, results: Arrays, params: Mapping[str, Any]
) -> tuple[OperatorKind, float]:
    """Returns the kind of a primitive, and the operations of one execution.

    A primitive without a rule is `opaque` with 0 operations.

    >>> import numpy as np
    >>> x, w, y = np.zeros((4, 8)), np.zeros((8, 16)), np.zeros((4, 16))
    >>> dims = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    >>> count("dot_general", (x, w), (y,), dims)  # 2 x 4 x 8 x 16
    ('matmul', 1024)
    >>> count("tanh", (x,), (x,), {}), count("someone's kernel", (x,), (x,), {})
    (('elementwise', 32), ('opaque', 0))
    """
    found = _RULES.get(primitive)
    if found is not None:
        kind, rule = found
        return kind, rule(operands, results, params)
    registered = _KERNELS.get(kernel_name(primitive, params))
    if registered is not None:
        return "kernel", registered(operands, results, params)
    estimate = params.get("cost_estimate") if primitive == "pallas_call" else None
    if estimate is not None:
        return "kernel", estimate.flops
    return "opaque", 0


def kernel_name(primitive: str, params: Mapping[str, Any]) -> str:
    """Returns the name under which the rule of a kernel is registered.

    This is the target name of an `ffi_call`, the `name` of a `pallas_call`, and the
    primitive's name for any other primitive.
    """
    name = {"ffi_call": "target_name", "pallas_call": "name"}.get(primitive, "")
    return params.get(name) or primitive


def register_kernel(
    name: str,
    flops: Count,
    *,
    dims: str = "",
    whole: str = "",
    mma_sync: bool = False,
    platforms: Collection[str] = (),
    needs_dtype: str = "",
) -> None:
    """Registers the operation count of a kernel that XLA does not make.

    The planner predicts the time of a registered kernel as the longer of two times: its
    operations at the speed of large matmuls of its first operand's dtype, and the
    transfer of the bytes of its operands and results. For a kernel that is neither
    registered nor has a `cost_estimate`, only the bytes count, and `plan.lints()` says
    so.

    Arrays of a kernel may be divided along dims that operands and results have in
    common, unless `jax.shard_map` is around the kernel. Without `dims`, these are dims
    at the same position and of the same size.

    Args:
        name: target of an `ffi_call`, `name` of a `pallas_call` (whose `cost_estimate`
            is then not used), or name of a primitive.
        flops: function from operands, results (`shape` and `dtype` of each) and the
            primitive's parameters to the operations of one execution.
        dims: a letter for each dim of the operands and results, as for `jnp.einsum`:
            dims with one letter are divided in the same way. Operands are needed
            undivided along dims whose letter no result has.
        whole: letters of further dims along which operands are needed undivided.
        mma_sync: whether the kernel multiplies with `mma.sync`, the instruction of
            NVIDIA's Ampere GPUs, on newer GPUs too. FlashAttention 1 and 2 do. Such a
            kernel reaches the share `Efficiency.mma_sync` of the speed of matmuls.
        platforms: platforms on whose devices the kernel runs: `cpu`, `cuda`, `rocm`,
            `tpu`; `()` if it runs on all or this is unknown. Its time is predicted for
            other devices too, and `plan.lints()` says that it does not run there.
        needs_dtype: the kernel runs only on devices that have a peak FLOP/s for this
            dtype, such as `bfloat16` for kernels that need an NVIDIA GPU since Ampere;
            '' if any device will do.

    Raises:
        ValueError: the planner has a rule for the name; or `dims` has no arrow, or
            `whole` has a letter that no operand has; or a platform is unknown.

    >>> register_kernel("my_sum", lambda operands, results, params: 7)
    >>> count("ffi_call", (), (), {"target_name": "my_sum"})
    ('kernel', 7)
    """
    if name in _RULES:
        raise ValueError(
            f"name={name!r} has a rule in the planner already. Register the name of a "
            "kernel: an ffi_call's target, a pallas_call's name, or your primitive's."
        )
    allowed = [name for name in get_args(Platform) if name != "other"]
    if unknown := sorted(set(platforms) - set(allowed)):
        raise ValueError(
            f"platforms={tuple(platforms)!r} of kernel {name!r}: {unknown[0]!r} is no "
            f"platform. Allowed: {', '.join(allowed)}, in a tuple."
        )
    KERNEL_DIMS.pop(name, None)
    MMA_SYNC.discard(name)
    RUNS_ON.pop(name, None)
    if platforms or needs_dtype:
        RUNS_ON[name] = RunsOn(frozenset(platforms), needs_dtype, f"the kernel {name}")
    if mma_sync:
        MMA_SYNC.add(name)
    if dims or whole:
        operands, arrow, results = dims.partition("->")
        read, written = set(operands) - {","}, set(results) - {","}
        if not arrow or not set(whole) <= read:
            raise ValueError(
                f"dims={dims!r}, whole={whole!r} of kernel {name!r}. Allowed: letters "
                "of the dims of operands and results, such as 'bth,bsh->bth', and in "
                "whole letters of operands, such as 's'."
            )
        KERNEL_DIMS[name] = KernelDims(
            operands.split(","), results.split(","), (read - written) | set(whole)
        )
    _KERNELS[name] = flops


class RunsOn(NamedTuple):
    """The devices on which a kernel runs."""

    platforms: frozenset[str]
    """Platforms of the devices; empty for all."""
    dtype: str
    """A dtype that the devices have a peak FLOP/s for; '' for any."""
    words: str
    """What the kernel is, in words."""
    instead: str = "another implementation on this device"
    """What to use on other devices, in words."""

    def __str__(self) -> str:
        where = " and ".join(sorted(self.platforms)) or "all"
        return f"{where} devices" + f" that compute in {self.dtype}" * bool(self.dtype)


class KernelDims(NamedTuple):
    """The dims of a registered kernel, as letters.

    `operands` and `results` have a string for each array, with a letter for each dim of
    the array, as in an einsum.
    """

    operands: list[str]
    results: list[str]
    whole: set[str]
    """Letters of dims along which the kernel needs its operands undivided."""


KERNEL_DIMS: dict[str, KernelDims] = {}
"""Map from the name of a kernel to the letters of its dims."""
MMA_SYNC: set[str] = set()
"""Names of kernels that multiply with `mma.sync` on every GPU."""


def is_float(array: Shaped) -> bool:
    """Whether an array has real or complex floating-point elements."""
    return _name(array.dtype).startswith(("float", "bfloat", "complex"))


def _size(array: Shaped) -> int:
    return math.prod(array.shape)


def _is_complex(array: Shaped) -> bool:
    return _name(array.dtype).startswith("complex")


@functools.cache
def _name(dtype: Any) -> str:
    return getattr(dtype, "name", "")


def _none(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return 0


def _elementwise(name: str, each: float) -> Count:
    # A complex product is four multiplications and two additions.
    complex_each = 2 if name in ("add", "add_any", "sub", "neg") else 6

    def rule(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
        if not is_float(results[0]):
            return 0
        times = complex_each if _is_complex(results[0]) else 1
        return times * each * _size(results[0])

    return rule if each else _none


def _integer_pow(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    """Counts the operations of an integer power: repeated squaring.

    A negative power has one division more. Integers count 0.
    """
    power = abs(params["y"])
    steps = power.bit_length() + power.bit_count() - 2 if power else 0
    if not is_float(results[0]):
        return 0
    return (steps + (params["y"] < 0)) * _size(results[0])


def _polynomial(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    """Counts the operations of a polynomial by Horner's rule: 2 per element and degree.

    The operands, as of jax 0.12, are the argument and the coefficients. Integers count
    0.
    """
    del params
    if not is_float(results[0]):
        return 0
    return 2 * (len(operands) - 2) * _size(results[0])


def multiply_add_flops(dtype: str) -> int:
    """Returns the operations of one multiply-add: 2, or 8 for complex numbers."""
    return 8 if dtype.startswith("complex") else 2


def _product(operands: Arrays) -> int:
    return multiply_add_flops(_name(operands[0].dtype))


def _dot(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    (summed, _), _ = params["dimension_numbers"]
    depth = math.prod(operands[0].shape[i] for i in summed)
    return _product(operands) * _size(results[0]) * depth


def _ragged_dot(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    """Counts the operations of a ragged matmul as those of a matmul without groups.

    The number of groups does not matter, because each row is multiplied by the matrix
    of its own group only. On platforms other than TPU, XLA multiplies each row by the
    matrices of all groups (`ir.ragged`). This count leaves out these operations;
    `cost.computing_s` includes their time.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    gone = {*summed, *batch, *numbers.rhs_group_dimensions}
    sizes = operands[1].shape
    columns = math.prod(size for i, size in enumerate(sizes) if i not in gone)
    return _product(operands) * _size(operands[0]) * columns


def _attention(forward: bool) -> Count:
    """Makes the function that counts the operations of cuDNN's attention.

    `forward` selects the pass: the forward pass has 2 matmuls, the backward pass has 5.

    Scores that a causal mask or a window hides are not counted, because they are not
    computed (Dao, FlashAttention-2, arXiv 2307.08691, section 3.1). The backward pass
    computes the other scores again.
    """

    def rule(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
        query, _, value = (array.shape for array in operands[:3])
        along, heads = attention_dims(params)
        queries, keys = query[along], value[along]
        scores = queries * keys
        if "CAUSAL" in getattr(params["mask_type"], "name", ""):
            scores -= min(queries, keys) * (min(queries, keys) - 1) // 2
        if params["sliding_window_length"]:
            scores = min(scores, queries * params["sliding_window_length"])
        depth, width = query[-1], value[-1]
        each = depth + width if forward else 3 * depth + 2 * width
        return 2 * query[0] * query[heads] * scores * each

    return rule


def attention_dims(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the indices of two dims in the arrays of cuDNN's attention.

    The first index is that of the dim of positions, the second that of the dim of
    heads. In all arrays, the first dim has examples and the last dim has features.

    Args:
        params: the primitive's parameters; `layout` is 1 if heads come before
            positions.
    """
    return (2, 1) if params["layout"] == 1 else (1, 2)  # BNTH or BTNH


def _convolution(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    kernel = operands[1].shape
    features = kernel[params["dimension_numbers"].rhs_spec[0]]
    holes = math.prod(params["lhs_dilation"])
    depth = math.prod(kernel) / features
    return _product(operands) * _size(results[0]) * depth / holes


def _reduction(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return _size(operands[0]) if is_float(operands[0]) else 0


def _logsumexp(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return 4 * _size(operands[0])  # two exponentials, an addition, a logarithm


def _window(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    each = math.prod(params["window_dimensions"])
    return _size(results[0]) * each if is_float(results[0]) else 0


def _select_window(
    operands: Arrays, results: Arrays, params: Mapping[str, Any]
) -> float:
    return _size(operands[0]) * math.prod(params["window_dimensions"])


def _scatter(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return _size(operands[2]) if is_float(operands[2]) else 0


def _sort(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    length = operands[0].shape[params["dimension"]]
    return _size(operands[0]) * math.log2(max(1, length))


def _top_k(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return _size(operands[0]) * max(1.0, math.log2(max(1, params["k"])))


def _fft(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    """Counts 5 n log2 n operations per transform of n elements.

    Counts half of that if the operand or the result is real. Source: radix 2, Van Loan
    1992.
    """
    length = math.prod(params["fft_lengths"])
    rank = len(params["fft_lengths"])
    transforms = math.prod(operands[0].shape[:-rank])
    both = _is_complex(operands[0]) and _is_complex(results[0])
    return (5 if both else 2.5) * transforms * length * math.log2(max(1, length))


def _matrix(each: Callable[[int, int], float]) -> Count:
    """Makes a function that counts the operations of a matrix decomposition.

    The function adds up `each(longer side, shorter side)`, the operations for one
    matrix, over all matrices of the first operand. The formulas are those of Golub and
    Van Loan (2013).
    """

    def rule(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
        *batch, rows, columns = operands[0].shape
        long, short = max(rows, columns), min(rows, columns)
        return math.prod(batch) * each(long, short)

    return rule


def _solve(operands: Arrays, results: Arrays, params: Mapping[str, Any]) -> float:
    return operands[0].shape[-1] * _size(operands[1])


def _tridiagonal_solve(
    operands: Arrays, results: Arrays, params: Mapping[str, Any]
) -> float:
    return 8 * _size(results[0])


_RULES: dict[str, tuple[OperatorKind, Count]] = {
    **{name: ("elementwise", _elementwise(name, n)) for name, n in PER_ELEMENT.items()},
    "integer_pow": ("elementwise", _integer_pow),
    "polynomial": ("elementwise", _polynomial),
    **dict.fromkeys(_LAYOUT, ("layout", _none)),
    **dict.fromkeys(_RANDOM, ("random", _none)),
    **dict.fromkeys(_COLLECTIVE, ("collective", _none)),
    **dict.fromkeys(_REDUCTIONS, ("reduction", _reduction)),
    "cumlogsumexp": ("reduction", _logsumexp),
    **dict.fromkeys(_WINDOWS, ("reduction", _window)),
    "select_and_scatter_add": ("scatter", _select_window),
    "gather": ("gather", _none),
    **dict.fromkeys(
        ("scatter", "scatter-min", "scatter-max", "scatter_min", "scatter_max"),
        ("scatter", _none),
    ),
    **dict.fromkeys(_SCATTERS, ("scatter", _scatter)),
    "sort": ("sort", _sort),
    "top_k": ("sort", _top_k),
    "approx_top_k": ("sort", _top_k),
    "dot_general": ("matmul", _dot),
    "ragged_dot_general": ("matmul", _ragged_dot),
    "conv_general_dilated": ("convolution", _convolution),
    ATTENTION[0]: ("kernel", _attention(forward=True)),
    ATTENTION[1]: ("kernel", _attention(forward=False)),
    "fft": ("reduction", _fft),
    "triangular_solve": ("reduction", _solve),
    "tridiagonal_solve": ("reduction", _tridiagonal_solve),
    "cholesky": ("reduction", _matrix(lambda m, n: n**3 / 3)),
    "lu": ("reduction", _matrix(lambda m, n: m * n**2 - n**3 / 3)),
    "qr": ("reduction", _matrix(lambda m, n: 4 * m * n**2 - 4 * n**3 / 3)),
    "geqrf": ("reduction", _matrix(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3)),
    "geqp3": ("reduction", _matrix(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3)),
    "householder_product": (
        "reduction", _matrix(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3)),
    "eigh": ("reduction", _matrix(lambda m, n: 9 * n**3)),
    "eig": ("reduction", _matrix(lambda m, n: 25 * n**3)),
    "schur": ("reduction", _matrix(lambda m, n: 25 * n**3)),
    "svd": ("reduction", _matrix(lambda m, n: 4 * m**2 * n + 8 * m * n**2 + 9 * n**3)),
    "hessenberg": ("reduction", _matrix(lambda m, n: 10 * n**3 / 3)),
    "tridiagonal": ("reduction", _matrix(lambda m, n: 4 * n**3 / 3)),
}  # fmt: skip

_KERNELS: dict[str, Count] = {}
"""Map from the name of a registered kernel to the function that counts its
operations."""

RUNS_ON: dict[str, RunsOn] = dict.fromkeys(
    ATTENTION,
    # NVIDIA's GPUs compute in bfloat16 since compute capability 8.0, which JAX requires
    # of this kernel.
    RunsOn(
        platforms=frozenset(("cuda",)),
        dtype="bfloat16",
        words="cuDNN's attention (compute capability 8.0 or higher)",
        instead="jax.nn.dot_product_attention with implementation='xla'",
    ),
)
"""Map from the name of a kernel to the devices on which it runs, if known."""

COUNTED = frozenset(_RULES)
"""Primitives that have a rule."""
