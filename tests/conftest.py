"""Several virtual CPU devices, set before anything imports JAX, so that sharding is testable everywhere; how XLA
compiles; which tests may run side by side; and our small dataset.
"""

import gc
import importlib.metadata
import os
import pathlib

import pytest

# Most of the suite is compilation of programs that run once. Code that is made quickly is the same program to the
# tests; `TBX_TEST_XLA=full` compiles as users do (`make test XLA=full`), and so does `test_optimized_code.py`.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    QUICK += (
        " --xla_cpu_use_fusion_emitters=false"  # later ones know no such flag, and XLA ends a process that gives one
    )
COMPILATION = {"quick": QUICK, "full": ""}[os.environ.get("TBX_TEST_XLA", "quick")]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{given} {COMPILATION} --xla_force_host_platform_device_count=8"

HERE = pathlib.Path(__file__).parent
# Files and folders whose tests may meet a search service: servers of datasets know it by a fixed port. Its users share
# it, also those in other processes; here they stay together because some tests count what is left.
EPISODES_OF_DATASETS = (
    *("tbx_envs/thinkingbox", "tbx_envs/commands/test_tasks.py", "tbx_envs/test_registration.py"),
    *("tbx_jax/test_benchmark_marks.py", "tbx_jax/test_interrupts.py"),
)
# Groups that take longest, in this order, so that no worker is left with one at the end.
LONGEST_FIRST = ("episodes", "test_sampler", "test_train", "test_config_arrives", "test_domain_contract", "test_cli")


def group_of(path: pathlib.Path) -> str:
    """The tests that stay in one process with those of this file: of most files only their own."""
    place = path.relative_to(HERE)
    return "episodes" if any(place.is_relative_to(there) for there in EPISODES_OF_DATASETS) else path.stem


def pytest_configure(config):
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False  # by numbers of tests, which says little about how long they take


def pytest_collection_modifyitems(items):
    """The groups that take longest come first."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(group_of(item.path), len(order)))


def pytest_collection_finish():
    """What was imported stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(optionalhook=True)  # one of xdist
def pytest_xdist_make_scheduler(config, log):
    """Several processes (`pytest -n 2`) share the tests by groups, each group whole in one of them.

    Not by xdist's own marks: with pytest 9.2 they have no effect, since it writes them into an attribute of test ids
    that is gone.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log)


@pytest.fixture(autouse=True)
def search_service_in_its_group_only(request, monkeypatch):
    """Says so where a test opens the search service beside the tests that have its port."""
    if group_of(request.path) == "episodes":
        return
    from tbx_envs.thinkingbox.search import search_service

    def refuse(*arguments, **options):
        pytest.fail(f"{request.path} opens the search service: add it to EPISODES_OF_DATASETS in tests/conftest.py")

    monkeypatch.setattr(search_service, "ensure_search_service", refuse)


@pytest.fixture(autouse=True)
def registered_for_this_test_alone(monkeypatch):
    """What a test registers is told to the processes that it starts, and not to those of other tests."""
    monkeypatch.setenv("TBX_REGISTERED_DATASETS", "")


@pytest.fixture
def bikeshop(monkeypatch):
    """Our small dataset, registered, as if one task of it were of the benchmark: the path of its checkout."""
    from gymnasium.envs.registration import registry

    from tbx_envs.thinkingbox import dataset as datasets
    from tbx_envs.thinkingbox.dataset import benchmark

    for name in ("_registered", "_owners", "_broken", "_given"):
        monkeypatch.setattr(datasets, name, {})
    before = dict(registry)
    keys = benchmark.parse_lock("rentals_main.py:test_end_rental - - -\n")
    monkeypatch.setattr("tbx_envs.thinkingbox.dataset.assembly.benchmark_keys", lambda: keys)
    path = HERE / "data" / "bikeshop"
    datasets.register_dataset(path)
    yield path
    registry.clear()
    registry.update(before)
