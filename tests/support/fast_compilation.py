"""XLA flags that compile programs fast; the programs compute the same, more slowly.

Most processor time of the tests goes into compiling programs that run once.
"""

import os
from importlib.metadata import version
from pathlib import Path

SWITCH = "JAX_DISABLE_MOST_OPTIMIZATIONS"
"""What `make test` sets for the processes of drills; `make drills` does not."""

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# XLA ends a process that has flags which it does not know: another release may not.
_KNOWN = f"jaxlib=={version('jaxlib')}" in _CONSTRAINTS.read_text().split()
_FLAGS = (
    # The emitters that go by MLIR compile more slowly than the ones before them.
    "--xla_cpu_use_fusion_emitters=false",
    # Parts of a program would be compiled at once; other tests have those cores.
    "--xla_cpu_parallel_codegen_split_count=1",
)


def with_fast_flags(flags: str) -> str:
    """XLA_FLAGS that compile fast, whatever else they say."""
    return " ".join([without_fast_flags(flags), *(_FLAGS if _KNOWN else ())]).strip()


def without_fast_flags(flags: str) -> str:
    """XLA_FLAGS as the user gave them."""
    return " ".join(flag for flag in flags.split() if flag not in _FLAGS)


def compiled_as_users_do() -> bool:
    """Whether processes that start now compile without the fast flags."""
    return not set(_FLAGS) & set(os.environ.get("XLA_FLAGS", "").split())
