"""Failure domains: the racks and power feeds that hosts share.

Parses the failure domains from a label per host or from a file, checks that they are
consistent, and chooses the level (power, rack or host) at which copies are separated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEVELS = ("power", "rack")
"""Levels that a label can name, widest first. The level "host" is below both."""


@dataclass(frozen=True, kw_only=True)
class FailureDomains:
    """The nested failure domains of all hosts."""

    levels: tuple[str, ...]
    """Levels that the labels name, widest first; the same for all hosts."""
    names: Mapping[str, str]
    """Host to the names of its domains, joined by "/": "power-1/rack-3". Empty if the
    labels name no level."""

    def of(self, hosts: Iterable[str]) -> Mapping[str, str]:
        """Maps each of the given hosts to its domain, such as "power-1/rack-3".

        Without labels, each host is its own domain.

        Raises:
            ValueError: a host has no label though others have.
        """
        hosts = list(hosts)
        unknown = [host for host in hosts if host not in self.names]
        if self.levels and unknown:
            raise ValueError(
                f"no failure domain is known for {unknown[0]!r} (and "
                f"{len(unknown) - 1} more), but {len(self.names)} hosts have a label "
                f"with {', '.join(self.levels)}. Label all hosts or none."
            )
        return {host: self.names.get(host, host) for host in hosts}


@dataclass(frozen=True, kw_only=True)
class Separation:
    """The level of the failure domains that separate copies, and each slot's domain."""

    level: str
    """The level: one of `LEVELS`, or "host"."""
    domains: tuple[str, ...]
    """Domain of each slot at that level, for the argument `domains` of `place_copies`.
    """
    effective_copies: int
    """Number of domains in which every slice gets a copy: the requested copies, or the
    number of distinct domains at that level if there are fewer."""


def parse_domain_label(text: str) -> dict[str, str]:
    """Parses the label of one host, such as "power=p1,rack=r7".

    Returns a dict from level ("power" or "rack") to the name of the host's domain.
    Commas or spaces separate the levels. Levels may be absent.

    >>> parse_domain_label("rack=r7,power=p1")
    {'power': 'p1', 'rack': 'r7'}

    Raises:
        ValueError: a word is not LEVEL=NAME with one of these levels, a level occurs
            twice, or a name contains "/".
    """
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        level, equals, name = word.partition("=")
        if not equals or level not in LEVELS or level in found or not name:
            raise ValueError(
                f"label {text!r}: cannot read {word!r}. Allowed: each of "
                f"{', '.join(LEVELS)} at most once, as LEVEL=NAME. Example: "
                "power=p1,rack=r7."
            )
        if "/" in name:
            raise ValueError(f"label {text!r}: name {name!r} must not contain '/'.")
        found[level] = name
    return {level: found[level] for level in LEVELS if level in found}


def parse_domain_file(text: str) -> FailureDomains:
    """Parses a file's text: each line has a host, then blanks and the host's label.

    `#` begins a comment.

    >>> parse_domain_file("h0 power=p1 rack=r1  # left\\nh1 power=p1 rack=r2\\n").names
    {'h0': 'p1/r1', 'h1': 'p1/r2'}

    Raises:
        ValueError: a line cannot be parsed, a host occurs twice, hosts name different
            levels, or a rack is in two power domains.
    """
    labels: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        host, label = words[0], "".join(words[1:])
        if host in labels:
            raise ValueError(f"line {number}: host {host!r} has a line already.")
        labels[host] = label
    return domains_from_labels(labels)


def domains_from_labels(labels: Mapping[str, str]) -> FailureDomains:
    """Parses the labels of all hosts and checks that they are consistent.

    Args:
        labels: host to its label. If all labels are "", no domains are known: the
            result has neither levels nor names.

    Raises:
        ValueError: a label cannot be parsed, hosts name different levels, or a rack is
            in two power domains.
    """
    parsed = {host: parse_domain_label(label) for host, label in labels.items()}
    levels: tuple[str, ...] = ()
    first = ""
    for host, found in parsed.items():
        if not first:
            first, levels = host, tuple(found)
        if tuple(found) != levels:
            raise ValueError(
                f"host {host!r} is labelled with {_listed(found)}, but {first!r} with "
                f"{_listed(levels)}. Name the same levels for all hosts."
            )
    names = {host: "/".join(found.values()) for host, found in parsed.items()}
    _check_nested(parsed)
    return FailureDomains(levels=levels, names=names if levels else {})


def separate_copies(
    domains: FailureDomains, slots: Sequence[str], copies: int
) -> Separation:
    """Chooses the widest level (power, rack) with at least `copies` domains.

    If no level has so many domains, chooses the level "host", at which each host is its
    own domain. At a narrower level, `place_copies` still prefers different domains of
    the wider levels.

    Args:
        domains: the failure domains of the hosts.
        slots: the host of each slot.
        copies: number of domains in which every slice should have a copy.

    >>> two_racks = domains_from_labels({"a": "rack=1", "b": "rack=1", "c": "rack=2"})
    >>> separate_copies(two_racks, ["a", "b", "c"], 2).domains
    ('1', '1', '2')
    >>> separate_copies(two_racks, ["a", "b", "c"], 3).level
    'host'

    Raises:
        ValueError: a host has no label though others have.
    """
    for level in domains.levels:
        found = domains_at(domains, slots, level)
        if len(set(found)) >= copies:
            return Separation(level=level, domains=found, effective_copies=copies)
    return Separation(
        level="host",
        domains=domains_at(domains, slots, "host"),
        effective_copies=min(copies, len(set(slots))),
    )


def domains_at(
    domains: FailureDomains, hosts: Sequence[str], level: str
) -> tuple[str, ...]:
    """Returns the domain of each host at one level, prefixed with its wider domains.

    `level` is "power", "rack" or "host". If the labels do not name this level, each
    host is its own domain.

    >>> racks = domains_from_labels({"a": "power=p rack=1", "b": "power=p rack=2"})
    >>> domains_at(racks, ["b"], "rack"), domains_at(racks, ["b"], "host")
    (('p/2',), ('p/2/b',))

    Raises:
        ValueError: a host has no label though others have.
    """
    names = domains.of(hosts)
    if level not in domains.levels:  # the host itself
        return tuple(f"{names[h]}/{h}" if domains.levels else h for h in hosts)
    depth = domains.levels.index(level) + 1
    return tuple("/".join(names[host].split("/")[:depth]) for host in hosts)


def _check_nested(parsed: Mapping[str, Mapping[str, str]]) -> None:
    feeds: dict[str, tuple[str, str]] = {}
    for host, found in parsed.items():
        if tuple(found) != LEVELS:
            continue
        power, other = feeds.setdefault(found["rack"], (found["power"], host))
        if power != found["power"]:
            raise ValueError(
                f"rack {found['rack']!r} is in power domain {power!r} for host "
                f"{other!r} and in {found['power']!r} for {host!r}. Racks must have "
                "different names, or give the same power for all their hosts."
            )


def _listed(levels: Iterable[str]) -> str:
    return ", ".join(levels) or "nothing"
