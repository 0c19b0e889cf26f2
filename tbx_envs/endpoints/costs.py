"""Costs of served models: tokens that servers count, prices that the user gives, and measures computed from both.

Unknown stays unknown: a cost is None, never 0, when a server gave no counts or no prices were given. Tokens are summed
as integers, and costs are computed from the sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt

from tbx_envs.errors import ConfigError

PER_TOKENS = 1_000_000  # number of tokens that a price is for

# Role of a served model in an evaluation run -> prefix of its counts in `Episode.usage`.
ROLES = {"policy": "", "user": "user_", "judge": "judge_"}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a server; None where it gave no count. A sum with an unknown count is unknown.

    Attributes:
        prompt: tokens given to the model, including those from the cache.
        cached: prompt tokens that came from the server's cache.
        completion: tokens that the model wrote, including its reasoning.
        reasoning: completion tokens that are reasoning.
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


Price = Annotated[float, Ge(0.0), Lt(math.inf)]


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """Prices per million tokens, in any one currency.

    Attributes:
        input: price of prompt tokens that were not cached.
        cached: price of prompt tokens from the server's cache.
        output: price of completion tokens.

    Raises:
        ConfigError: a price is negative or not a number.
    """

    # A configuration with another key, or with a price that is none, is refused key by key.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    input: Price
    cached: Price
    output: Price

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if not isinstance(value := getattr(self, field.name), int | float) or not 0 <= value < float("inf")
        ]
        if wrong:
            raise ConfigError(f"prices {', '.join(wrong)}: wanted finite numbers >= 0, each per million tokens.")


def cost(usage: TokenUsage, prices: Prices | None) -> float | None:
    """Cost of these tokens; None when prices, prompt or completion tokens are unknown.

    When the number of cached tokens is unknown it is taken as 0, and the cost is an upper bound.
    """
    if prices is None or usage.prompt is None or usage.completion is None:
        return None
    cached = min(usage.cached or 0, usage.prompt)
    millionths = (usage.prompt - cached) * prices.input + cached * prices.cached + usage.completion * prices.output
    return millionths / PER_TOKENS


# --- in an episode's record ---------------------------------------------------------------------------------

_COUNTS = {"prompt": "given_tokens", "cached": "cached_tokens", "completion": "sampled_tokens"}


def usage_counts(usage: TokenUsage, role: str = "policy") -> dict[str, int]:
    """Counts for `Episode.usage`, with the prefix of the role; unknown counts are left out.

    >>> usage_counts(TokenUsage(prompt=900, completion=40), "user")
    {'user_given_tokens': 900, 'user_sampled_tokens': 40}
    """
    known = {name: getattr(usage, field) for field, name in _COUNTS.items()}
    return {ROLES[role] + name: count for name, count in known.items() if count is not None}


def usage_of_counts(counts: Mapping[str, int], role: str = "policy") -> TokenUsage:
    """Token counts of a role, from counts that `usage_counts` wrote."""
    return TokenUsage(**{field: counts.get(ROLES[role] + name) for field, name in _COUNTS.items()})


# --- of an evaluation run ------------------------------------------------------------------------------------------


def run_costs(
    rows: Iterable[Mapping[str, Any]],
    prices: Mapping[str, Prices | None],
    *,
    reliable_tasks: int | None,
    spent: Mapping[str, TokenUsage] | None = None,
) -> dict[str, Any]:
    """Costs of an evaluation run, for its summary; JSON values.

    Void attempts count, since their tokens were paid for. A row may have `void_usage`: counts of void tries that were
    repeated. An interrupted run has also paid for attempts that no row has: `spent` knows these.

    Args:
        rows: rows of the run (`tbx_envs.evaluation.files`).
        prices: role -> prices, for each role of `ROLES` that is a served model; None where they are unknown.
        reliable_tasks: number of tasks that passed every attempt (observed n/n); None where it is unknown.
        spent: role -> tokens of all completions of the run, as far as they were recorded one by one
            (`tbx_envs.evaluation.files.load_spending`). Where it is more than the rows have, it counts.

    Returns:
        `total`, `per_success` (total / passed attempts), `per_reliable_task` (total / `reliable_tasks`), each None
        when unknown or when the divisor is 0; and for each role under `roles` its `cost`, `given_tokens`,
        `cached_tokens` and `sampled_tokens`.

    Raises:
        ConfigError: a role is not in `ROLES`.
    """
    unknown = [role for role in prices if role not in ROLES]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not a role in an evaluation run. Roles: {', '.join(ROLES)}.")
    rows = list(rows)
    recorded = spent or {}
    roles = {role: _role_costs(rows, role, of_role, recorded.get(role)) for role, of_role in prices.items()}
    of_roles = [role["cost"] for role in roles.values()]
    total = sum(of_roles) if of_roles and None not in of_roles else None
    passed = sum(row["passed"] is True for row in rows)
    return {
        "total": total,
        "per_success": total / passed if total is not None and passed else None,
        "per_reliable_task": total / reliable_tasks if total is not None and reliable_tasks else None,
        "roles": roles,
    }


def _role_costs(
    rows: list[Mapping[str, Any]], role: str, prices: Prices | None, recorded: TokenUsage | None
) -> dict[str, Any]:
    used = NOTHING_USED
    for row in rows:
        used += usage_of_counts(row["usage"], role)
        if row.get("void_usage"):
            used += usage_of_counts(row["void_usage"], role)
    if recorded is not None:
        used = _larger(used, recorded)
    tokens = {name: getattr(used, field) for field, name in _COUNTS.items()}
    return {"cost": cost(used, prices), **tokens}


def _larger(rows: TokenUsage, recorded: TokenUsage) -> TokenUsage:
    """The larger of both counts of the same tokens; unknown where one of them is."""
    pairs = {field: (getattr(rows, field), getattr(recorded, field)) for field in _COUNTS}
    return TokenUsage(**{field: None if None in pair else max(pair) for field, pair in pairs.items()})
