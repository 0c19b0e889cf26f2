"""JAX's persistent compilation cache: compiled programs are kept on disk, so a second run does not compile again."""

from __future__ import annotations

import os
import pathlib

import jax

# Compiling a program of the nano policy takes about a second; a faster one is not worth a file.
_WORTH_KEEPING_S = 0.2


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Keeps compiled programs in `path`; entry points call it, importing does not.

    Args:
        path: folder of the cache; None is `tbx/xla` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`).

    Returns:
        The folder in use.
    """
    if path is None:
        user_cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        path = pathlib.Path(user_cache) / "tbx" / "xla"
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
    return folder
