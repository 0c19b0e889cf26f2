"""Running the subcommands whose arguments are Hydra's: overrides (`tbx evaluate policy=oracle attempts=5`), sweeps
(`-m`), and `--help` for groups and keys."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tbx_envs.commands.config import RENAMED_KEYS, Record, validated, warn_of_key
from tbx_envs.errors import ConfigError

R = TypeVar("R", bound=Record)


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

    arguments = [quoted_pattern(renamed(argument)) for argument in arguments]

    @hydra.main(version_base=None, config_path="pkg://tbx_conf", config_name=name)
    def main(composed: Any) -> None:
        from hydra.core.hydra_config import HydraConfig

        from tbx_envs.evaluation.provenance import provenance

        for verbose in ("jax", "absl"):  # they log missing backends and all options of the checkpoint manager
            logging.getLogger(verbose).setLevel(logging.WARNING)
        # Hydra gives each job of a sweep a folder of its own; the program sees only that one.
        composed.output_dir = output_dir = HydraConfig.get().runtime.output_dir
        config = validated(record, composed)
        with provenance(output_dir, config.model_dump(mode="json"), ["tbx", name, *arguments]):
            program(config)

    overrides = [given for given in arguments if not given.startswith("-") and ("=" in given or given.startswith("~"))]
    options = [given for given in arguments if given not in overrides]
    # Hydra's parser accepts overrides only in one block, and people write `seed=0,1 -m` as well as `-m seed=0,1`.
    sys.argv = [f"tbx {name}", *options, *overrides, f"hydra.job.name={name}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises errors, so that the command line can word them
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"tbx {name} {' '.join(arguments)}: {error}") from error
    return 0


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


def quoted_pattern(argument: str) -> str:
    """An override whose value is a pattern with brackets, quoted: Hydra's grammar knows brackets of lists only.

    >>> quoted_pattern("tasks=clinic/refill/00[01]"), quoted_pattern("seeds=[0,1]")
    ("tasks='clinic/refill/00[01]'", 'seeds=[0,1]')
    """
    key, _, value = argument.partition("=")
    return f"{key}='{value}'" if re.fullmatch(r"[\w*?/.:-]+(?:\[[\w!-]+\][\w*?/.:-]*)+", value) else argument
