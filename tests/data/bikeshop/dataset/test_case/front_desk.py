from thinkingbox.common import Judge, TestContext

"""!
scenario: front_desk
metadata:
  shift: early
"""


def test_note_on_the_second_server(x: TestContext, judge: Judge, counted, rows):
    """!
    query: Please write down that I prefer red bikes. ada@example.org
    user_context: You are Ada Bell.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: find_customer, parameters: {email: ada@example.org}}
      notes:
        golden_test_case:
          tool_interactions:
          - {tool: add_note, parameters: {customer_id: C1, text: prefers red bikes}}
    """
    effects = x.effects["bikes"]
    assert effects["result_db_hash"] == effects["golden_db_hash"], f"rows differ: {effects.get('diff')}"
    added = x.effects["notes"]["notes"]
    assert [note["customer_id"] for note in added] == ["C1"], added
    assert dict(counted) == {"a": 1} and dict(rows) == {"of": "scenario"}
    return 0.5 + 0.5 * ("red" in added[0]["text"])


def test_refund_is_told(x: TestContext, judge: Judge):
    """!
    query: I want 4 back for rental R1.
    user_context: You are Ada Bell, ada@example.org.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: refund, parameters: {rental_id: R1, amount: 4}}
    """
    effects = x.effects["bikes"]
    assert effects["result_db_hash"] == effects["golden_db_hash"], f"rows differ: {effects.get('diff')}"
    assert len(x.tool_direct_responses) == 1 and "R1" in x.tool_direct_responses[0], x.tool_direct_responses


def test_next_turn(x: TestContext, judge: Judge):
    """!
    query: No, make it 555-0178 instead.
    history: "phone: changed:0:t2"
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: update_customer, parameters: {customer_id: C1, phone: 555-0178}}
    """
    effects = x.effects["bikes"]
    assert effects["result_db_hash"] == effects["golden_db_hash"], f"rows differ: {effects.get('diff')}"
