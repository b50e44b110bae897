"""What is typed to change a config: refused in a line of its own, before it is parsed.

Decides which keys exist, which have a shorter name, and what is said of one that does
not exist or of a text that is no value of its key; that for numbers and choices only,
the rest the parser reads. Pure; must stay free of jax imports.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NUMBERS: dict[Any, str] = {int: "no whole number", float: "no number"}
_SHORT = {"mesh": "plan", "balance": "balance.policy"}
"""Other ways to say a key: `--mesh auto`, `--mesh FILE` and `--balance exact`."""


def checked(config: Any, typed: Sequence[str]) -> list[str]:
    """A command line with all flags by their keys.

    Args:
        config: what is changed, a dataclass.
        typed: such as ``["--balance", "exact"]``.

    Raises:
        ValueError: no such key, or a text that cannot be its value.
    """
    arguments = [_in_full(argument) for argument in typed]
    _refuse_unknown(arguments, list(keys(config)))
    _refuse_unreadable(config, typed)
    return arguments


def keys(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields that can be set.

    >>> from dtft.train.experiment import MeshConfig
    >>> list(keys(MeshConfig()))
    ['replica', 'stage', 'fsdp', 'tensor']
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags of a command line that have a value, each with its first one.

    >>> list(given(["--seed=1", "--mesh.stage", "2", "--plan", "", "--help"]))
    [('--seed', '1'), ('--mesh.stage', '2'), ('--plan', '')]
    """
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        values = [value] if equals else arguments[at + 1 : at + 2]
        if flag.startswith("--") and values and (equals or values[0][:2] != "--"):
            yield flag, values[0]


def problem(config: Any, key: str, text: str) -> str:
    """Why a text is no value of a key; empty if it is one, or only the parser knows.

    Args:
        config: a dataclass.
        key: dotted name of one of its fields, see `keys`.
        text: as it was typed.

    >>> from dtft.train.experiment import MeshConfig
    >>> problem(MeshConfig(), "stage", "2.5"), problem(MeshConfig(), "stage", "2")
    ('no whole number', '')
    """
    *sections, name = key.split(".")
    for section in sections:
        config = getattr(config, section)
    kind = {field.name: field.type for field in fields(config)}[name]
    is_union = get_origin(kind) in (Union, UnionType)
    found = [_problem(one, text) for one in (get_args(kind) if is_union else [kind])]
    return "" if "" in found else " and ".join(found)


def _problem(kind: Any, text: str) -> str:
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return "" if text in choices else f"none of {', '.join(choices)}"
    if kind not in _NUMBERS:
        return ""
    try:
        kind(text)
    except ValueError:
        return _NUMBERS[kind]
    return ""


def _in_full(argument: str) -> str:
    """A flag by its key.

    >>> [_in_full(it) for it in ("--mesh=auto", "--mesh.fsdp", "--balance", "exact")]
    ['--plan=auto', '--mesh.fsdp', '--balance.policy', 'exact']
    """
    flag, equals, value = argument.partition("=")
    key = _SHORT.get(flag.removeprefix("--")) if flag.startswith("--") else None
    return f"--{key}{equals}{value}" if key else argument


def _refuse_unknown(overrides: Sequence[str], known: list[str]) -> None:
    for argument in overrides:
        if not argument.startswith("--") or argument == "--help":
            continue
        key = argument[2:].partition("=")[0].replace("-", "_")
        if key not in known:
            raise ValueError(
                f"unknown config key --{key}.{_suggestion(key, known)} "
                "Nothing was started. `--help` after the config lists all keys."
            )


def _refuse_unreadable(config: Any, typed: Sequence[str]) -> None:
    for flag, value in given(typed):
        key = _in_full(flag)[2:].replace("-", "_")
        if why := problem(config, key, value):
            also = "" if key == flag[2:] else f" ({key})"
            raise ValueError(
                f"{flag} {value} is {why}{also}. Nothing was started. `--help` after "
                "the config says what it is for."
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
