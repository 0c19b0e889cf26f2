"""ThinkingBox tasks as Gymnasium environments.

Importing this registers one id per frozen task, and one per task of the datasets that `TBX_DATASETS` names, and does
nothing else: no task is built, and the database, the tool protocol and anything of a model are imported when an
environment is first made.
"""

import os
from typing import Any

from tbx_envs.registration import make, register_built_in
from tbx_envs.version import __version__

register_built_in()
if os.environ.get("TBX_DATASETS"):
    from tbx_envs.thinkingbox.dataset import register_from_environment

    register_from_environment()


def __getattr__(name: str) -> Any:
    if name == "register_dataset":
        from tbx_envs.thinkingbox.dataset import register_dataset

        return register_dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["__version__", "make", "register_dataset"]
