from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.endpoints.costs import (
    NOTHING_USED,
    ROLES,
    Prices,
    TokenUsage,
    cost,
    run_costs,
    usage_counts,
    usage_of_counts,
)
from tbx_envs.errors import ConfigError

PRICES = Prices(input=2.0, cached=0.5, output=8.0)
TOKENS = st.none() | st.integers(0, 10**9)


def usages():
    return st.builds(TokenUsage, TOKENS, TOKENS, TOKENS, TOKENS)


def row(passed=True, usage=None, **more):
    return {"uid": "a", "passed": passed, "usage": usage or {}, **more}


def tokens(prompt, cached, completion, role="policy"):
    return usage_counts(TokenUsage(prompt, cached, completion), role)


def test_a_cost_worked_by_hand():
    # 600,000 new at 2 + 400,000 cached at 0.5 + 100,000 written at 8
    assert cost(TokenUsage(1_000_000, 400_000, 100_000), PRICES) == pytest.approx(1.2 + 0.2 + 0.8)


def test_prompt_tokens_that_are_not_said_to_be_cached_cost_the_full_price():
    assert cost(TokenUsage(1_000_000, None, 0), PRICES) == pytest.approx(2.0)


def test_more_cached_tokens_than_there_were_are_not_believed():
    assert cost(TokenUsage(10, 1_000_000, 0), PRICES) == cost(TokenUsage(10, 10, 0), PRICES)


@pytest.mark.parametrize("usage", [TokenUsage(None, 1, 1), TokenUsage(1, 1, None), TokenUsage()])
def test_a_cost_of_unknown_tokens_is_unknown(usage):
    assert cost(usage, PRICES) is None


def test_a_cost_without_prices_is_unknown_and_free_tokens_cost_nothing():
    assert cost(TokenUsage(1, 1, 1), None) is None
    assert cost(NOTHING_USED, PRICES) == 0.0
    assert cost(TokenUsage(5, 1, 1), Prices(0, 0, 0)) == 0.0


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), None, "2"])
def test_invalid_prices_are_rejected_by_name(wrong):
    with pytest.raises(ConfigError, match=r"cached=.*, output="):
        Prices(1.0, wrong, wrong)


@given(st.lists(usages(), max_size=5))
def test_a_sum_is_known_exactly_when_every_part_is(parts):
    total = sum(parts, NOTHING_USED)
    for field in ("prompt", "cached", "completion", "reasoning"):
        values = [getattr(part, field) for part in parts]
        assert getattr(total, field) == (None if None in values else sum(values))


@given(usages(), st.sampled_from(list(ROLES)))
def test_counts_of_an_episode_give_back_what_was_used(usage, role):
    again = usage_of_counts({"agent_turns": 3, **usage_counts(usage, role)}, role)
    assert again == TokenUsage(usage.prompt, usage.cached, usage.completion)


def test_roles_keep_their_counts_apart():
    counts = usage_counts(TokenUsage(1, 2, 3)) | usage_counts(TokenUsage(4, 5, 6), "user")
    assert counts["given_tokens"] == 1 and counts["user_given_tokens"] == 4
    assert len(counts) == 6


# --- of an evaluation run ------------------------------------------------------------------------------------------


def test_the_costs_of_a_run_worked_by_hand():
    rows = [
        row(True, tokens(1_000_000, 0, 0)),
        row(False, tokens(0, 0, 500_000)),
        row(True, tokens(0, 0, 0), void_usage=tokens(1_000_000, 0, 0)),  # a void try before it
        row(None, tokens(1_000_000, 1_000_000, 0)),  # void, and paid for
    ]
    costs = run_costs(rows, {"policy": PRICES}, reliable_tasks=1)
    assert costs["total"] == pytest.approx(2.0 + 4.0 + 2.0 + 0.5)
    assert costs["per_success"] == pytest.approx(8.5 / 2)
    assert costs["per_reliable_task"] == pytest.approx(8.5)
    assert costs["roles"]["policy"] == {
        "cost": costs["total"],
        "given_tokens": 3_000_000,
        "cached_tokens": 1_000_000,
        "sampled_tokens": 500_000,
    }


def test_completions_that_no_row_has_are_paid_for():
    """What was in flight when a run was killed: rows have 2 of 3 million tokens, the account has all."""
    rows = [row(True, tokens(1_000_000, 0, 0)), row(None, tokens(1_000_000, 0, 0))]
    spent = {"policy": TokenUsage(3_000_000, 0, 0)}
    assert run_costs(rows, {"policy": PRICES}, reliable_tasks=1, spent=spent)["total"] == 6.0
    # An account that was begun later, as in a run of an earlier version, takes nothing away.
    assert run_costs(rows, {"policy": PRICES}, reliable_tasks=1, spent={"policy": NOTHING_USED})["total"] == 4.0
    assert run_costs(rows, {"policy": PRICES}, reliable_tasks=1, spent={})["total"] == 4.0
    unknown = run_costs(rows, {"policy": PRICES}, reliable_tasks=1, spent={"policy": TokenUsage(None, 0, 0)})
    assert unknown["total"] is None


def test_every_served_role_is_part_of_the_total():
    usage = tokens(1_000_000, 0, 0) | tokens(1_000_000, 0, 0, "user") | tokens(500_000, 0, 0, "judge")
    prices = {"policy": PRICES, "user": Prices(1.0, 1.0, 1.0), "judge": Prices(4.0, 4.0, 4.0)}
    costs = run_costs([row(usage=usage)], prices, reliable_tasks=1)
    assert {role: of_role["cost"] for role, of_role in costs["roles"].items()} == {
        "policy": 2.0,
        "user": 1.0,
        "judge": 2.0,
    }
    assert costs["total"] == 5.0


@pytest.mark.parametrize(
    ("rows", "prices"),
    [
        ([row(usage=tokens(1, 0, 1)), row(usage={})], {"policy": PRICES}),  # one episode was not counted
        ([row(usage=tokens(1, 0, 1), void_usage={"agent_turns": 2})], {"policy": PRICES}),  # nor was a void try
        ([row(usage=tokens(1, 0, 1))], {"policy": None}),
        ([row(usage=tokens(1, 0, 1))], {"policy": PRICES, "user": PRICES}),  # the user's tokens were not
        ([row(usage=tokens(1, 0, 1))], {}),  # no served model at all
    ],
)
def test_what_is_not_known_makes_the_whole_unknown(rows, prices):
    costs = run_costs(rows, prices, reliable_tasks=1)
    assert (costs["total"], costs["per_success"], costs["per_reliable_task"]) == (None, None, None)


def test_nothing_passed_means_no_cost_of_a_success_and_not_an_infinite_one():
    costs = run_costs([row(False, tokens(1_000_000, 0, 0))], {"policy": PRICES}, reliable_tasks=0)
    assert (costs["total"], costs["per_success"], costs["per_reliable_task"]) == (2.0, None, None)


def test_an_unknown_role_is_an_error():
    with pytest.raises(ConfigError, match=r"'agent'.*policy, user, judge"):
        run_costs([], {"agent": PRICES}, reliable_tasks=0)


@given(st.lists(st.tuples(*[st.integers(0, 10**7)] * 3), min_size=1, max_size=6))
def test_the_total_of_a_run_is_the_exact_sum_of_its_episodes(episodes):
    prices = Prices(input=0.125, cached=0.0625, output=3.5)  # exact in binary
    rows = [row(usage=tokens(given + cached, cached, written)) for given, cached, written in episodes]
    exact = sum(
        Fraction(given) * Fraction(0.125) + Fraction(cached) * Fraction(0.0625) + Fraction(written) * Fraction(3.5)
        for given, cached, written in episodes
    ) / Fraction(10**6)
    total = run_costs(rows, {"policy": prices}, reliable_tasks=1)["total"]
    assert total == pytest.approx(float(exact), rel=1e-15)
