"""ResNet-50 on synthetic images: what a step costs where no file has to be read.

    dtft train resnet50_synthetic

Model, batch and optimizer are those of resnet50_imagenet, on one host, for 100 steps.
The labels are noise: the loss says nothing.
"""

from dtft.config import CheckpointConfig, Experiment, MaxAdaBeliefConfig, StopConfig
from dtft.data import SyntheticImagesConfig
from dtft.models.base import ResNetConfig


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        name="resnet50_synthetic",
        model=ResNetConfig(compute_dtype="bfloat16"),
        data=SyntheticImagesConfig(global_batch=256),
        optim=MaxAdaBeliefConfig(learning_rate=1e-3, weight_decay=1e-2),
        stop=StopConfig(steps=100),
        checkpoint=CheckpointConfig(copies=1, interval=10, storage_interval=0),
    )
