"""Which keys a config has, and what is said of words that are none of them.

Pure; must stay free of jax imports.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


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


def unknown(config: Any, words: Sequence[str]) -> str:
    """What is wrong with words of a command line that nobody knows.

    Args:
        config: what they were to change, a dataclass.
        words: one or more; the first flag of them is what is told.

    >>> from dtft.train.experiment import MeshConfig
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
