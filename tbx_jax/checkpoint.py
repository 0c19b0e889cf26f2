"""Checkpoints: everything that a killed run needs to continue exactly.

A checkpoint holds the learner's state, the position in the task plan and the configuration of the run. It is complete
or absent: orbax writes into a temporary folder and renames it. Everything random is a function of (seed, names), so no
generator state is saved. Only this module uses orbax.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from tbx_envs.errors import ConfigError
from tbx_jax.learner import LearnerState

# The newest checkpoint and the one before it, in case a disk fails while the newest is written.
_KEPT = 2


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
        """Writes the checkpoint of `progress.step`, complete on return. An existing one is left as it is."""
        if self.latest_step == progress.step:
            return
        self._manager.save(
            progress.step,
            args=self._args.Composite(
                state=self._args.StandardSave(state), progress=self._args.JsonSave(dataclasses.asdict(progress))
            ),
        )

    def read_progress(self) -> Progress | None:
        """Progress of the newest checkpoint, None when there is none."""
        if self.latest_step is None:
            return None
        restored = self._manager.restore(self.latest_step, args=self._args.Composite(progress=self._args.JsonRestore()))
        return Progress(**restored.progress)

    def restore(self, like: LearnerState) -> LearnerState:
        """The newest state, placed like `like`.

        Args:
            like: state of the same model and optimizer; only its shapes, types and placement are read.
        """
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        restored = self._manager.restore(
            self.latest_step, args=self._args.Composite(state=self._args.StandardRestore(abstract))
        )
        return restored.state

    def close(self) -> None:
        self._manager.close()


# Keys that may differ when a run is resumed: none of them changes what an update computes.
_FREE_KEYS = frozenset({"output_dir", "checkpoint_every"})


def refuse_changed_config(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a run is resumed with the configuration it was started with.

    More `steps` are allowed when the learning rate does not depend on their number.

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
