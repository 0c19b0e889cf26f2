"""Checkpoints: everything a killed run needs to go on as if nothing had happened.

A checkpoint holds the learner's state, the position in the task plan and the configuration it was made with,
and is complete or not there: orbax writes into a temporary folder and renames it. What is random is a
function of (seed, names), so nothing else has to be kept. This is the only file that knows orbax.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from tbx_envs.errors import ConfigError
from tbx_jax.learner import LearnerState

# The newest one and the one before it, in case a disk fails while the newest is written.
_KEPT = 2


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands, beside its arrays.

    Attributes:
        step: updates done, skipped ones included.
        position: in the task plan.
        config: the configuration, as plain values.
        tasks: hash of the tasks that the plan orders.
    """

    step: int
    position: int
    config: Mapping[str, Any]
    tasks: str


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        folder: made when it is not there; incomplete checkpoints of a killed run in it are removed.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        # Importing orbax configures the root logger, which importing this module must not do.
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: LearnerState, progress: Progress) -> None:
        """Writes a checkpoint for `progress.step`; done when this returns. Nothing happens where it
        exists.
        """
        if self.latest_step == progress.step:
            return
        self._manager.save(
            progress.step,
            args=self._args.Composite(
                state=self._args.StandardSave(state), progress=self._args.JsonSave(dataclasses.asdict(progress))
            ),
        )

    def read_progress(self) -> Progress | None:
        """Where the newest checkpoint stands, None when there is none."""
        if self.latest_step is None:
            return None
        restored = self._manager.restore(self.latest_step, args=self._args.Composite(progress=self._args.JsonRestore()))
        return Progress(**restored.progress)

    def restore(self, like: LearnerState) -> LearnerState:
        """The newest state, placed as `like` is placed.

        Args:
            like: a state of the same model and optimizer; only its shapes, types and placement are read.
        """
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        restored = self._manager.restore(
            self.latest_step, args=self._args.Composite(state=self._args.StandardRestore(abstract))
        )
        return restored.state

    def close(self) -> None:
        self._manager.close()


# Keys that may differ when a run goes on: none of them changes what an update computes.
_FREE_KEYS = frozenset({"output_dir", "checkpoint_every"})


def refuse_changed_config(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a run goes on with the configuration it was started with.

    More `steps` are allowed where the learning rate does not depend on their number.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    was_flat, now_flat = _flat(was), _flat(now)
    changed = [key for key in sorted(was_flat.keys() | now_flat.keys()) if was_flat.get(key) != now_flat.get(key)]
    changed = [key for key in changed if key not in _FREE_KEYS]
    if now_flat.get("optim.schedule") == "constant" and now_flat["steps"] > was_flat["steps"]:
        changed.remove("steps")
    if changed:
        lines = [f"  {key}: was {was_flat.get(key)!r}, now {now_flat.get(key)!r}" for key in changed]
        raise ConfigError(
            f"output_dir holds a run with another configuration; {len(changed)} key(s) differ:\n"
            + "\n".join(lines)
            + "\nGive the same values to go on (more steps are allowed with a constant schedule), "
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
