"""Ahead-of-time compilation of a plan with XLA, and comparison with the prediction.

* `compile`: lowers candidates (plans that may be chosen), and compiles them for devices
  that this machine lacks.
* `worker`: the child process that compiles.
* `gpu_targets`: descriptions of GPUs for XLA's compiler.
* `hlo`: collectives and groups in the text of a compiled program.
* `check`: whether compiled memory fits, and whether bytes agree with the plan.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.aot.check import (
        Agreement,
        Compiled,
        CompileFailure,
        Memory,
        Verdict,
        compare,
        gate,
    )
    from dtft.planner.aot.compile import (
        LoweredStep,
        candidate,
        compile_all,
        platform_of,
    )
    from dtft.planner.aot.gpu_targets import (
        GPU_TARGETS,
        gpu_target,
        is_gpu_compiler_installed,
    )

_PUBLIC = {
    "Agreement": "check",
    "CompileFailure": "check",
    "Compiled": "check",
    "GPU_TARGETS": "gpu_targets",
    "LoweredStep": "compile",
    "Memory": "check",
    "Verdict": "check",
    "candidate": "compile",
    "compare": "check",
    "compile_all": "compile",
    "gate": "check",
    "gpu_target": "gpu_targets",
    "is_gpu_compiler_installed": "gpu_targets",
    "platform_of": "compile",
}

__all__ = [
    "Agreement",
    "CompileFailure",
    "Compiled",
    "GPU_TARGETS",
    "LoweredStep",
    "Memory",
    "Verdict",
    "candidate",
    "compare",
    "compile_all",
    "gate",
    "gpu_target",
    "is_gpu_compiler_installed",
    "platform_of",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
