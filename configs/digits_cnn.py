"""A small CNN on scikit-learn's digits (real images, offline), on three hosts.

    dtft train digits_cnn
    dtft launch digits_cnn --hosts 3 --spares 1

Expect a test accuracy of about 0.98 after 300 steps, in a few seconds on a CPU.
"""

from dtft.config import ClusterConfig, Experiment, MaxAdaBeliefConfig, StopConfig
from dtft.data import DigitsConfig
from dtft.models.base import CNNConfig


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        name="digits_cnn",
        model=CNNConfig(),
        data=DigitsConfig(global_batch=96),
        optim=MaxAdaBeliefConfig(learning_rate=3e-3),
        cluster=ClusterConfig(hosts=3),
        stop=StopConfig(steps=300),
    )
