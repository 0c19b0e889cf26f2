"""GRPO in JAX on the environments of `tbx_envs`: read `tbx_jax.train` first.

It needs the extra `jax` (`pip install 'tbx-envs[jax]'`). The environments install without it, and this folder with
them: then the few modules that name the commands and their configuration can be imported, and every other one says
what to install.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

WITHOUT_JAX = ("tbx_jax.commands", "tbx_jax.commands.programs", "tbx_jax.config")


class _NeedsJax(importlib.abc.MetaPathFinder):
    """Asked first, so that the message names the extra and not whichever library is imported first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}.") and fullname not in WITHOUT_JAX:
            from tbx_envs.version import DISTRIBUTION

            raise ModuleNotFoundError(
                f"{fullname} needs jax, which is not installed. Run: pip install '{DISTRIBUTION}[jax]'", name="jax"
            )
        return None


if importlib.util.find_spec("jax") is None:
    sys.meta_path.insert(0, _NeedsJax())
