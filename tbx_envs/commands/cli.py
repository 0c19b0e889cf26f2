"""`tbx`, the one command. Each subcommand imports what it needs when it runs: `tbx tasks` never imports JAX.

Subcommands are entry points of the group `tbx.commands`, each a `Command` or a `HydraCommand`. So the ones that need
JAX are in `tbx_jax`, which nothing here imports, and another package can add its own.

Errors that tbx raises on purpose are printed as one message and end with exit code 2; `TBX_TRACEBACK=1` shows the
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

from tbx_envs.command_line import refuse_dashes
from tbx_envs.commands.command import BrokenCommand, Command, HydraCommand
from tbx_envs.doors import words_of
from tbx_envs.errors import ConfigError, StorageError, TbxError, did_you_mean
from tbx_envs.rendering import visible
from tbx_envs.version import DISTRIBUTION, __version__

GROUP = "tbx.commands"
RENAMED_COMMANDS = {"warmstart": "sft"}  # the old name still works, with a warning, until version 0.3
# Top-level module -> the extra that installs it.
_EXTRA_OF = {
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "ml_dtypes"), "jax"),
    **dict.fromkeys(("transformers", "tokenizers", "safetensors", "huggingface_hub"), "jax"),
    "gguf": "smollm2",
    "matplotlib": "demo",
}
# Errors of the operating system that are about a file or folder which a person named, or about the room for it.
_OF_FILES = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a message may have what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else list(arguments)
    with _warnings_for_people():
        return _guarded(lambda: _run(words), words[0] if words else "")


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name in RENAMED_COMMANDS:
        new = RENAMED_COMMANDS[name]
        said = f"`tbx {name}` is now called `tbx {new}`; the old name works until tbx 0.3."
        warnings.warn(said, DeprecationWarning, stacklevel=1)
        name = new
    if not commands():
        print(f"tbx: {DISTRIBUTION} is not installed, only found. Run: pip install '{DISTRIBUTION}'", file=sys.stderr)
        return 2
    if name not in commands():
        print(f"tbx: unknown command '{name}'.{did_you_mean(name, commands())}\n\n{_help()}", file=sys.stderr)
        return 2
    refuse_dashes(f"tbx {name}", rest)
    return commands()[name].run(rest)


@contextlib.contextmanager
def _warnings_for_people() -> Iterator[None]:
    """Python hides deprecations by default, but on a command line they concern the person who types: a line each."""
    if sys.warnoptions:  # the person has said what to do with warnings
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=DeprecationWarning, module=r"tbx_envs\.commands")
        formatted = warnings.formatwarning
        warnings.formatwarning = lambda message, category, *rest: f"{category.__name__}: {message}\n"
        try:
            yield
        finally:
            warnings.formatwarning = formatted


@functools.cache
def commands() -> Mapping[str, Command | HydraCommand | BrokenCommand]:
    """Name -> subcommand, of all installed packages; of two with one name ours is taken."""
    found: dict[str, Command | HydraCommand | BrokenCommand] = {}
    points = importlib.metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: point.dist is None or point.dist.name != DISTRIBUTION):
        if point.name not in found:
            found[point.name] = _loaded(point)
    return dict(sorted(found.items()))


def _loaded(point: importlib.metadata.EntryPoint) -> Command | HydraCommand | BrokenCommand:
    try:
        command: Command | HydraCommand = point.load()
    except Exception as error:  # the boundary of another package: its fault must not take our commands away
        package = "a package" if point.dist is None else point.dist.name
        return BrokenCommand(f"cannot be loaded from {package}: {words_of(error)}")
    return command


def _guarded(command: Callable[[], int], name: str) -> int:
    """The process boundary: exceptions of tbx, and files that cannot be used, become one message and an exit code."""
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is told here, not when Python ends
        return code
    except TbxError as error:
        if os.environ.get("TBX_TRACEBACK"):
            raise
        _say(error)
        return 2
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None or os.environ.get("TBX_TRACEBACK"):
            raise
        missing = ConfigError(
            f"tbx {name} needs {error.name}, which is not installed. Run: pip install '{DISTRIBUTION}[{extra}]'"
        )
        _say(missing)
        return 2
    except KeyboardInterrupt:
        resumes = getattr(commands().get(RENAMED_COMMANDS.get(name, name)), "resumes", False)
        how = "; the same command with the same output_dir resumes from here" if resumes else ""
        print(f"interrupted{how}.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tbx tasks list | head`
        _write_no_more()
        return 0
    except OSError as error:
        if error.errno not in _OF_FILES or os.environ.get("TBX_TRACEBACK"):
            raise
        _write_no_more()
        place = "the output, or a file," if error.filename is None else error.filename
        failure = StorageError(
            f"{place} cannot be read or written: {error.strerror}. Give another file or folder, or make room or "
            f"change the permissions there. (TBX_TRACEBACK=1 shows where it was used.)"
        )
        _say(failure)
        return 2


def _say(error: Exception) -> None:
    """Print an error's message, in which other parties may have a part, where people look for it."""
    print(visible(f"{type(error).__name__}: {error}"), file=sys.stderr)


def _write_no_more() -> None:
    """Let what is still buffered for an output that takes nothing more go nowhere."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _help() -> str:
    width = max(map(len, commands()), default=0)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands().items()]
    return "\n".join(
        [
            "tbx: ThinkingBox tasks as environments, and a policy made repeatable on them.",
            "",
            "usage: tbx COMMAND [arguments]        tbx COMMAND --help shows its arguments",
            "",
            *lines,
            "",
            "examples:",
            "  tbx tasks list heldout",
            "  tbx evaluate policy=scripted error_rate=0.3 tasks='clinic/*' attempts=5 output_dir=runs/scripted",
            "  tbx report runs/scripted",
            "  tbx train -m optim.learning_rate=1e-4,3e-4",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
