"""Whether a text can be the value of an option, said in a line before it is parsed.

Decides wording only, for numbers and choices; what else there is, the parser reads.
Pure; must stay free of jax imports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NUMBERS: dict[Any, str] = {int: "no whole number", float: "no number"}


def given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags of a command line that have a value, each with its first one.

    >>> list(given(["--seed=1", "--mesh.stage", "2", "--help"]))
    [('--seed', '1'), ('--mesh.stage', '2')]
    """
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not equals:
            value = "".join(arguments[at + 1 : at + 2])
        if flag.startswith("--") and (equals or (value and value[:2] != "--")):
            yield flag, value


def problem(config: Any, key: str, text: str) -> str:
    """Why a text is no value of a key; empty if it is one, or only the parser knows.

    Args:
        config: a dataclass.
        key: dotted name of one of its fields, see `config.keys`.
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
