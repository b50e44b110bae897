"""ResNet-50 on a folder in ImageNet's format, data-parallel on eight hosts.

    dtft train  resnet50_imagenet --data.path PATH --cluster.hosts 1
    dtft launch resnet50_imagenet --data.path PATH --hosts 8 --spares 1
    dtft agent  resnet50_imagenet --data.path PATH --store etcd:2379 --job j ...

PATH holds train/CLASS/*.JPEG and val/CLASS/*.JPEG, the same class folders in both, on
every host at the same place. ImageNet's training archive is one archive per class:
unpack each into the folder of its name; sort the validation images by their labels. Any
images in such folders do: `--model.num_classes` is at least the number of folders.

90 epochs are 450,000 steps of 256 rows. The learning rate is 1e-3 per 256 rows with a
decoupled weight decay of 1e-2; for another `--data.global_batch` scale it with the root
of the batch (with the batch itself for SGD: `dtft.config.SGDConfig`, 0.1 per
256 rows). The state is 0.5 GB, so a snapshot is taken every 10 steps: a fault costs at
most that many. `--model.compute_dtype float32` for devices without bfloat16.
"""

from dtft.config import (
    CheckpointConfig,
    ClusterConfig,
    Experiment,
    MaxAdaBeliefConfig,
    ScheduleConfig,
    StopConfig,
)
from dtft.data import ImageFolderConfig
from dtft.models.base import ResNetConfig


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        name="resnet50_imagenet",
        model=ResNetConfig(compute_dtype="bfloat16"),
        data=ImageFolderConfig(global_batch=256),
        optim=MaxAdaBeliefConfig(
            learning_rate=1e-3,
            weight_decay=1e-2,
            schedule=ScheduleConfig(
                kind="warmup_cosine", warmup_steps=25_000, decay_steps=450_000, end=0.0
            ),
        ),
        cluster=ClusterConfig(hosts=8),
        stop=StopConfig(steps=450_000),
        checkpoint=CheckpointConfig(interval=10, storage_interval=5_000),
    )
