"""Configuration: what Hydra composes is validated at one boundary, and every message names the key."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException

from tbx_envs.errors import ConfigError
from tbx_jax.config import (
    DemoConfig,
    EvaluateConfig,
    PoolConfig,
    Record,
    SftConfig,
    TrainConfig,
    validated,
)

RECORDS = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "pool": PoolConfig,
    "sft": SftConfig,
    "demo": DemoConfig,
}


def composed(name: str, *overrides: str) -> Record:
    with initialize_config_module("tbx_conf", version_base=None):
        config = compose(name, overrides=list(overrides))
        return validated(RECORDS[name], config)


@pytest.mark.parametrize("name", RECORDS)
def test_the_defaults_of_every_program_validate(name):
    assert isinstance(composed(name, "output_dir=x"), RECORDS[name])


def test_a_misspelt_override_is_refused():
    with pytest.raises(ConfigCompositionException, match="learning_rat"):
        composed("train", "output_dir=x", "optim.learning_rat=1")


def test_every_problem_of_a_configuration_is_reported_with_its_path():
    with pytest.raises(ConfigError) as caught:
        composed("train", "output_dir=x", "algo.group_size=1", "optim.schedule=linear", "+algo.colour=red")
    for path in ("algo.group_size", "optim.schedule", "algo.colour"):
        assert path in str(caught.value)


def test_a_missing_value_is_refused():
    with pytest.raises(ConfigError, match=r"output_dir missing\. Add output_dir="):
        composed("train", "output_dir=???")


def test_records_cannot_be_changed():
    config = composed("train", "output_dir=x")
    with pytest.raises(Exception, match="frozen"):
        config.seed = 1
