"""The persistent compilation cache."""

import pathlib

import jax
import pytest

from tbx_jax.compilation import enable_compilation_cache


@pytest.fixture(autouse=True)
def settings_of_before():
    """The cache is a setting of the process; the next test must not inherit it."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_code_is_kept_in_the_given_folder(tmp_path):
    folder = enable_compilation_cache(tmp_path / "code")
    assert folder.is_dir() and pathlib.Path(jax.config.jax_compilation_cache_dir) == folder


def test_without_a_folder_it_is_kept_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert enable_compilation_cache() == tmp_path / "tbx" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert enable_compilation_cache() == tmp_path / "home" / ".cache" / "tbx" / "xla"
