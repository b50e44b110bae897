"""Loads an Experiment from a config file and overrides, and converts it to JSON.

Finds the config file of a name, and decides which differences between two configs make
a checkpoint unusable. Does not import JAX.
"""

import dataclasses
import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import tyro

from dtft.config.experiment import (
    BalanceConfig,
    Experiment,
    MeshConfig,
    PipelineConfig,
    PlanFlag,
)


def keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields of a config, such as "mesh.replica".

    A field that is a dataclass gives the names of its fields instead. `prefix`, such as
    "mesh.", is put before each name.

    >>> from dtft.config.experiment import MeshConfig
    >>> list(keys(MeshConfig()))
    ['replica', 'stage', 'fsdp', 'tensor']
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def unknown(config: Any, words: Sequence[str]) -> str:
    """Makes the error message for unknown words of a command line.

    Args:
        config: the dataclass whose fields the words should set.
        words: one or more unknown words; the message names the first flag, or without a
            flag the first word.

    The example shows only the beginning of the message.

    >>> from dtft.config.experiment import MeshConfig
    >>> unknown(MeshConfig(), ["--fsd", "2"])[:49]
    'unknown config key --fsd. Did you mean --fsdp? No'
    """
    flag = next((word for word in words if word.startswith("--")), "")
    if not flag:
        return f"unknown word {words[0]!r}. Nothing was started. Keys begin with --."
    key = flag[2:].partition("=")[0].replace("-", "_")
    return (
        f"unknown config key --{key}.{_suggestion(key, list(keys(config)))} Nothing "
        "was started. `--help` after the config lists all keys."
    )


def _suggestion(key: str, known: list[str]) -> str:
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f" It is a section with the keys --{', --'.join(inside)}."
    section, _, leaf = key.rpartition(".")
    here = [name for name in known if name.rpartition(".")[0] == section]
    groups = [
        [name for name in known if _leaf(name) == leaf],
        [name for name in here if _initials(_leaf(name)) == leaf],
        _alike(leaf, here),
        _alike(leaf, known),
    ]
    close = list(dict.fromkeys(name for group in groups for name in group))[:3]
    if close:
        return f" Did you mean --{' or --'.join(close)}?"
    beside = [name for name in known if section and name.startswith(f"{section}.")]
    return f" Keys of {section}: --{', --'.join(beside)}." if beside else ""


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _alike(leaf: str, names: list[str]) -> list[str]:
    leaves = {_leaf(name) for name in names}
    close = difflib.get_close_matches(leaf, leaves, 3, cutoff=0.7)
    return [name for match in close for name in names if _leaf(name) == match]


SCHEMA = 1
"""Version of the JSON format of `to_json`; increased when an older dtft would misread a
new file."""
_SHAPE_RELEVANT = (
    *("schema", "data_identity", "seed", "model.", "data."),
    *("optim.class", "optim.block_size", "optim.sync."),
)
_STAGES = ("pipeline.virtual_stages", "pipeline.layers")
"""Keys that decide the layers of each pipeline stage, and so the shape of the state if
mesh.stage is above 1."""
_ELSEWHERE = ("data.path", "data.threads")
"""Keys of the section `data` that do not change the samples. The key `data_identity`
identifies the samples."""
_FORMER_NAMES = {
    "dtft.models.base.CNNConfig": "cnn",
    "dtft.models.base.ResNetConfig": "resnet",
    "dtft.models.base.TransformerConfig": "transformer",
    "dtft.train.datasets.CharsConfig": "chars",
    "dtft.train.datasets.DigitsConfig": "digits",
    "dtft.train.images.ImageFolderConfig": "image_folder",
    "dtft.train.images.SyntheticImagesConfig": "synthetic_images",
    "dtft.train.optimizers.AdamWConfig": "adamw",
    "dtft.train.optimizers.MaxAdaBeliefConfig": "max_adabelief",
    "dtft.train.optimizers.SGDConfig": "sgd",
    "dtft.train.shampoo.ShampooConfig": "shampoo",
}
"""Maps class names in `config.json` of runs before 24 November 2026 to today's short
names. So runs and checkpoints of that time can be resumed."""


class ConfigError(ValueError):
    """An error in the user's input; the message says what to change.

    Commands print the message and exit with code 2.
    """


def load_experiment(
    config: str, overrides: Sequence[str], prog: str = "dtft train"
) -> Experiment:
    """Reads an experiment for a command; prints and exits when the input is wrong.

    Args:
        config: path of a config module, or the name of a config in `./configs` or of
            one that comes with dtft.
        overrides: words of the command line that set keys of the config, such as
            ``["--optim.learning_rate", "0.01"]``.
        prog: name of the command, for the help text.

    Raises:
        SystemExit: with code 2 for wrong input, 0 for `--help`.
    """
    try:
        return parse_experiment(config, overrides, f"{prog} {config}")
    except ConfigError as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """Prints an error to stderr and exits with code 2.

    Raises:
        SystemExit: always.
    """
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def parse_experiment(
    config: str, overrides: Sequence[str], prog: str = "dtft"
) -> Experiment:
    """Reads an experiment from a config file and overrides.

    Args:
        config: path of a config module, or the name of a config.
        overrides: words of the command line that set keys of the config, such as
            ``["--optim.learning_rate", "0.01"]``.
        prog: name of the command, for the help text.

    Raises:
        ConfigError: there is no such config, the config or an override is wrong, or the
            data does not exist.
        SystemExit: tyro refused the value of an override and printed the reason (exit
            code 2), or help was printed (exit code 0).
    """
    default = _default(find_config(config))
    overrides = _by_names_of_today(default, overrides)
    try:
        experiment, rest = tyro.cli(
            Experiment,
            default=_for_plan(default, overrides, prog),
            args=overrides,
            prog=prog,
            config=(tyro.conf.FlagConversionOff,),
            return_unknown_args=True,
        )
        if rest:
            raise ValueError(unknown(default, rest))
        _refuse_idle(default.balance, experiment.balance)
        experiment.data.check()
        return experiment
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _by_names_of_today(default: Experiment, words: Sequence[str]) -> list[str]:
    """Returns the command-line words with old names of optimizer keys replaced.

    Prints a warning to stderr for each old name, such as `debias_max`. `default` is the
    config file's experiment.
    """
    former = getattr(default.optim, "former_fields", {})
    found = list(words)
    for at, word in enumerate(found):
        flag, equals, value = word.partition("=")
        section, _, name = flag.replace("-", "_").rpartition(".")
        if section == "__optim" and name in former:
            now = f"--optim.{former[name]}"
            print(f"{flag} is an old name, which will go. Use {now}.", file=sys.stderr)
            found[at] = f"{now}{equals}{value}"
    return found


def _refuse_idle(before: BalanceConfig, balance: BalanceConfig) -> None:
    """Checks that no flag changes an option of `balance` while `balance.policy` is off.

    Raises:
        ValueError: the policy is off, and another option differs from `before`, the
            options of the config file.
    """
    idle = [
        f"--balance.{name} {value}"
        for name, value in vars(balance).items()
        if name != "policy" and value != getattr(before, name)
    ]
    if idle and balance.policy == "off":
        raise ValueError(
            f"{idle[0]} says nothing with balance.policy=off. Nothing was started. Add "
            "--balance exact, or leave it out."
        )


def find_config(config: str) -> Path:
    """Finds the file of a config that is given as a path or a name.

    A path has priority over a name in `./configs`, which has priority over the name of
    a config that comes with dtft.

    Raises:
        ConfigError: there is no such config; the message lists the existing names.
    """
    path, folders = Path(config), [Path("configs"), named_configs()]
    for candidate in [path, *(folder / f"{config}.py" for folder in folders)]:
        if candidate.is_file():
            return candidate
    names = {
        folder.absolute(): sorted(file.stem for file in folder.glob("*.py"))
        for folder in folders
    }
    known = [name for there in names.values() for name in there]
    close = difflib.get_close_matches(path.stem, known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"config {config!r} is neither a file nor a name of one.{hint}"
        + "".join(
            f"\n  names in {folder}: {', '.join(there) or 'none'}"
            for folder, there in names.items()
        )
    )


def named_configs() -> Path:
    """Returns the folder of the configs that come with dtft.

    In a wheel the folder is inside the package. In a checkout, which may be installed
    as editable, the folder is next to the package.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "config" / "named"
    return inside if inside.is_dir() else package.parent / "configs"


def to_json(experiment: Experiment) -> str:
    """Encodes an experiment as JSON, with the data's identity and the format's version.

    This text is the resolved config. Equal experiments with equal data give equal
    texts.

    Raises:
        ValueError: the data, whose identity is part of the text, is missing.
    """
    plain = {
        "schema": SCHEMA,
        "data_identity": experiment.data.identity(),
        **_plain(experiment),
    }
    return json.dumps(plain, indent=1, sort_keys=True)


def diff_configs(old: str, new: str) -> list[str]:
    """Lists the keys whose values differ between two configs, with both values.

    The configs are texts of `to_json`. Class names of old dtft versions count as
    today's names.

    >>> diff_configs('{"optim": {"b1": 0.9}}', '{"optim": {"b1": 0.8}}')
    ['optim.b1: 0.9 -> 0.8']
    """
    before, after = _read(old), _read(new)
    return [
        f"{key}: {_text(before, key)} -> {_text(after, key)}"
        for key in sorted({*before, *after})
        if _text(before, key) != _text(after, key)
    ]


def shape_relevant(resolved: str) -> str:
    """Returns, as JSON, the part of a resolved config that must be equal to resume.

    The part has the format's version, the model, the data with its identity and batch,
    the class of the optimizer, the size of Shampoo's blocks, the seed and the number of
    pipeline stages. With two stages or more it also has the layers of the stages. If
    replicas exchange moments, it also has the keys of optim.sync. Sizes of the other
    mesh axes are left out, because a state can be restored onto another mesh unless it
    has an array that differs per replica.
    """
    flat = _read(resolved)
    kept = {
        key: flat[key]
        for key in flat
        if key.startswith(_SHAPE_RELEVANT) and key not in _ELSEWHERE
    }
    if flat.get("optim.sync.moments", "none") == "none":
        kept = {key: kept[key] for key in kept if not key.startswith("optim.sync.")}
    kept["mesh.stage"] = flat.get("mesh.stage", 1)
    if kept["mesh.stage"] > 1:
        kept |= {key: flat[key] for key in _STAGES}
    return json.dumps(kept, indent=1, sort_keys=True)


def refuse_other(saved: str, now: str, where: str | Path) -> None:
    """Checks that a checkpoint of config `saved` can be resumed with `now`.

    `saved` and `now` are results of `to_json`. The error names `where`, the directory
    of the checkpoint.

    Raises:
        ConfigError: the configs differ in a key that must be equal to resume, such as
            one of the model (see `shape_relevant`).
    """
    lines = diff_configs(shape_relevant(saved), shape_relevant(now))
    if lines:
        raise ConfigError(
            f"the checkpoint in {where} was made by another config (saved -> now):\n  "
            + "\n  ".join(lines)
            + "\nNothing was changed. Undo these differences, or set --log.run_dir "
            "to a new directory."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """The value of --plan on the command line; "" if it is not given."""

    plan: PlanFlag = ""


def _for_plan(default: Experiment, overrides: Sequence[str], prog: str) -> Experiment:
    """Returns `default` with the default mesh and pipeline if --plan is given.

    Returns `default` unchanged without --plan. Also returns `default` unchanged if
    `overrides` sets keys of mesh or pipeline in addition to --plan, because
    `Experiment` refuses this combination later.

    Args:
        default: the experiment of the config file.
        overrides: words of the command line that override keys of the config.
        prog: name of the command, for error messages.
    """
    asked, rest = tyro.cli(
        _Asked, args=overrides, prog=prog, add_help=False, return_unknown_args=True
    )
    own = any(word.startswith(("--mesh.", "--pipeline.")) for word in rest)
    if own or not asked.plan:
        return default
    return dataclasses.replace(default, mesh=MeshConfig(), pipeline=PipelineConfig())


def _default(path: Path) -> Experiment:
    spec = importlib.util.spec_from_file_location(f"dtft_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config {path} is not a Python file. Its name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        experiment = module.config()
    except ValueError as error:
        raise ConfigError(f"config {path}: {error}") from error
    except AttributeError as error:
        raise ConfigError(
            f"config {path}: {error}. It must define `def config() -> Experiment`."
        ) from error
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"config {path}: config() returned {type(experiment).__name__}, but it "
            "must return an Experiment."
        )
    return experiment


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kind = type(value)
        tag = {} if kind.__bases__ == (object,) else {"class": _name(kind)}
        names = [field.name for field in dataclasses.fields(value)]
        return {**tag, **{name: _plain(getattr(value, name)) for name in names}}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value


def _name(kind: type) -> str:
    """Returns the name of a config's class in JSON.

    The name is the class's own `short_name`, not an inherited one, or else its module
    and class name.
    """
    own = vars(kind).get("short_name")
    return own or f"{kind.__module__}.{kind.__qualname__}"


def _read(resolved: str) -> dict[str, Any]:
    """Parses the JSON of a config into a dict by dotted key.

    Class names of old dtft versions are replaced by today's names.
    """
    flat = _flat(json.loads(resolved))
    for key, value in flat.items():
        if key.endswith(".class"):
            flat[key] = _FORMER_NAMES.get(value, value)
    return flat


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        inner = isinstance(value, Mapping)
        flat.update(
            _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
        )
    return flat


def _text(flat: Mapping[str, Any], key: str) -> str:
    return str(flat[key]) if key in flat else "(absent)"
