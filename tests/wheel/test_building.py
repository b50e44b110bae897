"""What is in the wheel, and that an sdist makes the same one."""

from pathlib import Path

import pytest

from tests.wheel.building import REPOSITORY, build, hashes, unpacked

pytest.importorskip(
    "hatchling", reason="no build backend here: pip install 'dtft[test]'"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkout."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_an_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tmp_path / "sdist")
    tree = unpacked(sdist, tmp_path / "tree")
    again = build("wheel", tmp_path / "again", tree)
    assert again.name == wheel.name
    assert hashes(again) == hashes(wheel)


def test_a_wheel_has_the_package_and_nothing_beside_it(wheel: Path) -> None:
    names = set(hashes(wheel))
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dtft"}
    sources = {
        str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("dtft/**/*.py")
    }
    assert sources <= names and "dtft/py.typed" in names


def test_a_wheel_has_the_named_configs(wheel: Path) -> None:
    named = {
        name.removeprefix("dtft/config/named/")
        for name in hashes(wheel)
        if name.startswith("dtft/config/named/")
    }
    assert named == {path.name for path in (REPOSITORY / "configs").glob("*.py")}
