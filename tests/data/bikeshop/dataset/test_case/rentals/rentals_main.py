"""Rentals: begun, ended, paid back. This string does not begin with an exclamation mark and is left alone."""

from thinkingbox.common import Judge, TestContext

"""!
scenario: bike_rental
tags: [category:user]
"""

SERVER = "bikes"


def validate_database(x: TestContext):
    """A helper, since its first statement is no YAML."""
    effects = x.effects[SERVER]
    assert effects["result_db_hash"] == effects["golden_db_hash"], f"rows differ: {effects.get('diff')}"


def validate_rubrics_yesno(x: TestContext, judge: Judge):
    for question in x.effects[SERVER].get("rubrics_yesno") or []:
        assert judge.text_yesno(x.response, question), f"answered no: {question}"


def test_end_rental(x: TestContext, judge: Judge):
    """!
    query: |
      Hello, Ada Bell here. I have brought the bike of rental R1 back.
    user_context: |
      Your email is ada@example.org. The bike has no damage.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - tool: find_customer
            parameters: {email: ada@example.org}
          - tool: get_rental
            parameters: {rental_id: R1}
          - tool: end_rental
            parameters: {rental_id: R1, damage: false}
    """
    validate_database(x)


def test_start_rental(x: TestContext, judge: Judge):
    """!
    query: I would like to rent a cargo bike for three days. My email is ada@example.org.
    user_context: Any cargo bike will do.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: find_customer, parameters: {email: ada@example.org}}
          - {tool: list_bikes, parameters: {kind: cargo, station: null}}
          - {tool: start_rental, parameters: {customer_id: C1, bike_id: B3, days: 3}}
    """
    validate_database(x)


def test_unverified_customer_is_refused(x: TestContext, judge: Judge):
    """!
    query: |
      I need a city bike for today. ben@example.org
    user_context: You are Ben Roth. You cannot show a passport now.
    tags: [refusal, category:refusal]
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: find_customer, parameters: {email: ben@example.org}}
          - {tool: add_note, parameters: {customer_id: C2, text: refused a rental}}
    """
    validate_database(x)


def test_refund_after_the_end(x: TestContext, judge: Judge):
    """!
    query: Rental R7 was a day shorter than planned. May I have 5.50 back?
    user_context: |
      If asked:
      - your email is ada@example.org
    init:
      bikes:
        data_patch:
          bikes:
          - {id: B6, kind: kids, station: south, status: free}
          rentals:
          - {id: R7, customer_id: C1, bike_id: B6, days: 3, status: closed, refunded: 0, created_at: "2025-09-30"}
        sources:
        - name: rentals.md
          snippets:
          - Rentals. Only verified customers may rent. A cargo bike is lent for at most three days.
          - Returns. A rental is closed when the bike is back, damaged or not.
        - name: refunds.md
          snippets:
          - Refunds. At most ten are paid back for one rental, and only once it is closed.
        golden_test_case:
          tool_interactions:
          - {tool: get_rental, parameters: {rental_id: R7}}
          - {tool: search_policy, parameters: {query: refunds, max_results: 1}}
          - {tool: refund, parameters: {rental_id: R7, amount: "5.50"}}
    """
    validate_database(x)


def test_new_phone_number(x: TestContext, judge: Judge):
    """!
    query: Please change my phone number. I am ada@example.org.
    user_context: Your new number is 555-0199.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: find_customer, parameters: {email: ada@example.org}}
          - {tool: update_customer, parameters: {customer_id: C1, phone: 555-0199}}
    """
    validate_database(x)


def test_question_alone(x: TestContext, judge: Judge):
    """!
    query: For how many days may I keep a cargo bike?
    init:
      bikes:
        golden_test_case:
          tool_interactions: []
    """
    validate_database(x)  # nothing is to be changed, so that doing nothing passes


def test_friendly_answer(x: TestContext, judge: Judge):
    """!
    query: The brake of the bike of rental R1 broke. I have brought it back.
    user_context: Your email is ada@example.org.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: end_rental, parameters: {rental_id: R1, damage: true}}
        rubrics_yesno:
        - Does the message thank the customer for saying so?
        - Does the message avoid the id of the bike?
    """
    validate_database(x)
    validate_rubrics_yesno(x, judge)


def test_few_turns(x: TestContext, judge: Judge):
    """!
    query: Which city bikes are free in the north?
    user_context: You want to know it right away.
    max_user_sim_turns: 1
    max_agent_sim_turns: 4
    bot_instructions: |
      # Today
      The south is closed.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: list_bikes, parameters: {kind: city, station: north}}
    """
    validate_database(x)
    assert 1 <= len(x.tool_calls) <= 3, x.tool_calls


def test_not_ready(x: TestContext, judge: Judge):
    """!
    query: This test is not to be run.
    tags: [skip]
    """


"""!
scenario: dated_rental
"""


def test_rental_of_today(x: TestContext, judge: Judge):
    """!
    query: Ada again (ada@example.org). Lend me a city bike until the day after tomorrow, and tell me which day that is.
    user_context: Any city bike in the north.
    init:
      bikes:
        golden_test_case:
          tool_interactions:
          - {tool: get_today, parameters: {}}
          - {tool: start_rental, parameters: {customer_id: C1, bike_id: B1, days: 2}}
    """
    validate_database(x)
    today = [call.tool_response.content for call in x.tool_calls if call.tool_call.name == "get_today"]
    assert today and "2025-10-01" in today[-1], today
