"""A tiny policy on disk, and a compilation cache that is the tests' own."""

import pytest
import tiny_policy


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_policy.save_tiny(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="session", autouse=True)
def own_compilation_cache(tmp_path_factory):
    """Programs under test keep compiled code in the user's cache folder; the tests leave that one alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
