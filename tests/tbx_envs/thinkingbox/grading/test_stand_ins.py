"""What the check worker supplies of the original's package beyond contexts, judges and rubrics."""

import pytest
from saying import SayingEndpoint
from verdicts import code_of

from tbx_envs.errors import CheckFault
from tbx_envs.thinkingbox.grading.judge import EndpointJudge
from tbx_envs.thinkingbox.grading.test_code import CheckWorker

EVALUATOR = {"evaluator": {"type": "thinkingbox.fixtures.GeneratedAnswerEvaluator", "max_workers": 1}}
ASKED = {
    "response": "It is $125, see bar.pdf.",
    "messages": [{"T": "Text", "role": "user", "content": "How much is <it>?"}],
}


def evaluated(worker, body, *says, **arguments):
    endpoint = SayingEndpoint(*says)
    report = worker.grade(
        code_of(body, parameters="x, judge, evaluator"),
        ASKED,
        fixtures={"evaluator": {**EVALUATOR["evaluator"], **arguments}},
        judge=EndpointJudge(endpoint),
        session=None,
        uid="shop.py:test_it",
    )
    return report, [messages[1]["content"] for messages, _, _ in endpoint.asked]


def test_an_answer_is_compared_with_its_reference_and_then_judged_by_four_criteria(worker):
    report, asked = evaluated(worker, "assert evaluator.evaluate('$125', 'bar.pdf', 'p3,p32') is True", "Yes")
    assert report.passed, report.differences
    assert asked[0] == (
        "<query>\nHow much is &lt;it&gt;?\n</query>\n<reference>\n$125\n</reference>\n"
        "<candidate>\nIt is $125, see bar.pdf.\n</candidate>\n"
    )
    assert len(asked) == 5 and "'bar.pdf'" in asked[1] and "page 3, or page 32 of its source" in asked[2]
    assert "rubric_reward: 1.0" in report.notes


def test_an_answer_that_says_something_else_fails_at_once(worker):
    report, asked = evaluated(worker, "evaluator.evaluate('$7')", "No")
    assert not report.passed and len(asked) == 1
    assert report.differences[0] == "'It is $125, see bar.pdf.' does not say what '$7' says"


def test_an_answer_that_says_something_else_can_cost_half_of_the_reward_instead(worker):
    body = "assert evaluator.evaluate('$7', rubrics_threshold=0.5, ref_pages='p1') is False"
    report, asked = evaluated(worker, body, "No", "Yes", fail_on_mismatch=False)
    assert report.passed, report.differences
    assert len(asked) == 4 and "How much is &lt;it&gt;?" in asked[0] and "page 1 " in asked[1]
    assert "rubric_reward: 0.5" in report.notes
    report, _ = evaluated(worker, "evaluator.evaluate('$7')", "No", "Yes", fail_on_mismatch=False)
    assert report.differences[0] == "the reward is 0.500, below the threshold of 0.700"


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("p3", "page 3"),
        ("p3-5", "pages 3 to 5"),
        ("r42", "row 42"),
        ("r7-180", "rows 7 to 180"),
        ("July2024:r42", "row 42 in sheet 'July2024'"),
        ("July:r47-62", "rows 47 to 62 in sheet 'July'"),
        ("Multiple_Sheets", "several sheets"),
        ("p3+p8", "page 3 and page 8"),
        ("p3,p8", "page 3, or page 8"),
        ("p1+p2,p3+p4", "page 1 and page 2, or page 3 and page 4"),
        ("p3+p8+p12", "page 3, page 8 and page 12"),
        ("the annex", "the annex"),
    ],
)
def test_a_place_in_a_document_is_put_into_words(worker, location, words):
    body = f"from thinkingbox.fixtures import location_in_words\nassert location_in_words({location!r}) == {words!r}"
    report = worker.grade(code_of(body), {}, fixtures={}, judge=None, session=None, uid="a.py:b")
    assert report.differences == ()


def test_graders_average_and_match(worker):
    body = """
        from thinkingbox.common.graders import average_reward, match_score
        assert average_reward({}) == 0 == average_reward({'a': 1}, {'b': 1})
        assert average_reward({'a': 1.0, 'b': 0.0}) == 0.5
        assert average_reward({'a': 1.0, 'b': 0.0, 'c': 9.0}, {'a': 3, 'b': 1}) == 0.75
        assert (match_score([1], [1]), match_score('a', 'b')) == (1.0, 0.0)
        assert match_score({'a': 1, 'b': 3}, {'a': 1, 'b': 2, 'c': None, 'd': 1}, partial=True) == 0.25
        match_score({'a': 1}, {'a': 2}, is_critical=True)
        """
    report = worker.grade(code_of(body), {}, fixtures={}, judge=None, session=None, uid="a.py:b")
    assert report.differences == (
        "expected {'a': 2}, got {'a': 1} (score 0)",
        "line 11: match_score({'a': 1}, {'a': 2}, is_critical=True)",
    )
    for call in ("match_score(1, '1')", "match_score(1, 1, partial=True)"):
        with pytest.raises(CheckFault, match="ValueError"):
            code = code_of(call, before="from thinkingbox.common.graders import match_score")
            worker.grade(code, {}, fixtures={}, judge=None, session=None, uid="a.py:b")


def test_our_modules_come_first_and_the_originals_fill_up_what_we_do_not_have(tmp_path):
    for module, text in {
        "__init__": "",
        "elsewhere": "from thinkingbox.common.chat_types import TestContext",
        "common/__init__": "raise ImportError('not this one')",
        "common/chat_types": "TestContext = None",
        "common/extra": "WORDS = 'of the original'",
    }.items():
        file = tmp_path / "thinkingbox" / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    body = """
        from thinkingbox.common import TestContext
        from thinkingbox import elsewhere
        from thinkingbox.common.extra import WORDS
        assert isinstance(x, TestContext) and elsewhere.TestContext is TestContext and WORDS == 'of the original'
        """
    with CheckWorker(paths=[tmp_path]) as worker:
        report = worker.grade(code_of(body), {}, fixtures={}, judge=None, session=None, uid="a.py:b")
    assert report.passed
