"""Several virtual CPU devices, set before anything imports JAX, so that sharding is testable everywhere; which tests
may run side by side; and our small dataset.
"""

import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

HERE = pathlib.Path(__file__).parent
# Tests of the trainer that play episodes of a dataset.
PLAY_DATASETS = ("test_benchmark_marks", "test_interrupts", "test_task_commands")


def pytest_collection_modifyitems(config, items):
    """With several workers (`pytest -n 2 --dist loadgroup`) a file's tests stay together, and so do all that may meet a
    search service: servers of datasets know it by a fixed port, and it ends with the process that opened it.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        together = HERE / "tbx_envs" in item.path.parents or item.path.stem in PLAY_DATASETS
        item.add_marker(pytest.mark.xdist_group("episodes" if together else item.path.stem))


@pytest.fixture
def bikeshop(monkeypatch):
    """Our small dataset, registered, as if one task of it were of the benchmark: the path of its checkout."""
    from gymnasium.envs.registration import registry

    from tbx_envs.thinkingbox import dataset as datasets
    from tbx_envs.thinkingbox.dataset import benchmark

    for name in ("_registered", "_owners", "_broken"):
        monkeypatch.setattr(datasets, name, {})
    before = dict(registry)
    keys = benchmark.parse_lock(f"rentals_main.py:test_end_rental {'0' * 64} {'0' * 64}\n")
    monkeypatch.setattr("tbx_envs.thinkingbox.dataset.assembly.benchmark_keys", lambda: keys)
    datasets.register_dataset(HERE / "data" / "bikeshop")
    yield HERE / "data" / "bikeshop"
    registry.clear()
    registry.update(before)
