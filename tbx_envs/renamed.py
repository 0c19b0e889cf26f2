"""Import paths that the README of tbx 0.1 showed: they work until version 0.3, with a DeprecationWarning.

An old module is made when it is imported and holds only its old names. New code imports from `tbx_envs` itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

# Old module -> old name -> where it is now.
MODULES: dict[str, dict[str, str]] = {
    "tbx_envs.evaluate": {
        "run_campaign": "tbx_envs.evaluation.run:run",
        "summarize": "tbx_envs.evaluation.run:summarize",
    },
    "tbx_envs.policies": {
        "Attempt": "tbx_envs.agents:Attempt",
        "Opening": "tbx_envs.agents:Opening",
        "Player": "tbx_envs.agents:Agent",
    },
    "tbx_envs.policies.turns": {"play_turns": "tbx_envs.agents.turns:play_turns"},
    "tbx_envs.task_lists": {
        "find_task": "tbx_envs.sources:find_task",
        "select_tasks": "tbx_envs.evaluation.task_lists:select_tasks",
    },
}


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "tbx_envs.policies")

    def exec_module(self, module: types.ModuleType) -> None:
        names = []
        for old, place in MODULES[module.__name__].items():
            new_module, _, name = place.partition(":")
            setattr(module, old, getattr(importlib.import_module(new_module), name))
            names.append(old if old == name else f"{old}, now {name}")
        warnings.warn(
            f"{module.__name__} ({'; '.join(names)}) has moved: import from tbx_envs. "
            f"The old path works until tbx 0.3.",
            DeprecationWarning,
            stacklevel=2,  # the import statement: frames of importlib are not counted
        )


def install() -> None:
    """Make the old paths importable. They are looked up last, after all real modules."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
