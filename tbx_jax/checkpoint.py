"""Checkpoints: everything that a killed run needs to continue exactly.

A checkpoint holds the learner's state, the position in the task plan and the configuration of the run. It is complete
or absent: orbax writes into a temporary folder and renames it. Everything random is a function of (seed, names), so no
generator state is saved. Only this module uses orbax.

Beside its files a checkpoint has their checksums, and is read only if they are still right: a damaged array would be
trained on without a word. Of the two that are kept the older one is taken then, and a remark says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from tbx_envs.errors import CheckpointError, ConfigError, StorageError
from tbx_envs.files import damage, write_checksums
from tbx_jax.learner import LearnerState

# The newest checkpoint and the one before it, in case a disk fails while the newest is written.
_KEPT = 2
# What orbax raises for files of a checkpoint that it cannot read: it has no error of its own.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run: everything in a checkpoint but arrays.

    Attributes:
        step: number of completed steps, skipped updates included.
        position: position in the task plan.
        config: configuration, as plain values.
        tasks: hash of the plan's tasks.
    """

    step: int
    position: int
    config: Mapping[str, Any]
    tasks: str


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        folder: folder of the checkpoints; created if missing. Incomplete checkpoints of a killed run are removed.

    Attributes:
        remarks: sentences for people about checkpoints that were not taken, or could not be checked.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        # Importing orbax configures the root logger, which importing this module must not do.
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self.remarks: list[str] = []
        self._damaged: list[int] = []
        self._progress: Progress | None = None
        try:
            self._progress = self._newest_whole()
        except CheckpointError:
            self.close()
            raise

    @property
    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint, None when there is none."""
        return None if self._progress is None else self._progress.step

    def save(self, state: LearnerState, progress: Progress) -> None:
        """Writes the checkpoint of `progress.step`, complete on return. An existing one is left as it is.

        Raises:
            StorageError: it cannot be written; those before are as they were.
        """
        if self.latest_step == progress.step:
            return
        self._set_damaged_aside()
        step = progress.step
        try:
            self._manager.save(
                step,
                args=self._args.Composite(
                    state=self._args.StandardSave(state), progress=self._args.JsonSave(dataclasses.asdict(progress))
                ),
            )
            write_checksums(self._of(step))
        except (OSError, ValueError, StorageError) as error:  # tensorstore raises ValueError for what the disk said
            with contextlib.suppress(OSError):
                shutil.rmtree(self._of(step), ignore_errors=True)
            self._manager.reload()
            left = f"that of step {self.latest_step} is as it was" if self._progress else "there is none yet"
            raise StorageError(
                f"{self._of(step)}: the checkpoint of step {step} cannot be written: {_first_line(error)}; {left}. "
                f"Make room, then give the same command again: it resumes from the newest checkpoint."
            ) from error
        self._progress = progress

    def read_progress(self) -> Progress | None:
        """Progress of the newest whole checkpoint, None when there is none."""
        return self._progress

    def restore(self, like: LearnerState) -> LearnerState:
        """The newest whole state, placed like `like`. Damaged checkpoints that are newer are set aside.

        Args:
            like: state of the same model and optimizer; only its shapes, types and placement are read.

        Raises:
            CheckpointError: its files are those that were saved, or have no checksums, and it cannot be read.
        """
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        assert self._progress is not None  # as `read_progress` said
        step = self._progress.step
        self._set_damaged_aside()
        try:
            restored = self._manager.restore(
                step, args=self._args.Composite(state=self._args.StandardRestore(abstract))
            )
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{self._of(step)}: the checkpoint cannot be read: {_first_line(error)}. Remove the folder to resume "
                f"from an older one, or choose another output_dir for a new run."
            ) from error
        return restored.state

    def close(self) -> None:
        self._manager.close()

    def _of(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def _newest_whole(self) -> Progress | None:
        """Progress of the newest checkpoint with nothing wrong; says what is wrong with newer ones."""
        problems: list[str] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            wrong, progress = self._examined(step)
            if progress is not None:
                if problems:
                    self.remarks.append(
                        f"damaged: {'; '.join(problems)}. The checkpoint of step {step} is taken instead, and what was "
                        f"damaged is moved to {self._aside(step).parent}"
                    )
                return progress
            self._damaged.append(step)
            problems.append(f"checkpoint of step {step} ({wrong})")
        if problems:
            raise CheckpointError(
                f"{self._folder}: none of the {len(problems)} checkpoints can be used: {'; '.join(problems)}. Restore "
                f"one from a copy, or choose another output_dir for a new run."
            )
        return None

    def _examined(self, step: int) -> tuple[str, Progress | None]:
        """What is wrong with a checkpoint, or its progress."""
        wrong = damage(self._of(step))
        if wrong:
            return _shown(wrong), None
        try:
            args = self._args.Composite(progress=self._args.JsonRestore())
            progress = Progress(**self._manager.restore(step, args=args).progress)
        except _UNREADABLE as error:
            return f"its progress cannot be read: {_first_line(error)}", None
        if progress.step != step:
            return f"its progress is of step {progress.step}", None
        if wrong is None:
            self.remarks.append(f"checkpoint of step {step} has no checksums and is taken as it is")
        return "", progress

    def _set_damaged_aside(self) -> None:
        """Renames damaged checkpoints, since orbax writes none whose step is not above all others."""
        for step in self._damaged:
            aside = self._aside(step)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            self._of(step).rename(aside)
        if self._damaged:
            self._damaged.clear()
            self._manager.reload()

    def _aside(self, step: int) -> pathlib.Path:
        return self._folder.with_name(f"{self._folder.name}-damaged") / str(step)


def _shown(problems: list[str]) -> str:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ", ".join(problems[:3]) + more


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


# Keys that may differ when a run is resumed: none of them changes what an update computes.
_FREE_KEYS = frozenset({"output_dir", "checkpoint_every"})
# Keys that a run of tbx 0.1.0 has no value of, and what such a run may go on with.
_LATER_KEYS = {"user.max_silent_share": 0.1}


def refuse_changed_config(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a run is resumed with the configuration it was started with.

    More `steps` are allowed when the learning rate does not depend on their number.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    was_flat, now_flat = {**_LATER_KEYS, **_flat(was)}, _flat(now)
    changed = [key for key in sorted(was_flat.keys() | now_flat.keys()) if was_flat.get(key) != now_flat.get(key)]
    changed = [key for key in changed if key not in _FREE_KEYS]
    if now_flat.get("optim.schedule") == "constant" and now_flat["steps"] > was_flat["steps"]:
        changed.remove("steps")
    if changed:
        lines = [f"  {key}: was {was_flat.get(key)!r}, now {now_flat.get(key)!r}" for key in changed]
        raise ConfigError(
            f"output_dir holds a run with another configuration; {len(changed)} key(s) differ:\n"
            + "\n".join(lines)
            + "\nGive the same values to resume it (more steps are allowed with a constant schedule), "
            "or another output_dir for a new run."
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
