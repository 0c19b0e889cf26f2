"""Datasets written by hand into a folder, and a registry that is as it was when a test is over."""

import pathlib
import textwrap

import pytest
from gymnasium.envs.registration import registry

from tbx_envs.thinkingbox import dataset as datasets

BIKESHOP = pathlib.Path(__file__).parents[3] / "data" / "bikeshop"

AGENT = """
system_instructions: Be kind.
builtin_tools: []
"""
SCENARIO = """
world_state:
  shop: {}
tools: []
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TBX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Nothing is registered at first, and nothing stays."""
    for name in ("_registered", "_owners", "_broken"):
        monkeypatch.setattr(datasets, name, {})
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def written(tmp_path):
    """Writes files of a dataset, dedented; an agent `think` and a scenario `shop` are there unless given.

    Gives the dataset's folder, below a checkout `checkout`.
    """

    def write(files, *, root="checkout/dataset"):
        folder = tmp_path / root
        (folder / "test_case").mkdir(parents=True, exist_ok=True)
        for name, text in {"agent/think.yaml": AGENT, "scenario/shop.yaml": SCENARIO, **files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def bikeshop():
    """The path of our own small checkout, in tests/data."""
    return BIKESHOP
