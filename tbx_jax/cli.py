"""`tbx`, the one command. Each subcommand imports what it needs when it runs: `tbx tasks` never waits for
JAX.

`train`, `evaluate`, `pool`, `warmstart` and `demo` are Hydra programs: their arguments are overrides
(`tbx evaluate policy=oracle attempts=5`), `-m` sweeps, `--help` shows groups and keys. The others are plain.

What tbx raises on purpose is printed as one message and ends with exit code 2; `TBX_TRACEBACK=1` shows where
it came from.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.errors import TbxError
from tbx_envs.version import __version__

Arguments = Sequence[str]


def main(arguments: Arguments | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from tbx_envs.errors import did_you_mean

        print(f"tbx: unknown command '{name}'.{did_you_mean(name, COMMANDS)}\n\n{_help()}", file=sys.stderr)
        return 2
    return _guarded(lambda: COMMANDS[name][1](rest))


def _guarded(command: Callable[[], int | None]) -> int:
    """The process boundary: errors of ours become one message."""
    try:
        return command() or 0
    except TbxError as error:
        if os.environ.get("TBX_TRACEBACK"):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command with the same output_dir goes on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tbx tasks list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {sentence}" for name, (sentence, _) in COMMANDS.items()]
    return "\n".join(
        [
            "tbx: ThinkingBox tasks as environments, and a policy made repeatable on them.",
            "",
            "usage: tbx COMMAND [arguments]        tbx COMMAND --help says more",
            "",
            *lines,
            "",
            "examples:",
            "  tbx tasks list heldout",
            "  tbx evaluate policy=scripted lapse=0.3 tasks='clinic/*' attempts=5 output_dir=runs/scripted",
            "  tbx report runs/scripted",
            "  tbx train -m optim.learning_rate=1e-4,3e-4",
        ]
    )


def _hydra(name: str, record_name: str, run: str) -> Callable[[Arguments], int]:
    """A subcommand whose arguments are Hydra's.

    Args:
        name: of the configuration in `conf/`.
        record_name: of the record in `tbx_jax.config` that validates it.
        run: `module:function` of the program.
    """

    def command(rest: Arguments) -> int:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it announces that torch is missing
        import logging

        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        import tbx_jax.config
        from tbx_envs.errors import ConfigError

        @hydra.main(version_base=None, config_path="pkg://tbx_conf", config_name=name)
        def program(composed: Any) -> None:
            from hydra.core.hydra_config import HydraConfig

            from tbx_envs.provenance import provenance

            for chatty in ("jax", "absl"):  # backends that are missing; every option of the checkpoint manager
                logging.getLogger(chatty).setLevel(logging.WARNING)
            # Hydra gives each run of a sweep a folder of its own; the program knows only that one.
            composed.output_dir = HydraConfig.get().runtime.output_dir
            config = tbx_jax.config.validated(getattr(tbx_jax.config, record_name), composed)
            with provenance(config.output_dir, config.model_dump(mode="json"), ["tbx", name, *rest]):
                _imported(run)(config)

        overrides = [given for given in rest if not given.startswith("-") and ("=" in given or given.startswith("~"))]
        options = [given for given in rest if given not in overrides]
        # Hydra's parser takes overrides in one piece only, and people write `seed=0,1 -m` as well as `-m seed=0,1`.
        sys.argv = [f"tbx {name}", *options, *overrides, f"hydra.job.name={name}"]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors come out, so that `main` words them
        try:
            program()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"tbx {name} {' '.join(rest)}: {error}") from error
        return 0

    return command


def _program(run: str) -> Callable[[Arguments], int]:
    """A subcommand that reads its own arguments: `module:function`, given them, gives the exit code."""
    return lambda rest: _imported(run)(rest)


def _imported(place: str) -> Callable[..., Any]:
    import importlib

    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _tasks(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx tasks", description="Look at tasks.")
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="uids, one a line: a file of them is a list that `tasks=` takes")
    selection = "all, train, heldout, datasets, a name, a uid, a pattern, a file"
    listing.add_argument("selection", nargs="?", default="all", help=selection)
    listing.add_argument("--long", action="store_true", help="with split and the user's first message")
    show = actions.add_parser("show", help="everything about one task")
    show.add_argument("uid")
    validate = actions.add_parser("validate", help="prove a domain's tasks, or build all tasks of a dataset")
    validate.add_argument("name", nargs="?", default="clinic", help="a domain, a registered dataset or a path")
    given = parser.parse_args(rest)
    from tbx_jax import task_commands

    match given.action:
        case "list":
            task_commands.list_tasks(given.selection, given.long)
        case "show":
            task_commands.show_task(given.uid)
        case _:
            task_commands.validate(given.name)


def _play(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx play", description="Be the agent of one episode, in the terminal.")
    parser.add_argument("task", help="a uid such as clinic/cancel_visit/000, or a Gymnasium id")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated user's wording")
    given = parser.parse_args(rest)
    from tbx_envs.env import ToolEnv
    from tbx_envs.play import play
    from tbx_envs.registration import uid_of

    env = ToolEnv(uid_of(given.task))
    try:
        play(env, given.seed, read=lambda: input("you> "), write=print)
    finally:
        env.close()


def _report(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx report", description="The measures of a campaign, finished or not.")
    parser.add_argument("folder", help="output_dir of `tbx evaluate` or `tbx pool`")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args(rest)
    from tbx_envs import report
    from tbx_envs.pool import load_pool

    summary = report.campaign_summary(given.folder)
    if given.json:
        print(report.as_json(summary))
        return
    report.print_campaign(summary, summary["k"], title=f"policy {summary['policy']}, {given.folder}")
    pool_path = Path(given.folder) / "pool.json"
    if pool_path.is_file():
        report.print_pool(load_pool(pool_path))


def _compare(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx compare", description="Two campaigns side by side, paired by task.")
    parser.add_argument("first", help="output_dir of the campaign to compare with")
    parser.add_argument("second", help="output_dir of the other one")
    given = parser.parse_args(rest)
    from tbx_envs.compare import compare_folders
    from tbx_envs.report import print_comparison

    print_comparison(compare_folders(given.first, given.second), (given.first, given.second))


def _export(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx export", description="Write a policy as a folder that other programs load.")
    parser.add_argument("policy", help="a policy's folder, or a name: smollm2, org/name of the Hugging Face Hub")
    parser.add_argument("folder", help="to write; a policy that is there is replaced")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the tensors; as they are by default")
    parser.add_argument(
        "--chat-template",
        choices=("tools", "compact"),
        help="in place of the policy's own, for models that were taught ChatML: with tools, or turns alone (no rules, "
        "no tools: for a small model that is trained on one domain)",
    )
    given = parser.parse_args(rest)
    from tbx_jax.weights import export_policy

    print(export_policy(given.policy, given.folder, dtype=given.dtype, chat_template=given.chat_template))


def _show(rest: Arguments) -> None:
    parser = argparse.ArgumentParser("tbx show", description="Transcripts of a campaign.")
    parser.add_argument("folder", help="output_dir of `tbx evaluate` or `tbx pool`")
    parser.add_argument("--uid", help="only this task")
    parser.add_argument("--attempt", type=int, help="only this attempt")
    parser.add_argument("--outcome", choices=("passed", "failed", "void"), help="only episodes that ended so")
    parser.add_argument("--system", action="store_true", help="with the policy that the agent was given")
    given = parser.parse_args(rest)
    from tbx_jax import task_commands

    task_commands.show_episodes(Path(given.folder), given.uid, given.attempt, given.outcome, given.system)


COMMANDS: dict[str, tuple[str, Callable[[Arguments], int | None]]] = {
    "tasks": ("list tasks, show one, validate a domain", _tasks),
    "play": ("be the agent of one task, in the terminal", _play),
    "evaluate": (
        "repeat tasks for a policy; one row of JSON an attempt",
        _hydra("evaluate", "EvaluateConfig", "tbx_jax.evaluation:run_evaluation"),
    ),
    "pool": (
        "choose the tasks worth training on, and freeze them",
        _hydra("pool", "PoolConfig", "tbx_jax.evaluation:run_pool"),
    ),
    "train": ("GRPO on a pool of tasks", _hydra("train", "TrainConfig", "tbx_jax.train:run")),
    "warmstart": (
        "make the shipped policy: tokenizer, demonstrations, supervised training",
        _hydra("warmstart", "WarmstartConfig", "tbx_jax.warmstart:run"),
    ),
    "demo": (
        "evaluate, choose a pool, train, evaluate again",
        _hydra("demo", "DemoConfig", "tbx_jax.demo:run"),
    ),
    "export": ("write a policy as a folder that other programs load", _export),
    "serve-policy": ("a policy as an OpenAI-compatible chat endpoint", _program("tbx_jax.policy_server:main")),
    "serve": ("answer the original's HTTP session API, on our server pool", _program("tbx_envs.serving.serve:main")),
    "report": ("the measures of a campaign", _report),
    "compare": ("two campaigns side by side", _compare),
    "show": ("transcripts of a campaign", _show),
}


if __name__ == "__main__":
    sys.exit(main())
