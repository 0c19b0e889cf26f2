"""Trajectory: the tokens of one episode, which of them the policy wrote, and their log-probabilities at sampling.

The invariant: these are the ids that were sampled or given, in order. No text is decoded and encoded again, so
`logp_behavior_t[i]` belongs to `tokens_t[i]`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32

from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.errors import ShapeError


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """The learner's view of one clean episode.

    Attributes:
        uid: task id.
        attempt: index of the attempt in its group.
        reward: reward from the check.
        truncated: True when a token limit truncated a turn.
        tokens_t: token ids of the whole episode, prompt included.
        loss_mask_t: True where the policy wrote the token; only these are trained on.
        logp_behavior_t: log-probability (nats) under the parameters that sampled the token; 0 for other tokens.
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
                f"{len(self.loss_mask_t)} mask entries and {len(self.logp_behavior_t)} "
                f"log-probabilities; all three must have the same length. Fill them from one TokenLedger."
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
