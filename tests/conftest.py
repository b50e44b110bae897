"""Set before the first device is touched: CPU, eight devices, strict promotion."""

import logging
import socket

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
logging.getLogger("absl").setLevel(logging.WARNING)


@pytest.fixture
def free_port() -> int:
    """A TCP port on this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
