"""What an import pulls in, seen in a fresh process."""

import subprocess
import sys

from tests.support.harness import REPOSITORY

DEPENDENCIES = frozenset(
    "jax flax optax orbax grain tyro rich scipy xxhash msgpack tensorboardX "
    "matplotlib sklearn".split()
)


def imported_by(module: str) -> set[str]:
    """Names of all modules loaded in a fresh process by `import module`."""
    return loaded_by(f"import {module}")


def loaded_by(code: str) -> set[str]:
    """Names of all modules loaded in a fresh process that runs `code`."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
        cwd=REPOSITORY,
    )
    return set(result.stdout.split())
