"""ResNet-50, whose parameters are divided over two hosts, on image files loses one."""

import pytest

from tests.support.harness import drill, is_rung
from tests.support.pictures import make_folder

pytestmark = [
    pytest.mark.drill,
    pytest.mark.drill_all,
    pytest.mark.timeout(450),
]


def test_a_lost_host_is_replaced_from_memory(tmp_path):
    folder = make_folder(tmp_path / "images")
    record = drill(
        *(tmp_path, "resnet50_imagenet", "--hosts", "2", "--spares", "1"),
        *("--mesh.fsdp", "2", "--mesh.replica", "1", "--stop.steps", "12"),
        *("--data.path", str(folder), "--data.image_size", "32"),
        *("--data.global_batch", "8", "--data.threads", "2"),
        *("--model.num_classes", "3", "--model.compute_dtype", "float32"),
        *("--optim.schedule.warmup_steps", "2", "--optim.schedule.decay_steps", "12"),
        *("--checkpoint.interval", "2", "--checkpoint.storage_interval", "0"),
        *("--fault", "kill-host:1@7"),
    )
    (recovery,) = record["recoveries"]
    assert is_rung(recovery, 2) and recovery["bytes_from_storage"] == 0
    assert recovery["bytes_from_peers"] > 100e6  # half of the state at least
    assert record["final_step"] == 12
