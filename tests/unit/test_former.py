"""Names of before 24 November 2026 are accepted, and warn with the name of today."""

import importlib
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import dtft
from dtft import _former, optim
from dtft.config import MaxAdaBeliefConfig, ShampooConfig
from dtft.config.loading import ConfigError, parse_experiment

CONFIG = """
from dtft.models.base import CNNConfig
from dtft.train.datasets import DigitsConfig
from dtft.train.experiment import ClusterConfig, Experiment
from dtft.train.shampoo import ShampooConfig


def config():
    return Experiment(
        name="old",
        model=CNNConfig(),
        data=DigitsConfig(global_batch=96),
        optim=ShampooConfig(root_every=20),
        cluster=ClusterConfig(hosts=3),
    )
"""


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("GuardState", "SkipOutliersState"),
        ("guard_gradients", "skip_outlier_gradients"),
        ("with_local_gradients", "average_gradients"),
    ],
)
def test_former_names_of_optim(former: str, now: str) -> None:
    with pytest.warns(FutureWarning, match=f"dtft.optim.{former} is an old.*{now}"):
        assert getattr(optim, former) is getattr(optim, now)
    assert former not in optim.__all__


def test_former_functions_of_optim() -> None:
    with pytest.warns(FutureWarning, match="unguarded"):
        state = optim.unguarded(optim.max_adabelief(1.0)).init(jnp.zeros(1))
    assert isinstance(state, optim.SkipOutliersState)
    with pytest.warns(FutureWarning, match="as_transform"):
        solver = optim.as_transform(optim.max_belief_phases())
    gradient = jnp.array([1.0, -2.0])
    update, _ = solver.update(gradient, solver.init(gradient))
    transform = optim.scale_by_max_belief()
    expected, _ = transform.update(gradient, transform.init(gradient))
    assert (update == expected).all()


@pytest.mark.parametrize(
    ("name", "former"),
    [
        ("max_adabelief", {"learning_rate": 0.1, "debias_max": False}),
        ("max_belief_phases", {"debias_max": False}),
        ("scale_by_max_belief", {"debias_max": False}),
        ("scale_by_shampoo", {"root_every": 5, "statistics_decay": 0.9}),
        ("shampoo", {"learning_rate": 0.1, "root_every": 5, "statistics_decay": 0.9}),
    ],
)
def test_former_arguments_of_optim(name: str, former: dict[str, float]) -> None:
    with pytest.warns(FutureWarning, match=rf"^{name}\(\w+\) is an old name") as told:
        getattr(optim, name)(**former)
    assert len(told) == len(former.keys() - {"learning_rate"})
    assert {it.filename for it in told} == {__file__}


def test_an_argument_by_both_names_is_refused() -> None:
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="given twice"):
        optim.scale_by_max_belief(debias_max=True, bias_correct_max=True)  # pyright: ignore[reportCallIssue]


def test_former_fields_of_configs() -> None:
    with pytest.warns(FutureWarning, match=r"MaxAdaBeliefConfig\(debias_max\)"):
        config = MaxAdaBeliefConfig(debias_max=False)  # pyright: ignore[reportCallIssue]
    assert not config.bias_correct_max
    with pytest.warns(FutureWarning, match=r"ShampooConfig\(root_every\)"):
        config = ShampooConfig(root_every=20)  # pyright: ignore[reportCallIssue]
    assert config.precondition_frequency == 20


@pytest.mark.parametrize(
    ("name", "words", "key", "value"),
    [
        ("digits_cnn", ["--optim.debias_max", "False"], "bias_correct_max", False),
        ("digits_cnn", ["--optim.debias-max=False"], "bias_correct_max", False),
        ("digits_shampoo", ["--optim.root_every", "7"], "precondition_frequency", 7),
        (
            "digits_shampoo",
            ["--optim.statistics_decay", "0.5"],
            "beta_preconditioner",
            0.5,
        ),
    ],
)
def test_former_keys_of_a_command_line(
    name: str,
    words: list[str],
    key: str,
    value: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment = parse_experiment(name, words)
    assert getattr(experiment.optim, key) == value
    assert (
        f"is an old name, which will go. Use --optim.{key}." in capsys.readouterr().err
    )


def test_a_former_key_of_another_optimizer_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown config key --optim.root_every"):
        parse_experiment("digits_cnn", ["--optim.root_every", "7"])


def test_a_config_that_imports_former_modules_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(CONFIG)
    with pytest.warns(FutureWarning) as told:
        experiment = parse_experiment(str(tmp_path / "old.py"), [])
    assert isinstance(experiment.optim, ShampooConfig)
    assert experiment.optim.precondition_frequency == 20
    texts = [str(it.message) for it in told]
    assert any("dtft.train.datasets.DigitsConfig" in text for text in texts)
    assert any("Use dtft.config.Experiment." in text for text in texts)


@pytest.mark.parametrize("former", sorted(_former.MODULES))
def test_former_modules_stand_for_packages_that_are_there(former: str) -> None:
    assert importlib.import_module(_former.MODULES[former]).__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = importlib.import_module(former).nothing


@pytest.mark.timeout(180)
def test_code_of_former_readmes_imports_what_it_did() -> None:
    code = """
import dtft
from dtft.planner.cluster import Cluster
from dtft.planner.jaxprs import traced, uncut
from dtft.planner.trace import trace
from dtft.train.calibrate import measure
from dtft.train.heap import keep_freed
from dtft.train.lowering import lacking
import dtft.calibration, dtft.parallel.mpmd, dtft.planner.ir, dtft.train
assert trace is dtft.planner.ir.trace and uncut is dtft.planner.ir.uncut
assert lacking is dtft.parallel.mpmd.lacking
assert measure is dtft.calibration.measure_devices
assert keep_freed is dtft.train.keep_freed
from dtft.planner import trace as function
import jax.numpy as jnp
assert function(jnp.tanh, jnp.ones(2)).operators
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
        cwd=Path(dtft.__file__).parents[2],
    )
    told = [line for line in done.stderr.splitlines() if "is an old name" in line]
    assert len(told) == 6, done.stderr
