"""A small character transformer on Python's help texts, its state over four hosts.

    dtft train chars_transformer
    dtft launch chars_transformer --hosts 4 --spares 2
    dtft launch chars_transformer --hosts 4 --spares 1 \\
        --mesh.fsdp 1 --mesh.replica 2 --mesh.stage 2

With fsdp=4 no host has the whole state, so only the memory tier makes it survive one.
The last command has two stages, each with half of the layers, in two replicas.
Expect a test loss of about 2.1 after 200 steps. The text differs between Python's
patch releases, so the last digits do too; its hash is in the resolved config.
"""

from dtft.config import (
    ClusterConfig,
    Experiment,
    MaxAdaBeliefConfig,
    MeshConfig,
    ScheduleConfig,
    StopConfig,
)
from dtft.data import CharsConfig
from dtft.models.base import TransformerConfig


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        name="chars_transformer",
        model=TransformerConfig(context=64, num_layers=2, width=64, num_heads=4),
        data=CharsConfig(global_batch=32, context=64),
        optim=MaxAdaBeliefConfig(
            learning_rate=3e-3,
            clip=1.0,
            schedule=ScheduleConfig(
                kind="warmup_cosine", warmup_steps=20, decay_steps=200
            ),
        ),
        mesh=MeshConfig(replica=1, fsdp=4),
        cluster=ClusterConfig(hosts=4),
        stop=StopConfig(steps=200),
    )
