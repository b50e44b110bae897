"""A model whose loss raises `NameError`."""

from typing import Any

from dtft.models.base import CNNConfig


class Crashing(CNNConfig):
    """A CNN whose loss has a mistyped name."""

    def loss(self, model: Any, batch: Any) -> Any:
        """Raises `NameError`."""
        return momentun  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
