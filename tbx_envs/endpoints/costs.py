"""What served models cost: tokens that servers count, prices that the user gives, and the measures made of both.

What is not known stays unknown: a cost is None when a server counted nothing or no prices were given, never 0.
Tokens are summed as whole numbers; money is made of the sums at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tbx_envs.errors import ConfigError

PER_TOKENS = 1_000_000  # what prices are for

# Who uses served models in an evaluation run -> what its counts in `Episode.usage` begin with.
ROLES = {"policy": "", "user": "user_", "judge": "judge_"}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens as a server counted them; None where it did not say. Adding keeps what is unknown unknown.

    Attributes:
        prompt: given to the model, those from its cache included.
        cached: of these, taken from the server's cache.
        completion: written by the model, its reasoning included.
        reasoning: of these, reasoning.
    """

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            _sum(self.prompt, other.prompt),
            _sum(self.cached, other.cached),
            _sum(self.completion, other.completion),
            _sum(self.reasoning, other.reasoning),
        )


NOTHING_USED = TokenUsage(0, 0, 0, 0)


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """Per million tokens, in whatever currency the user reckons in.

    Attributes:
        input: of prompt tokens that were not cached.
        cached: of prompt tokens from the server's cache.
        output: of completion tokens.

    Raises:
        ConfigError: a price is negative or no number.
    """

    input: float
    cached: float
    output: float

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if not isinstance(value := getattr(self, field.name), int | float) or not 0 <= value < float("inf")
        ]
        if wrong:
            raise ConfigError(f"prices {', '.join(wrong)}: wanted numbers from 0 on, each per million tokens.")


def cost(usage: TokenUsage, prices: Prices | None) -> float | None:
    """What these tokens cost; None when prices, prompt or completion tokens are unknown.

    A server that does not say how much of a prompt was cached is taken to have cached nothing: then the cost is
    an upper bound.
    """
    if prices is None or usage.prompt is None or usage.completion is None:
        return None
    cached = min(usage.cached or 0, usage.prompt)
    millionths = (usage.prompt - cached) * prices.input + cached * prices.cached + usage.completion * prices.output
    return millionths / PER_TOKENS


# --- in an episode's record ---------------------------------------------------------------------------------

_COUNTS = {"prompt": "given_tokens", "cached": "cached_tokens", "completion": "sampled_tokens"}


def usage_counts(usage: TokenUsage, role: str = "policy") -> dict[str, int]:
    """The tokens as counts for `Episode.usage`, named for the role; what is unknown is left out.

    >>> usage_counts(TokenUsage(prompt=900, completion=40), "user")
    {'user_given_tokens': 900, 'user_sampled_tokens': 40}
    """
    known = {name: getattr(usage, field) for field, name in _COUNTS.items()}
    return {ROLES[role] + name: count for name, count in known.items() if count is not None}


def usage_of_counts(counts: Mapping[str, int], role: str = "policy") -> TokenUsage:
    """The tokens of a role that `usage_counts` wrote."""
    return TokenUsage(**{field: counts.get(ROLES[role] + name) for field, name in _COUNTS.items()})


# --- of an evaluation run ------------------------------------------------------------------------------------------


def run_costs(
    rows: Iterable[Mapping[str, Any]], prices: Mapping[str, Prices | None], *, reliable_tasks: int
) -> dict[str, Any]:
    """What an evaluation run cost, for its summary; JSON values.

    Void attempts count: their tokens were paid for. A row may have `void_usage`, the counts of the tries at its
    attempt that were void and made again.

    Args:
        rows: of the run (`tbx_envs.evaluation.files`).
        prices: role -> prices, for each role of `ROLES` that a served model plays; None where they are unknown.
        reliable_tasks: how many tasks passed every attempt (observed n/n).

    Returns:
        `total`, `per_success` (total over passed attempts), `per_reliable_task` (total over `reliable_tasks`), each
        None when unknown or when nothing is there to divide by; and for each role under `roles` its `cost`,
        `given_tokens`, `cached_tokens` and `sampled_tokens`.

    Raises:
        ConfigError: a role that is not in `ROLES`.
    """
    unknown = [role for role in prices if role not in ROLES]
    if unknown:
        raise ConfigError(f"nobody in an evaluation run is called {unknown[0]!r}. Roles: {', '.join(ROLES)}.")
    rows = list(rows)
    roles = {role: _role_costs(rows, role, of_role) for role, of_role in prices.items()}
    of_roles = [role["cost"] for role in roles.values()]
    total = sum(of_roles) if of_roles and None not in of_roles else None
    passed = sum(row["passed"] is True for row in rows)
    return {
        "total": total,
        "per_success": total / passed if total is not None and passed else None,
        "per_reliable_task": total / reliable_tasks if total is not None and reliable_tasks else None,
        "roles": roles,
    }


def _role_costs(rows: list[Mapping[str, Any]], role: str, prices: Prices | None) -> dict[str, Any]:
    used = NOTHING_USED
    for row in rows:
        used += usage_of_counts(row["usage"], role)
        if row.get("void_usage"):
            used += usage_of_counts(row["void_usage"], role)
    tokens = {name: getattr(used, field) for field, name in _COUNTS.items()}
    return {"cost": cost(used, prices), **tokens}
