"""Image folders: the same bytes for a row whoever reads it, and clear errors."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dtft.config.loading import ConfigError, parse_experiment, shape_relevant, to_json
from dtft.data.images import (
    AREA,
    ImageFolderConfig,
    SyntheticImagesConfig,
    centre_box,
    random_box,
)
from dtft.data.rows import Source, make_datasets, rows_of
from dtft.models.base import ResNetConfig
from tests.support.pictures import COLOURS, make_folder


@pytest.fixture(scope="module", name="folder")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"))


def _config(folder: Path, threads: int = 3) -> ImageFolderConfig:
    return ImageFolderConfig(
        path=str(folder), global_batch=12, image_size=16, threads=threads
    )


def _train(folder: Path, seed: int = 0, threads: int = 3) -> Source:
    return make_datasets(_config(folder, threads), seed).train


def test_a_row_has_the_same_bytes_whoever_reads_it(folder: Path) -> None:
    whole = _train(folder).batch(rows_of(2, 0, 1, 12))
    assert whole["image"].shape == (12, 16, 16, 3)
    assert whole["image"].dtype == np.uint8 and whole["label"].dtype == np.int32
    for slots in (2, 3, 4):
        sources = [_train(folder, threads=slots) for _ in range(slots)]
        parts = [s.batch(rows_of(2, i, slots, 12)) for i, s in enumerate(sources)]
        for name, column in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            assert joined.tobytes() == column.tobytes()


def test_what_is_read_ahead_is_what_is_read_when_it_is_due(folder: Path) -> None:
    def second_half(step: int) -> range:
        return rows_of(step, 1, 2, 12)

    source = _train(folder)
    assert source.reads_ahead
    ahead = source.batches(second_half, 4, 6)
    for step in (4, 5, 6):
        due, found = source.batch(second_half(step)), next(ahead)
        assert due.keys() == found.keys()
        assert all(np.array_equal(due[name], found[name]) for name in due)
    ahead.close()


def test_an_epoch_has_every_file_once_and_the_next_shows_other_parts(
    folder: Path,
) -> None:
    source = _train(folder)
    assert source.num_samples == 36
    first, second = source.batch(range(36)), source.batch(range(36, 72))
    assert sorted(first["id"]) == sorted(second["id"]) == list(range(36))
    order = [np.argsort(epoch["id"]) for epoch in (first, second)]
    same = [
        np.array_equal(first["image"][a], second["image"][b])
        for a, b in zip(*order, strict=True)
    ]
    assert not any(same)
    np.testing.assert_array_equal(first["label"], first["id"] // 12)
    other = _train(folder, seed=1).batch(range(36))
    assert not np.array_equal(first["id"], other["id"])


def test_colours_are_those_of_the_class(folder: Path) -> None:
    test = make_datasets(_config(folder), 0).test.batch(range(12))
    np.testing.assert_array_equal(test["label"], np.arange(12) // 4)
    colours = np.array(list(COLOURS.values()))[test["label"]]
    means = test["image"].mean((1, 2))
    grey = np.arange(12) % 4 == 1
    assert np.abs(means - colours)[~grey].max() < 25
    assert np.ptp(means[grey], axis=1).max() == 0


def test_evaluation_shows_the_centre_whatever_the_seed(folder: Path) -> None:
    first, second = (make_datasets(_config(folder), s).test for s in (0, 7))
    a, b = first.batch(range(12)), second.batch(range(12))
    assert a["image"].tobytes() == b["image"].tobytes()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
def test_boxes_lie_inside_the_image(width: int, height: int, seed: int) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    for box in (random_box(width, height, random), centre_box(width, height, 0.875)):
        left, upper, right, lower = box
        assert 0 <= left < right <= width and 0 <= upper < lower <= height
    if min(width, height) > 40 and max(width, height) < 4 / 3 * min(width, height):
        left, upper, right, lower = random_box(width, height, random)
        area = (right - left) * (lower - upper) / (width * height)
        assert AREA[0] * 0.9 < area <= 1.0


def test_no_thread_outlives_a_batch(folder: Path) -> None:
    before = set(threading.enumerate())
    _train(folder, threads=4).batch(range(12))
    assert set(threading.enumerate()) <= before


def test_identity_follows_files_and_sizes_not_the_place(tmp_path: Path) -> None:
    same = [make_folder(tmp_path / name, train=2, val=1) for name in "ab"]
    identities = [_config(folder).identity() for folder in same]
    assert identities[0] == identities[1]
    more = make_folder(tmp_path / "more", train=3, val=1)
    assert _config(more).identity() != identities[0]
    longer = make_folder(tmp_path / "longer", train=2, val=1)
    with (longer / "val" / "n02" / "n02_00.JPEG").open("ab") as file:
        file.write(b"0")
    assert _config(longer).identity() != identities[0]
    large = ImageFolderConfig(path=str(same[0]), image_size=32)
    assert large.identity() != identities[0]


def test_a_moved_folder_can_be_resumed(tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        folder = make_folder(tmp_path / name, train=1, val=1)
        arguments = ["--data.path", str(folder), "--data.threads", str(len(texts) + 1)]
        texts.append(to_json(parse_experiment("resnet50_imagenet", arguments)))
    assert texts[0] != texts[1]
    assert shape_relevant(texts[0]) == shape_relevant(texts[1])


def test_no_path_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path is not set.*--data.path PATH"):
        parse_experiment("resnet50_imagenet", [])
    missing = ["--data.path", str(tmp_path / "none")]
    with pytest.raises(ConfigError, match="none/train cannot be listed"):
        parse_experiment("resnet50_imagenet", missing)


def _empty(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)


def _without_images(folder: Path) -> None:
    make_folder(folder, train=1, val=1)
    (folder / "val" / "n02" / "n02_00.JPEG").unlink()


def _one_class_more(folder: Path) -> None:
    make_folder(folder, train=1, val=1)
    (folder / "train" / "n04").mkdir()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_empty, "train holds no class folders. Expected PATH/train/CLASS"),
        (_without_images, r"val/n02 holds no image. Allowed endings: .jpeg"),
        (_one_class_more, "class 'n04' is in train/ but not in val/"),
    ],
)
def test_wrong_folders_are_refused(tmp_path: Path, make: object, text: str) -> None:
    assert callable(make)
    make(tmp_path / "images")
    with pytest.raises(ValueError, match=text):
        make_datasets(_config(tmp_path / "images"), 0)


@pytest.mark.parametrize("keep", [0, 200])
def test_a_broken_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = make_folder(tmp_path / "images", train=2, val=1)
    broken = folder / "train" / "n02" / "n02_00.JPEG"
    broken.write_bytes(broken.read_bytes()[:keep])
    with pytest.raises(ValueError, match="n02_00.JPEG cannot be read as an image"):
        _train(folder).batch(range(6))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_failing_mount_is_not_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = make_folder(tmp_path / "images", train=1, val=1)
    source = _train(folder)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            source.batch(range(3))
    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        _config(folder).check()


def test_an_image_that_vanished_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", train=1, val=1)
    source = _train(folder)
    (folder / "train" / "n02" / "n02_00.JPEG").unlink()
    with pytest.raises(ValueError, match="n02_00.JPEG cannot be read as an image"):
        source.batch(range(3))


def test_an_image_of_one_pixel_is_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", train=1, val=1)
    pixel = Image.new("RGB", (1, 1), (9, 9, 9))
    pixel.save(folder / "train" / "n01" / "n01_00.JPEG")
    batch = _train(folder).batch(range(3))
    assert batch["image"].shape == (3, 16, 16, 3)


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="data.image_size=0 is not positive"):
        ImageFolderConfig(image_size=0)
    with pytest.raises(ValueError, match="data.threads=0 is not positive"):
        ImageFolderConfig(threads=0)
    with pytest.raises(ValueError, match="data.test_share=1.5 is not a share"):
        ImageFolderConfig(test_share=1.5)
    with pytest.raises(ValueError, match="data.num_samples=65537 is too many"):
        SyntheticImagesConfig(num_samples=65537)


def test_synthetic_samples_differ_and_come_again() -> None:
    config = SyntheticImagesConfig(
        global_batch=8, image_size=4, num_samples=500, num_classes=7
    )
    data = make_datasets(config, 0)
    assert (data.train.num_samples, data.test.num_samples) == (500, 8)
    batch, again = (make_datasets(config, 0).train.batch(range(500)) for _ in range(2))
    assert len({image.tobytes() for image in batch["image"]}) == 500
    assert batch["image"].tobytes() == again["image"].tobytes()
    np.testing.assert_array_equal(batch["label"], batch["id"] % 7)
    assert ResNetConfig().num_classes >= SyntheticImagesConfig().count_classes()
