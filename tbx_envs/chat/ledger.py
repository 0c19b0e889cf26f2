"""TokenLedger: the tokens of one episode, each with its author and its log-probability.

Sampled tokens stay exactly as sampled: nothing is decoded and encoded again, so a log-probability always belongs to
its own token. The ledger is append-only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tbx_envs.errors import PolicyFault, ShapeError


class TokenLedger:
    """Append-only record of (token, did the policy write it, log-probability)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._wrote: list[bool] = []
        self._logps: list[float] = []

    def give(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads: prompt, tool results, the user's words, separators."""
        self._tokens.extend(ids)
        self._wrote.extend([False] * len(ids))
        self._logps.extend([0.0] * len(ids))

    def write(self, ids: Sequence[int], logps: Sequence[float]) -> None:
        """Append tokens that the policy sampled, its end-of-turn token included.

        Args:
            ids: sampled tokens.
            logps: natural log-probability of each token under the distribution it was drawn from.

        Raises:
            ShapeError: the number of log-probabilities differs from the number of tokens.
            PolicyFault: a log-probability is not finite: the sampler is broken and the episode void.
        """
        if len(ids) != len(logps):
            raise ShapeError(
                f"{len(ids)} sampled tokens came with {len(logps)} log-probabilities; give one for each token."
            )
        bad = next((place for place, logp in enumerate(logps) if not math.isfinite(logp)), None)
        if bad is not None:
            raise PolicyFault(
                f"token {ids[bad]} was sampled with log-probability {logps[bad]} (token {len(self) + bad} of the "
                f"episode); wanted a finite number. Look for NaN in the parameters or a token outside its mask."
            )
        self._tokens.extend(ids)
        self._wrote.extend([True] * len(ids))
        self._logps.extend(logps)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens as int32, a new array each time."""
        return np.array(self._tokens, np.int32)

    @property
    def wrote(self) -> np.ndarray:
        """True where the policy wrote the token."""
        return np.array(self._wrote, np.bool_)

    @property
    def logps(self) -> np.ndarray:
        """Log-probabilities as float32, in nats; 0.0 where the policy did not write the token."""
        return np.array(self._logps, np.float32)
