"""The small CNN on scikit-learn's digits with Shampoo, on three hosts.

dtft train digits_shampoo
dtft launch digits_shampoo --hosts 3 --spares 1

Expect a test accuracy of about 0.985 after 300 steps, in well under a minute on a CPU.
The statistics are those of each host's own gradient and travel packed: choose another
way with `--optim.wire`.
"""

from dtft.config import ClusterConfig, Experiment, ShampooConfig, StopConfig
from dtft.data import DigitsConfig
from dtft.models.base import CNNConfig


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        name="digits_shampoo",
        model=CNNConfig(),
        data=DigitsConfig(global_batch=96),
        optim=ShampooConfig(learning_rate=3e-3, block_size=64, wire="packed"),
        cluster=ClusterConfig(hosts=3),
        stop=StopConfig(steps=300),
    )
