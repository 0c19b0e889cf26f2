"""Trajectory: the tokens of one episode, who wrote them, and how probable they were when they were sampled.

The one invariant: these are the very ids that were sampled or given, in order. Nothing here was decoded and
encoded again, so `logp_behavior_t[i]` belongs to `tokens_t[i]` and to no other token.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32

from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.errors import ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """What the learner reads of one clean episode.

    Attributes:
        uid: of the task.
        attempt: number of the attempt within its group.
        reward: by the check.
        truncated: a turn was cut off by a token limit.
        tokens_t: ids of the whole episode, prompt included.
        loss_mask_t: True where the policy wrote the token; only these are trained.
        logp_behavior_t: log-probability (nats) under the parameters that sampled the token; 0 where not
            written.
    """

    uid: str
    attempt: int
    reward: float
    truncated: bool
    tokens_t: Int32[np.ndarray, "t"]
    loss_mask_t: Bool[np.ndarray, "t"]
    logp_behavior_t: Float32[np.ndarray, "t"]

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_t), len(self.loss_mask_t), len(self.logp_behavior_t)}
        if len(lengths) != 1:
            raise ShapeError(
                f"trajectory of {self.uid}, attempt {self.attempt}: {len(self.tokens_t)} tokens, "
                f"{len(self.loss_mask_t)} marks of who wrote them and {len(self.logp_behavior_t)} "
                f"log-probabilities; all three must be as many. Fill them from one TokenLedger."
            )

    def __len__(self) -> int:
        return len(self.tokens_t)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask_t.sum())


def trajectory_of(ledger: TokenLedger, *, uid: str, attempt: int, reward: float, truncated: bool) -> Trajectory:
    """The trajectory of a finished, clean episode."""
    return Trajectory(
        uid=uid,
        attempt=attempt,
        reward=reward,
        truncated=truncated,
        tokens_t=np.asarray(ledger.tokens, np.int32),
        loss_mask_t=np.asarray(ledger.wrote, bool),
        logp_behavior_t=np.asarray(ledger.logps, np.float32),
    )
