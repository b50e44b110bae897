"""Counts the programs that JAX loads from its compilation cache."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yields a list that grows by one for each program that is loaded."""
    found: list[str] = []

    def happened(event: str, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(happened)
    yield found
    jax.monitoring.unregister_event_listener(happened)
