"""Rubrics: the reward of answers against numbers worked by hand, and how the judge is asked."""

import json
import random

import pytest
from saying import SayingEndpoint
from verdicts import code_of

from tbx_envs.errors import CheckFault
from tbx_envs.thinkingbox.grading.judge import EndpointJudge, YesJudge

IMPORT = "from thinkingbox.common.rubrics_judge import EvaluationResult, RubricJudge, RubricScore"


def graded(worker, body, effects=None, judge=None, evidence=None):
    evidence = {"effects": effects or {}, **(evidence or {})}
    code = code_of(body, before=IMPORT)
    return worker.grade(code, evidence, fixtures={}, judge=judge or YesJudge(), session=None, uid="shop.py:test_it")


def rewards_of(worker, rubrics):
    """The reward of each list of (kind, weight, rating); kind is plus, minus or times."""
    body = """
        judge_of_it = RubricJudge(judge, x)
        kinds = {'minus': 'deduction', 'times': 'multiplicative'}
        def score(kind, weight, rating):
            penalty = {'is_penalty': True, 'penalty_type': kinds[kind]} if kind in kinds else {}
            return RubricScore(criterion='c', weight=weight, rating=rating, score=weight * rating, **penalty)
        x.metadata['rewards'] = [judge_of_it.compute_reward([score(*s) for s in r]) for r in x.effects['rubrics']]
        """
    (note,) = graded(worker, body, {"rubrics": rubrics}).notes
    return json.loads(note.removeprefix("rewards: "))


BY_HAND = [
    ([("plus", 50, 1), ("plus", 30, 1), ("plus", 20, 0), ("minus", 15, 1), ("times", 0.5, 1)], 0.325),
    ([("plus", 50, 1), ("plus", 30, 1), ("plus", 20, 0), ("minus", 15, 0), ("times", 0.5, 0)], 0.8),
    ([("plus", 2, 1), ("plus", 2, 1)], 1.0),
    ([("plus", 1, 0), ("minus", 5, 1)], 0.0),  # never below nothing
    ([("plus", 4, 1), ("times", 0.5, 1), ("times", 0.5, 1)], 0.25),
    ([("plus", 4, 1), ("times", 1, 1)], 0.0),
    ([("minus", 1, 0), ("times", 0.5, 0)], 0.0),  # nothing could be earned
    ([("plus", 0, 1)], 0.0),
    ([("plus", 4, 1), ("times", 3, 1)], 0.0),  # a score made by hand may say more than a share can be
    ([], 0.0),
]


def test_the_reward_of_a_rubric_is_what_the_formula_says(worker):
    assert rewards_of(worker, [rubric for rubric, _ in BY_HAND]) == pytest.approx([reward for _, reward in BY_HAND])


def test_the_reward_of_any_rubric_equals_a_plain_loop(worker):
    def by_loop(rubric):
        points = earned = 0.0
        factor = 1.0
        for kind, weight, rating in rubric:
            if kind == "plus":
                points += weight
                earned += weight if rating else 0
            elif kind == "minus":
                earned -= weight if rating else 0
            elif rating:
                factor *= 1 - weight
        if points == 0:
            return 0.0
        return min(max(earned / points, 0.0), 1.0) * factor

    draw = random.Random(3)
    rubrics = [
        [
            (kind, draw.random() if kind == "times" else draw.randrange(50), draw.randrange(2))
            for kind in draw.choices(("plus", "plus", "minus", "times"), k=draw.randrange(1, 8))
        ]
        for _ in range(300)
    ]
    for some in (rubrics[start : start + 50] for start in range(0, 300, 50)):  # a note is not longer
        assert rewards_of(worker, some) == pytest.approx([by_loop(rubric) for rubric in some])


def test_the_judge_is_asked_about_each_criterion_with_nothing_in_it_that_closes_a_tag(worker):
    endpoint = SayingEndpoint("Yes", "No", "Yes")
    body = """
        Config = RubricJudge.Config
        rubrics = [Config(criterion='It is <b>polite', weight=3), Config(criterion='It is short', weight=1)]
        rubrics.append(Config(criterion='It is rude', weight=0.5, is_penalty=True, penalty_type='multiplicative'))
        result = RubricJudge(judge, x).evaluate('Hello </response>', rubrics, global_threshold=0.4)
        assert [score.rating for score in result.scores] == [1, 0, 1]
        assert (result.reward, result.passed, result.global_threshold) == (0.375, False, 0.4)
        assert x.metadata['rubric_scores'][2] == {'criterion': 'It is rude', 'rating': 1, 'score': 0.5}
        for effect in ('+3', '+0', 'x0.5', 'reward 0.375', 'failed'):
            assert effect in result.message
        result.assert_passed()
        """
    report = graded(worker, body, judge=EndpointJudge(endpoint))
    assert report.differences[0] == "the reward is 0.375, below the threshold of 0.400"
    users = [messages[1]["content"] for messages, _, _ in endpoint.asked]
    assert users[0].startswith("<response>\nHello &lt;/response&gt;\n</response>\n\n")
    assert "<criterion>It is &lt;b&gt;polite</criterion>" in users[0]
    systems = [messages[0]["content"] for messages, _, _ in endpoint.asked]
    assert systems[0] == systems[1] != systems[2]
    assert "rubric_reward: 0.375" in report.notes


def test_a_reward_function_of_the_tests_own_is_clamped(worker):
    body = """
        rubrics = [RubricJudge.Config(criterion='polite', weight=1)]
        for made, reward in ((0.25, 0.25), (7, 1.0), (-7, 0.0)):
            made_by = RubricJudge(judge, x, reward_fn=lambda scores: made)
            assert made_by.evaluate('Hello', rubrics).reward == reward
        """
    assert graded(worker, body).differences == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("RubricJudge(judge, x, max_workers=0)", "must be a positive number"),
        ("RubricJudge(judge, x).evaluate('Hello', [])", "at least one criterion"),
        ("RubricJudge(judge, x).evaluate(x.response, [RubricJudge.Config(criterion='a', weight=1)])", "no response"),
        ("RubricJudge(judge, x, lambda s: float('nan')).compute_reward([])", "not a number"),
        ("RubricJudge.Config(criterion='a', weight=-1)", "ValidationError"),
        ("RubricJudge.Config(criterion='a', weight=2, is_penalty=True, penalty_type='multiplicative')", "share from 0"),
    ],
)
def test_a_rubric_that_makes_no_sense_is_a_fault(worker, body, said):
    with pytest.raises(CheckFault, match=said):
        graded(worker, body)
