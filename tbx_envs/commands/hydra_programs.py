"""Running the subcommands whose arguments are Hydra's: overrides (`tbx evaluate policy=oracle attempts=5`), sweeps
(`-m`), and `--help` for groups and keys."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tbx_envs.commands.config import RENAMED_KEYS, Record, validated, warn_of_key
from tbx_envs.commands.overrides import reworded, sorted_words
from tbx_envs.errors import ConfigError

R = TypeVar("R", bound=Record)

# Hydra writes its records and opens its log before the program can refuse the command: into the folder of another run.
_QUIET = ("hydra.output_subdir=null", "+hydra.job_logging.handlers.file.delay=true")


def run_hydra_program(name: str, record: type[R], program: Callable[[R], Any], arguments: Sequence[str]) -> int:
    """Compose the configuration, validate it, and run the program with it, once for each job of a sweep.

    Args:
        name: configuration in `conf/`, and the subcommand's name.
        record: type that validates the configuration.
        program: function that is called with the record.
        arguments: overrides and options of Hydra.

    Raises:
        ConfigError: the configuration cannot be composed or is not valid.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # otherwise it warns that torch is missing
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    arguments = [quoted(renamed(argument)) for argument in arguments]

    @hydra.main(version_base=None, config_path="pkg://tbx_conf", config_name=name)
    def main(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from tbx_envs.evaluation.provenance import REFUSALS, provenance, remove_traces

        for verbose in ("jax", "absl"):  # they log missing backends and all options of the checkpoint manager
            logging.getLogger(verbose).setLevel(logging.WARNING)
        # Hydra gives each job of a sweep a folder of its own; the program sees only that one.
        output_dir = HydraConfig.get().runtime.output_dir
        try:
            records = _hydra_records(composed)
            composed.output_dir = output_dir
            config = validated(record, composed)
            with provenance(output_dir, config.model_dump(mode="json"), ["tbx", name, *arguments], records):
                program(config)
        except (*REFUSALS, ModuleNotFoundError):
            remove_traces(output_dir)
            hydra_config = HydraConfig.get()
            if hydra_config.mode == RunMode.MULTIRUN:
                _remove_empty_sweep(Path(hydra_config.sweep.dir))
            raise

    options, overrides = sorted_words(name, arguments)
    _refuse_no_folder(name, overrides)
    # Hydra's parser accepts overrides only in one block, and people write `seed=0,1 -m` as well as `-m seed=0,1`.
    sys.argv = [f"tbx {name}", *options, *_QUIET, *overrides, f"hydra.job.name={name}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises errors, so that the command line can word them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(reworded(name, overrides, error)) from error
    return 0


def _refuse_no_folder(name: str, overrides: Sequence[str]) -> None:
    """Refuse an empty output_dir, as a variable without a value gives it: the run would be in the working folder."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if key == "output_dir" and equals and value.strip("'\" ") in ("", "null"):
            raise ConfigError(
                f"tbx {name}: {override} names no folder. Give one (output_dir=. is the working folder), or leave it "
                f"out."
            )


def _hydra_records(composed: Any) -> dict[str, str]:
    """What Hydra would write into `.hydra`: path -> text."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra_config = HydraConfig.get()
    texts = {
        "config": OmegaConf.to_yaml(composed),
        "hydra": OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra_config})),
        "overrides": OmegaConf.to_yaml(hydra_config.overrides.task),
    }
    return {f".hydra/{name}.yaml": text for name, text in texts.items()}


def _remove_empty_sweep(folder: Path) -> None:
    """Remove the folder of a sweep in which no run has begun."""
    from tbx_envs.evaluation.provenance import remove_traces

    if [path.name for path in folder.glob("*")] == ["multirun.yaml"]:
        (folder / "multirun.yaml").unlink()
        remove_traces(folder)


def renamed(argument: str) -> str:
    """An override with the current name of its key; warns (DeprecationWarning) when it had the old one.

    >>> renamed("seed=3")
    'seed=3'
    """
    key = re.match(r"(\+\+|\+|~)?(\w+)(?==|$)", argument)
    if key is None or key[2] not in RENAMED_KEYS:
        return argument
    warn_of_key(key[2])
    return f"{key[1] or ''}{RENAMED_KEYS[key[2]]}{argument[key.end() :]}"


# A pattern with brackets, where Hydra's grammar knows brackets of lists only; and a path with characters that it does
# not know, such as letters with accents. What has a meaning in the grammar is in neither.
_PATTERN = re.compile(r"[\w*?/.:-]+(?:\[[\w!-]+\][\w*?/.:-]*)+")
_PATH = re.compile(r"[^\s'\"\\\[\]{}(),$]*[^\s'\"\\\[\]{}(),$\w./@:%+|?*~-][^\s'\"\\\[\]{}(),$]*", re.ASCII)


def quoted(argument: str) -> str:
    """An override whose value is a word that Hydra's grammar does not know, quoted.

    >>> quoted("tasks=clinic/refill/00[01]"), quoted("seeds=[0,1]"), quoted("output_dir=runs/lr=3")
    ("tasks='clinic/refill/00[01]'", 'seeds=[0,1]', "output_dir='runs/lr=3'")
    """
    key, _, value = argument.partition("=")
    is_word = _PATTERN.fullmatch(value) or _PATH.fullmatch(value)
    return f"{key}='{value}'" if is_word and not key.startswith("-") else argument
