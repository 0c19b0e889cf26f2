"""Subcommands of `tbx` as records. An entry point of the group `tbx.commands` names a `Command` or a `HydraCommand`.

Neither imports its program before it runs, since `tbx --help` loads all commands.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

from tbx_envs.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A subcommand that reads its own arguments.

    Attributes:
        summary: one line for `tbx --help`.
        program: `module:function`, called with the arguments after the subcommand's name; it returns the exit code, or
            None for 0.
    """

    summary: str
    program: str
    resumes: ClassVar[bool] = False

    def run(self, arguments: Sequence[str]) -> int:
        return imported(self.program)(arguments) or 0


@dataclasses.dataclass(frozen=True, slots=True)
class HydraCommand:
    """A subcommand whose arguments are overrides of a configuration.

    Attributes:
        summary: one line for `tbx --help`.
        config_name: configuration in `conf/`, and the subcommand's name.
        record: `module:class` of the record that validates the configuration.
        program: `module:function`, called with the record.
        resumes: True when the same command goes on where it was interrupted.
    """

    summary: str
    config_name: str
    record: str
    program: str
    resumes: bool = True

    def run(self, arguments: Sequence[str]) -> int:
        from tbx_envs.commands.hydra_programs import run_hydra_program

        return run_hydra_program(
            self.config_name, imported(self.record), lambda config: imported(self.program)(config), arguments
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenCommand:
    """A subcommand of a package that cannot be loaded.

    Attributes:
        summary: the reason.
    """

    summary: str

    def run(self, arguments: Sequence[str]) -> int:
        raise ConfigError(f"this subcommand {self.summary}. Update or remove that package.")


def imported(place: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
