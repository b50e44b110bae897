"""Losses that several models share. Depends on arrays, not on models or meshes."""

import jax
import jax.numpy as jnp
import optax


def classification(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes cross entropy and accuracy, each of the shape of `labels`.

    Args:
        logits: [..., classes].
        labels: [...] integers, the number of the right class.

    In the example the logits are highest for class 0, which is right, and for class 1,
    which is wrong.

    >>> losses, metrics = classification(jnp.eye(2) * 9, jnp.array([0, 0]))
    >>> [round(float(loss), 1) for loss in losses], metrics["accuracy"].tolist()
    ([0.0, 9.0], [1.0, 0.0])
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
    return losses, {"accuracy": correct.astype(jnp.float32)}
