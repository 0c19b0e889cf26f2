import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.errors import PolicyFault, ShapeError

token_ids = st.integers(0, 300_000)
given_entry = st.lists(token_ids, max_size=5).map(lambda ids: (ids, None))
written_entry = st.lists(st.tuples(token_ids, st.floats(-50, 0, width=32)), max_size=5).map(
    lambda pairs: ([token for token, _ in pairs], [logp for _, logp in pairs])
)


@given(st.lists(given_entry | written_entry, max_size=8))
def test_the_ledger_holds_every_token_with_its_writer_and_its_log_probability_in_order(entries):
    ledger = TokenLedger()
    rows = []
    for ids, logps in entries:
        if logps is None:
            ledger.give(ids)
            rows += [(token, False, 0.0) for token in ids]
        else:
            ledger.write(ids, logps)
            rows += [(token, True, logp) for token, logp in zip(ids, logps, strict=True)]
    assert len(ledger) == len(rows)
    assert list(zip(ledger.tokens, ledger.wrote, ledger.logps, strict=True)) == rows
    assert (ledger.tokens.dtype, ledger.wrote.dtype, ledger.logps.dtype) == (np.int32, np.bool_, np.float32)


def test_what_was_read_out_does_not_change_what_is_in_the_ledger():
    ledger = TokenLedger()
    ledger.give([1, 2])
    ledger.tokens[0] = 9
    assert ledger.tokens.tolist() == [1, 2]


def test_sampled_tokens_without_a_log_probability_each_are_rejected():
    with pytest.raises(ShapeError, match="2 sampled tokens came with 1 log-probabilities"):
        TokenLedger().write([1, 2], [-0.1])


@pytest.mark.parametrize("logp", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_a_fault_of_the_policy(logp):
    ledger = TokenLedger()
    ledger.give([5])
    with pytest.raises(PolicyFault, match="token 8 was sampled with log-probability"):
        ledger.write([7, 8], [-0.1, logp])
    assert ledger.tokens.tolist() == [5]
