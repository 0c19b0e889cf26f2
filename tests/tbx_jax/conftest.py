"""A tiny policy on disk, and a compilation cache that is the tests' own."""

import pathlib

import pytest
import tiny_policy
from gymnasium.envs.registration import registry

from tbx_envs.thinkingbox import dataset as datasets
from tbx_envs.thinkingbox.dataset import benchmark


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_policy.save_tiny(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="session", autouse=True)
def own_compilation_cache(tmp_path_factory):
    """Programs under test keep compiled code in the user's cache folder; the tests leave that one alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def bikeshop(monkeypatch):
    """Our small dataset, registered, as if one task of it were of the benchmark: the path of its checkout."""
    for name in ("_registered", "_owners", "_broken"):
        monkeypatch.setattr(datasets, name, {})
    before = dict(registry)
    keys = benchmark.parse_lock(f"rentals_main.py:test_end_rental {'0' * 64} {'0' * 64}\n")
    monkeypatch.setattr("tbx_envs.thinkingbox.dataset.assembly.benchmark_keys", lambda: keys)
    path = pathlib.Path(__file__).parents[1] / "data" / "bikeshop"
    datasets.register_dataset(path)
    yield path
    registry.clear()
    registry.update(before)
