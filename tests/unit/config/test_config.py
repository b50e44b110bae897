"""Reading configs: what is resolved, what is refused and how it is said."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dtft.config.experiment import (
    CheckpointConfig,
    ClusterConfig,
    Experiment,
    MeshConfig,
    StopConfig,
)
from dtft.config.loading import (
    _FORMER_NAMES,
    ConfigError,
    diff_configs,
    find_config,
    keys,
    load_experiment,
    named_configs,
    parse_experiment,
    refuse_other,
    shape_relevant,
    to_json,
)
from dtft.config.optimizers import (
    AdamWConfig,
    MaxAdaBeliefConfig,
    OptimConfig,
    ScheduleConfig,
    ShampooConfig,
)
from dtft.data.datasets import DataConfig
from dtft.drills.bench import tier_off
from dtft.models.base import CNNConfig, ModelConfig
from dtft.parallel.validation import check_experiment, resolve_mesh
from tests.support.imports import loaded_by
from tests.support.pictures import make_folder

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    *("digits_cnn", "digits_shampoo", "chars_transformer"),
    *("resnet50_imagenet", "resnet50_synthetic"),
)


def _shipped(name: str, folder: Path) -> Experiment:
    if name != "resnet50_imagenet":
        return parse_experiment(name, [])
    return parse_experiment(
        name, ["--data.path", str(make_folder(folder, train=1, val=1))]
    )


@pytest.mark.parametrize("flags", [["--mesh", "auto"], ["--mesh=auto"]])
def test_a_mesh_may_be_left_to_the_planner(flags: list[str], tmp_path: Path) -> None:
    assert parse_experiment("digits_cnn", flags).plan == "auto"
    path = tmp_path / "mine.py"
    text = (find_config("digits_cnn")).read_text()
    path.write_text(text.replace("name=", 'plan="auto", name=', 1))
    assert parse_experiment(str(path), []).plan == "auto"
    assert parse_experiment(str(path), ["--plan", ""]).plan == ""


def with_mesh(folder: Path, argument: str) -> str:
    """The path of a config file: `digits_cnn` with another argument `mesh`."""
    path = folder / "mine.py"
    text = find_config("digits_cnn").read_text()
    path.write_text(text.replace("name=", f"mesh={argument}, name=", 1))
    return str(path)


@pytest.mark.parametrize("asked", ["auto", "runs/plan.json"])
def test_a_configs_mesh_may_be_a_text_as_after_the_flag(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flagged = parse_experiment("digits_cnn", ["--mesh", asked])
    mine = with_mesh(tmp_path, repr(asked))
    assert parse_experiment(mine, []) == flagged
    assert flagged.plan == asked and flagged.mesh == MeshConfig()
    assert parse_experiment(mine, ["--plan", ""]).plan == ""
    with pytest.raises(SystemExit):
        parse_experiment(mine, ["--mesh.fsdp", "2"])
    assert f"plan='{asked}' decides the mesh" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["'fsdp'", "''", "None", "{'fsdp': 2}"])
def test_what_is_no_mesh_is_refused_with_what_is_allowed(
    argument: str, tmp_path: Path
) -> None:
    mine = with_mesh(tmp_path, argument)
    words = f"mesh={argument} is no mesh. Allowed: MeshConfig(...), 'auto'"
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_experiment(mine, [])


def test_a_mesh_and_a_plan_that_name_two_plans_are_refused(tmp_path: Path) -> None:
    assert (
        parse_experiment(with_mesh(tmp_path, '"auto", plan="auto"'), []).plan == "auto"
    )
    mine = with_mesh(tmp_path, '"auto", plan="p.json"')
    with pytest.raises(ConfigError, match=r"mesh='auto' and plan='p.json' name two"):
        parse_experiment(mine, [])


def test_a_plan_that_is_asked_for_takes_the_place_of_the_configs_mesh() -> None:
    assert parse_experiment("chars_transformer", []).mesh.fsdp == 4
    planned = parse_experiment("chars_transformer", ["--plan", "auto"])
    assert planned.plan == "auto" and planned.mesh == MeshConfig()
    assert parse_experiment("chars_transformer", ["--plan=p.json"]).mesh == MeshConfig()
    assert parse_experiment("chars_transformer", ["--plan", ""]).mesh.fsdp == 4
    with pytest.raises((SystemExit, ConfigError)):
        parse_experiment("chars_transformer", ["--plan", "auto", "--mesh.fsdp", "2"])


@pytest.mark.parametrize("name", NAMES)
def test_resolved_config_is_golden(name: str, tmp_path: Path) -> None:
    """To accept a change: `dtft config NAME > tests/unit/config/golden/NAME.json`."""
    found = json.loads(to_json(_shipped(name, tmp_path)))
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    for resolved in (found, golden):
        # The text differs between Python's releases, files between Pillow's.
        if name in ("chars_transformer", "resnet50_imagenet"):
            assert "sha256=" in resolved.pop("data_identity")
        resolved["data"].pop("path", None)
    assert found == golden


@pytest.mark.parametrize("name", NAMES)
def test_shipped_configs_fit_their_clusters(name: str, tmp_path: Path) -> None:
    check_experiment(_shipped(name, tmp_path))
    for hosts in range(1, 5):
        experiment = parse_experiment("digits_cnn", [])
        check_experiment(experiment, hosts=hosts, memory_tier=False)


def test_balance_is_short_for_its_policy() -> None:
    experiment = parse_experiment(
        "digits_cnn", ["--balance", "exact", "--balance.every=10"]
    )
    assert (experiment.balance.policy, experiment.balance.every) == ("exact", 10)
    check_experiment(experiment)
    staged = ["--mesh.replica", "2", "--mesh.fsdp", "1", "--mesh.stage", "2"]
    with pytest.raises(ValueError, match=r"mesh\.stage=2 .* --balance off"):
        check_experiment(
            parse_experiment("chars_transformer", [*staged, "--balance", "exact"])
        )
    sharded = parse_experiment("chars_transformer", ["--balance", "proportional"])
    with pytest.raises(ValueError, match=r"mesh\.fsdp=4 .* --balance off"):
        check_experiment(sharded)


def test_settings_of_a_balance_that_is_off_are_refused() -> None:
    typed = ["--balance.every", "10"]
    with pytest.raises(ConfigError, match=r"--balance.every 10 .* Add --balance exact"):
        parse_experiment("digits_cnn", typed)
    assert (
        parse_experiment("digits_cnn", [*typed, "--balance=exact"]).balance.every == 10
    )
    assert parse_experiment("digits_cnn", ["--balance", "off"]).balance.policy == "off"


def test_a_bench_without_the_tier_takes_any_interval_of_the_one_with_it() -> None:
    typed = ["--checkpoint.interval=auto", "--checkpoint.stall_budget", "0.05"]
    checkpoint = parse_experiment("digits_cnn", [*typed, *tier_off(7)]).checkpoint
    assert checkpoint == CheckpointConfig(interval=7, storage_interval=0)


def test_overrides_reach_the_subclass() -> None:
    arguments = ["--optim.b2", "0.99", "--model.channels", "4", "8", "--log.every=5"]
    experiment = parse_experiment(
        "digits_cnn", [*arguments, "--log.tensorboard", "False"]
    )
    assert isinstance(experiment.optim, MaxAdaBeliefConfig)
    assert experiment.optim.b2 == 0.99 and experiment.log.every == 5
    assert not experiment.log.tensorboard


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("--optim.learning_rat", "Did you mean --optim.learning_rate"),
        ("--optim.lr", "Did you mean --optim.learning_rate"),
        ("--learning-rate", "Did you mean --optim.learning_rate"),
        ("--optim.zzz=1", "Keys of optim: --optim.learning_rate"),
        ("--data", "It is a section with the keys --data."),
    ],
)
def test_unknown_key_gets_one_error_and_a_hint(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown config key") as caught:
        parse_experiment("digits_cnn", [key, "1"])
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mesh.stage", "2.5"], ["--mesh.stage", "2.5", "int"]),
        (["--seed=x"], ["--seed", "'x'", "int"]),
        (["--optim.learning-rate", "fast"], ["--optim.learning-rate", "fast", "float"]),
        (["--checkpoint.interval", "2.5"], ["--checkpoint.interval", "2.5", "auto"]),
        (["--balance", "x"], ["--balance", "'x'", "off", "proportional", "exact"]),
        (["--plan"], ["--plan", "Missing value"]),
    ],
)
def test_what_is_no_value_is_named_with_what_is_allowed(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_experiment("digits_cnn", arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and all(text in shown for text in told), shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optim.lr", "1"],
        ["--stop.steps", "1e3"],
        ["--stop.steps", "0"],
        ["--checkpoint.storage_interval", "-1"],
        ["stray"],
        ["--log.tensorboard"],
    ],
)
def test_wrong_input_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_experiment("digits_cnn", arguments)
    assert caught.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_a_named_config_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("digits_cnn") == named_configs() / "digits_cnn.py"
    assert {path.stem for path in named_configs().glob("*.py")} == set(NAMES)


def test_a_file_goes_before_a_config_of_the_directory_and_that_before_dtfts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("configs") / "digits_cnn.py"
    own.parent.mkdir()
    own.touch()
    assert find_config("digits_cnn") == own
    assert find_config("digits_shampoo") == named_configs() / "digits_shampoo.py"
    file = Path("digits_cnn")
    file.touch()
    assert find_config("digits_cnn") == file


def test_unknown_config_names_those_there_are_and_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean digits_cnn\?") as caught:
        find_config("digit_cnn")
    told = str(caught.value)
    assert f"names in {tmp_path / 'configs'}: none" in told
    assert f"names in {named_configs()}: {', '.join(sorted(NAMES))}" in told
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").touch()
    with pytest.raises(ConfigError, match=r"Did you mean mine\?") as caught:
        find_config("mime")
    assert f"names in {tmp_path / 'configs'}: mine" in str(caught.value)


def test_what_is_no_config_is_told_what_one_defines(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("x = 1")
    with pytest.raises(ConfigError, match="must define `def config"):
        parse_experiment(str(wrong), [])


def test_reading_a_config_imports_no_jax() -> None:
    loaded = loaded_by(
        "from dtft.config.loading import parse_experiment, to_json\n"
        "to_json(parse_experiment('chars_transformer', []))"
    )
    assert not {"jax", "flax", "optax", "grain", "sklearn"} & loaded


def test_only_what_matters_stops_a_resume() -> None:
    old = parse_experiment("digits_cnn", [])
    faster = replace(old, optim=replace(old.optim, learning_rate=0.1))
    longer = replace(faster, stop=StopConfig(steps=999), mesh=MeshConfig(fsdp=3))
    lines = diff_configs(to_json(old), to_json(longer))
    assert "optim.learning_rate: 0.003 -> 0.1" in lines
    assert "stop.steps: 300 -> 999" in lines
    assert shape_relevant(to_json(old)) == shape_relevant(to_json(longer))
    refuse_other(to_json(old), to_json(longer), "runs/x")
    for other in (
        replace(old, seed=1),
        replace(old, data=replace(old.data, global_batch=48)),
        replace(old, model=parse_experiment("chars_transformer", []).model),
    ):
        with pytest.raises(ConfigError, match="Nothing was changed"):
            refuse_other(to_json(old), to_json(other), "runs/x")


def test_blocks_of_another_size_are_another_state() -> None:
    old = parse_experiment("digits_shampoo", ["--optim.block-size", "64"])
    other = parse_experiment("digits_shampoo", ["--optim.block-size", "32"])
    with pytest.raises(ConfigError, match="optim.block_size: 64 -> 32"):
        refuse_other(to_json(old), to_json(other), "runs/x")


def test_every_key_has_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_experiment("chars_transformer", ["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    known = keys(parse_experiment("chars_transformer", []))
    assert all(f"--{key.replace('_', '-')}" in text for key in known)


def test_mesh_fills_in_what_is_left() -> None:
    assert resolve_mesh(MeshConfig(fsdp=2), 2, 4) == MeshConfig(replica=4, fsdp=2)
    with pytest.raises(ValueError, match="does not fit 3 devices"):
        resolve_mesh(MeshConfig(fsdp=2), 3, 1)
    with pytest.raises(ValueError, match="does not fit 4 devices"):
        resolve_mesh(MeshConfig(replica=1, fsdp=2), 4, 1)
    with pytest.raises(ValueError, match="more than one size open"):
        MeshConfig(replica=-1, fsdp=-1)


def test_check_says_what_to_change() -> None:
    experiment = parse_experiment("digits_cnn", [])
    with pytest.raises(ValueError, match=r"copies=2 .* hosts, 1: .*copies 1"):
        check_experiment(experiment, hosts=1)
    with pytest.raises(ValueError, match=r"hosts=0 is not positive"):
        check_experiment(experiment, hosts=0)
    with pytest.raises(ValueError, match=r"devices_per_host=0 .* Allowed: 1 or more"):
        check_experiment(experiment, devices_per_host=0)
    divided = parse_experiment("digits_cnn", ["--checkpoint.share", "divided"])
    check_experiment(divided, hosts=3)
    check_experiment(divided, hosts=1, memory_tier=False)
    few = parse_experiment(
        "digits_cnn", ["--checkpoint.share", "divided", "--mesh.fsdp", "3"]
    )
    with pytest.raises(ValueError, match=r"share=divided has nothing .*share full"):
        check_experiment(few, hosts=3)
    with pytest.raises(ValueError, match=r"global_batch=96 .*global_batch 100"):
        check_experiment(experiment, hosts=5)
    with pytest.raises(ValueError, match=r"num_classes=9 is less than the 10 classes"):
        check_experiment(parse_experiment("digits_cnn", ["--model.num_classes", "9"]))
    longer = parse_experiment("chars_transformer", ["--data.context", "65"])
    with pytest.raises(ValueError, match=r"data.context=65 is more than"):
        check_experiment(longer)
    many = replace(experiment, cluster=ClusterConfig(hosts=3, devices_per_host=-1))
    check_experiment(many)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect with kind='constant'"):
        ScheduleConfig(warmup_steps=3)
    with pytest.raises(ValueError, match="below optim.schedule.decay_steps=0"):
        ScheduleConfig(kind="warmup_cosine")
    with pytest.raises(ValueError, match="not a multiple of checkpoint.interval=3"):
        CheckpointConfig(interval=3)
    with pytest.raises(ValueError, match=r"chunk_bytes=268435457 .* most 268435456"):
        CheckpointConfig(chunk_bytes=(256 << 20) + 1)
    with pytest.raises(ValueError, match=r"optim.b1=0.0 makes"):
        MaxAdaBeliefConfig(b1=0.0)
    with pytest.raises(ValueError, match=r"optim.beta_preconditioner=0.0 does not fit"):
        ShampooConfig(beta_preconditioner=0.0)


def test_each_class_has_a_name_of_its_own_and_former_names_mean_it() -> None:
    shipped = [
        kind
        for base in (ModelConfig, DataConfig, OptimConfig)
        for kind in _below(base)
        if kind.__module__.startswith("dtft.")
    ]
    names = [vars(kind).get("short_name") for kind in shipped]
    assert len({*names}) == len(names) >= 11 and None not in names
    assert {*_FORMER_NAMES.values()} <= {*names}


def test_a_users_class_is_named_by_its_place_also_below_one_of_ours() -> None:
    class Mine(CNNConfig):
        pass

    experiment = replace(parse_experiment("digits_cnn", []), model=Mine())
    name = json.loads(to_json(experiment))["model"]["class"]
    assert name.endswith(".<locals>.Mine") and name.startswith(__name__)


def _below(kind: type) -> list[type]:
    return [it for child in kind.__subclasses__() for it in (child, *_below(child))]


def test_a_config_of_before_the_move_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dtft.train.datasets import DigitsConfig\n"
        "from dtft.train.experiment import Experiment, MeshConfig\n"
        "from dtft.train.images import SyntheticImagesConfig\n"
        "from dtft.train.optimizers import AdamWConfig\n"
        "from dtft.train.schedule_config import ScheduleConfig\n"
        "from dtft.train.shampoo import ShampooConfig\n"
        "from dtft.models.base import CNNConfig\n\n\n"
        "def config() -> Experiment:\n"
        "    return Experiment(name='mine', model=CNNConfig(), data=DigitsConfig(),\n"
        "                      optim=AdamWConfig())\n"
    )
    with pytest.warns(FutureWarning):  # of each name; see tests/unit/test_former.py
        kind = type(parse_experiment(str(path), []).optim)
    assert kind is AdamWConfig
