"""The command `dtft`: finds the named subcommand, parses its flags and runs it.

`dtft/cli/commands.py` defines the commands and their flags. Wrong input ends with one
error message and exit code 2.
"""

import difflib
import functools
import inspect
import operator
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TextIO

import tyro

from dtft import __version__
from dtft.cli.commands import BARE, COMMANDS, WITH_KEYS

_HELP = ("-h", "--help")
_INPUT = (ValueError, FileExistsError, FileNotFoundError, PermissionError)
"""Errors of wrong input. Other OSErrors can also come from the machine, such as a full
disk."""
_MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The command's exit code; 2 after an error message for wrong input or an error of
        the operating system, 130 after Ctrl-C, 1 if no process reads stdout any more.

    Raises:
        OSError: `dtft agent` had an error of the operating system that wrong input does
            not cause.
        SystemExit: help was printed (0), a flag or CONFIG is wrong (2), or the command
            raised it, such as a drill that took too long.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _run(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if given[:1] == ["agent"] and not isinstance(error, _INPUT):
            raise  # the agent's log then has the traceback
        print(f"dtft: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("dtft: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _run(given: list[str]) -> int:
    if given[:1] == ["--version"]:
        print(f"dtft {__version__}")
        return 0
    command, rest = read(given)
    return command.run(rest) if type(command) in WITH_KEYS.values() else command.run()


def read(given: list[str]) -> tuple[Any, list[str]]:
    """Parses a command line into its command and the words unknown to the command.

    Raises:
        ValueError: the words name no command.
        SystemExit: help was printed (0), or a flag is wrong (2).
    """
    name, words = _named(given)
    if not name:
        _without_command(given)
    words = list(_in_full(words, BARE.get(name, {})))
    try:
        return _parsed(name, words)
    except SystemExit as ended:
        if ended.code == 0 and name in WITH_KEYS:
            _tell_keys(name, words)
        raise


def _named(given: list[str]) -> tuple[str, list[str]]:
    """Splits words into the command's name ("" if none) and the other words.

    The name may have two words. If the second one is a flag, as in the name
    `agent --serve-only`, it may stand anywhere among the words.

    >>> _named(["plan", "predict", "rows.csv"]), _named(["plan", "digits_cnn"])
    (('plan predict', ['rows.csv']), ('plan', ['digits_cnn']))
    >>> _named(["agent", "--job", "j", "--serve-only"])
    ('agent --serve-only', ['--job', 'j'])
    """
    first, words = given[:1], given[1:]
    for name in sorted(COMMANDS, key=lambda name: -len(name.split())):
        begin, *second = name.split()
        if [begin] != first:
            continue
        if not second or words[:1] == second:
            return name, words[len(second) :]
        if second[0].startswith("--") and second[0] in words:
            return name, [word for word in words if word != second[0]]
    return "", given


def _parsed(
    name: str, words: Sequence[str], *, quiet: bool = False
) -> tuple[Any, list[str]]:
    found = tyro.cli(
        COMMANDS[name],
        args=words,
        prog=f"dtft {name}",
        description=_text(COMMANDS[name]).replace("\n", "\n "),  # keeps line breaks
        config=_MARKERS,
        return_unknown_args=name in WITH_KEYS,
        console_outputs=not quiet,
    )
    return found if name in WITH_KEYS else (found, [])


def _tell_keys(name: str, words: Sequence[str]) -> None:
    """Prints the help of the flags that a command parses itself, such as config keys.

    These are not fields of the command's class: its method `run` parses them. tyro has
    already printed the help of the fields. Prints nothing if the words without --help
    are not a valid command line.

    Args:
        name: name of the command.
        words: the command-line words after the name.

    Raises:
        SystemExit: the help was printed (0), or CONFIG is wrong (2).
        ValueError: with `agent --serve-only`, a flag of the job is wrong or missing.
    """
    without = [word for word in words if word not in _HELP]
    try:
        command, _ = _parsed(name, without, quiet=True)
    except SystemExit:
        return
    command.run(["--help"])


def _in_full(words: Sequence[str], bare: dict[str, str]) -> Iterator[str]:
    """Yields the words, with a value for each flag in `bare` that has none.

    A flag has a value if the next word is a number. Otherwise the flag gets its value
    in `bare`. tyro does not support flags with an optional value.

    >>> list(_in_full(["--verify", "x", "--verify", "2"], {"--verify": "4"}))
    ['--verify=4', 'x', '--verify', '2']
    """
    for at, word in enumerate(words):
        follows = words[at + 1] if at + 1 < len(words) else ""
        alone = word in bare and not follows.isdigit()
        yield f"{word}={bare[word]}" if alone else word


def _without_command(given: list[str]) -> NoReturn:
    """Prints the list of commands if the words ask for --help; otherwise raises.

    Raises:
        SystemExit: the list was printed.
        ValueError: the words name no command.
    """
    group = [name for name in COMMANDS if name.split()[:1] == given[:1]]
    prefix, words = ("dtft", given) if not group else (f"dtft {given[0]}", given[1:])
    known = [name.split()[-1] for name in group] or [*COMMANDS]
    if words and words[0] in _HELP:
        shown = zip(known, group or known, strict=True)
        told = [_listed(last, COMMANDS[name]) for last, name in shown]
        about = "Distributed training that outlives its hosts. Also: dtft --version."
        kinds = functools.reduce(operator.or_, told)
        about_kinds = tyro.conf.arg(
            help="One of:"
        )  # faster than to look for a docstring
        listed: Any = Annotated[kinds, about_kinds]
        tyro.cli(listed, args=["--help"], prog=prefix, description=about)
    names = list(dict.fromkeys(name.split()[0] for name in known))
    close = difflib.get_close_matches(words[0], names, 1) if words else []
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{' '.join([prefix, *words[:1]])} is no command.{hint} Allowed after "
        f"`{prefix}`: {', '.join(names)}. `{prefix} --help` says what they do."
    )


def _listed(name: str, kind: type) -> Any:
    """Makes a command's entry for the list of commands in the help.

    The entry has the command's name and the first paragraph of its class's docstring.

    Args:
        name: the last word of the command's name, such as `ls`.
        kind: the command's class.
    """
    about = _text(kind).partition("\n\n")[0]
    return Annotated[kind, tyro.conf.subcommand(name, description=about)]


def _text(kind: type) -> str:
    return inspect.getdoc(kind) or ""


def _nobody_reads(stream: TextIO) -> bool:
    """Whether a stream is a pipe that no process reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
