"""From trajectories to micro-batches: few shapes, no lost token, a function of its inputs alone.

Sequences are grouped longest first and padded to a bucket, so a batch needs one compiled shape for each bucket in use,
and short episodes are not padded to the longest. The grouping changes no result beyond rounding: the loss is a mean
over the batch's trained tokens (`tbx_jax.losses`).

>>> length_buckets(512)
(128, 192, 256, 384, 512)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from tbx_envs.errors import ShapeError
from tbx_jax.shapes import HostOrDevice
from tbx_jax.trajectory import Trajectory

SHORTEST_BUCKET = 128  # below this a compiled shape costs more than the padding it saves


class MicroBatch(NamedTuple):
    """Sequences of one forward and backward pass, padded on the right; padding rows have no trained token.

    Attributes:
        tokens_bt: token ids; 0 on padding, which `loss_mask_bt` excludes.
        loss_mask_bt: True where the policy wrote the token.
        logp_behavior_bt: log-probability (nats) at sampling; 0 elsewhere.
        advantage_b: advantage of each sequence; 0 on padding rows.
    """

    tokens_bt: Int32[HostOrDevice, "b t"]
    loss_mask_bt: Bool[HostOrDevice, "b t"]
    logp_behavior_bt: Float32[HostOrDevice, "b t"]
    advantage_b: Float32[HostOrDevice, "b"]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A global batch: the input of one optimizer step.

    Attributes:
        micro_batches: micro-batches, longest first; all with the same number of rows.
        num_trained: number of tokens the policy wrote, over all micro-batches: the normaliser of the loss.
        num_tokens: number of tokens in the trajectories, without padding.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained: int
    num_tokens: int


def length_buckets(max_length: int) -> tuple[int, ...]:
    """Padded lengths: powers of two and the halves between them; the last one is `max_length` itself."""
    buckets, bucket = [], SHORTEST_BUCKET
    while bucket < max_length:
        buckets.append(bucket)
        is_power = bucket & (bucket - 1) == 0
        bucket = bucket * 3 // 2 if is_power else bucket * 4 // 3
    return (*buckets, max_length)


def build_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | Float32[np.ndarray, "b"],
    *,
    micro_batch: int,
    buckets: Sequence[int],
) -> Batch:
    """Pads and groups trajectories into micro-batches of `micro_batch` rows.

    Args:
        trajectories: trajectories of all groups of an update.
        advantages: advantage of each trajectory, in the same order.
        micro_batch: number of rows of every micro-batch; padding rows fill up the last one.
        buckets: lengths to pad to, ascending.

    Raises:
        ShapeError: a trajectory is longer than the last bucket, or the two sequences differ in length.
    """
    advantage_b = np.asarray(advantages, np.float32)
    if len(trajectories) != len(advantage_b):
        raise ShapeError(
            f"{len(trajectories)} trajectories and {len(advantage_b)} advantages: "
            f"give one advantage for each trajectory."
        )
    longest = max((len(trajectory) for trajectory in trajectories), default=0)
    if longest > buckets[-1]:
        raise ShapeError(
            f"a trajectory has {longest} tokens and the longest bucket {buckets[-1]}; trajectories are never "
            f"truncated. Give buckets up to sampling.max_episode_tokens."
        )
    order = sorted(range(len(trajectories)), key=lambda index: (-len(trajectories[index]), index))
    micro_batches = []
    for start in range(0, len(order), micro_batch):
        rows = order[start : start + micro_batch]
        length = next(bucket for bucket in buckets if bucket >= len(trajectories[rows[0]]))
        micro_batches.append(_padded([trajectories[i] for i in rows], advantage_b[rows], micro_batch, length))
    return Batch(
        micro_batches=tuple(micro_batches),
        num_trained=sum(trajectory.num_trained_tokens for trajectory in trajectories),
        num_tokens=sum(len(trajectory) for trajectory in trajectories),
    )


def _padded(
    trajectories: Sequence[Trajectory], advantages: Float32[np.ndarray, "c"], num_rows: int, length: int
) -> MicroBatch:
    tokens_bt = np.zeros((num_rows, length), np.int32)
    loss_mask_bt = np.zeros((num_rows, length), bool)
    logp_behavior_bt = np.zeros((num_rows, length), np.float32)
    advantage_b = np.zeros(num_rows, np.float32)
    for row, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        tokens_bt[row, : len(trajectory)] = trajectory.tokens_t
        loss_mask_bt[row, : len(trajectory)] = trajectory.loss_mask_t
        logp_behavior_bt[row, : len(trajectory)] = trajectory.logp_behavior_t
        advantage_b[row] = advantage
    return MicroBatch(tokens_bt, loss_mask_bt, logp_behavior_bt, advantage_b)
