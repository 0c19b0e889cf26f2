"""ThinkingBox tasks as Gymnasium environments.

Importing this registers one id per frozen task and does nothing else: no task is built, and the database, the
tool protocol and anything of a model are imported when an environment is first made.
"""

from tbx_envs.registration import make, register_built_in
from tbx_envs.version import __version__

register_built_in()

__all__ = ["__version__", "make"]
