"""Options of a pipeline: what fits together, what is refused and how it is said."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.config.experiment import MeshConfig, PipelineConfig
from dtft.config.loading import ConfigError, parse_experiment, refuse_other, to_json
from dtft.parallel.validation import check_experiment, row_parts

STAGES = ["--mesh.fsdp", "1", "--mesh.replica", "2", "--mesh.stage", "2"]
CIRCULAR = ["--pipeline.schedule", "circular", "--pipeline.virtual_stages", "2"]


def _given(*words: str, config: str = "chars_transformer") -> Any:
    return parse_experiment(config, [*STAGES, *words])


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 20))
def test_layers_are_shared_out_evenly(stages: int, chunks: int, more: int) -> None:
    schedule = "circular" if chunks > 1 else "gpipe"
    config = PipelineConfig(schedule=schedule, virtual_stages=chunks)
    found = config.chunks(stages, stages * chunks + more)
    assert len(found) == stages * chunks and sum(found) == len(found) + more
    assert sorted(found, reverse=True) == list(found) and found[0] - found[-1] <= 1


def test_a_config_with_stages_fits() -> None:
    check_experiment(_given())
    check_experiment(_given("--model.num_layers", "5", "--pipeline.layers", "2", "3"))
    experiment = _given("--model.num_layers", "4", *CIRCULAR)
    check_experiment(experiment)
    assert (
        row_parts(experiment) == 4
        and row_parts(parse_experiment("digits_cnn", [])) == 1
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--pipeline.layers", "1", "2"], "(1, 2) does not share out the model's 2"),
        (CIRCULAR, "pipeline.virtual_stages=2 is more than the model's 2 layers"),
        (["--pipeline.microbatches", "3"], "does not divide the 16 rows"),
        (
            ["--model.num_layers", "4", *CIRCULAR, "--pipeline.microbatches", "1"],
            "circular rounds are of so many. Set --pipeline.microbatches 2",
        ),
        (["--mesh.stage", "1"], "mesh replica=2 x stage=1 x fsdp=1 x tensor=1 does"),
        (["--mesh.replica", "1", "--mesh.tensor", "2"], "a stage computes with whole"),
        (
            ["--balance.policy", "exact"],
            "mesh.stage=2 does not go together with",
        ),
        (["--cluster.min_replicas", "3"], "Allowed: 1, 2, or 0"),
    ],
)
def test_what_does_not_fit_is_said(words: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        check_experiment(_given(*words))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("digits_cnn", "the model CNNConfig is not a row of equal layers"),
        ("resnet50_synthetic", "the model ResNetConfig is not a row of equal layers"),
    ],
)
def test_models_without_equal_layers_are_named(config: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}.*such as TransformerConfig"):
        check_experiment(_given("--data.global_batch", "64", config=config), hosts=4)
    for devices in (3, -1):  # said before sizes that do not fit them
        with pytest.raises(ValueError, match=text):
            check_experiment(
                parse_experiment(config, ["--mesh.stage", "2"]),
                devices_per_host=devices,
            )


def test_optimizers_that_look_at_matrices_are_named() -> None:
    sync = ["--optim.sync.moments", "operands"]
    with pytest.raises(ValueError, match="the optimizer MaxAdaBeliefConfig, because"):
        check_experiment(_given(*sync))


def test_contradictions_are_refused() -> None:
    experiment = parse_experiment("chars_transformer", [])
    with pytest.raises(ValueError, match=r"^pipeline\.microbatches=8: no effect"):
        replace(experiment, pipeline=PipelineConfig(microbatches=8))
    with pytest.raises(ValueError, match=r"layers=\(2, 0\) has a chunk without"):
        PipelineConfig(layers=(2, 0))
    with pytest.raises(ValueError, match="'circular' does not go together with"):
        PipelineConfig(schedule="circular")
    with pytest.raises(ValueError, match="Set --pipeline.microbatches to 1 or more"):
        PipelineConfig(microbatches=0)
    with pytest.raises(ValueError, match="mesh.stage=-1: what a stage has decides"):
        MeshConfig(replica=2, stage=-1)


def test_a_run_goes_on_with_the_layers_where_they_were() -> None:
    four = ["--model.num_layers", "4"]
    now = _given(*four)
    saved = to_json(now)
    refuse_other(saved, to_json(_given(*four, "--pipeline.microbatches", "2")), "x")
    refuse_other(saved, to_json(_given(*four, "--mesh.replica", "1")), "x")
    for words, text in (
        (["--pipeline.layers", "1", "3"], r"pipeline.layers: \[\] -> \[1, 3\]"),
        (CIRCULAR, "virtual_stages: 1 -> 2"),
        (["--mesh.stage", "4"], "mesh.stage: 2 -> 4"),
        (["--mesh.stage", "1"], "mesh.stage: 2 -> 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            refuse_other(saved, to_json(_given(*four, *words)), "x")
