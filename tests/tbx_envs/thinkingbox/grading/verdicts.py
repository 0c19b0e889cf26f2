"""Test code of datasets and what is to come of it: read off the original's documentation, and compared with its worker
where that is installed (`test_original.py`)."""

import dataclasses
import textwrap
from typing import Any

FIXTURES = "shop_fixtures"  # the module in fixture_modules/


@dataclasses.dataclass(frozen=True)
class Case:
    """`verdict` is passed, failed or void; `line` is where it failed, counted in `code`; `says` what judges answer."""

    name: str
    code: str
    verdict: str
    reward: float = 0.0
    line: int | None = None
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    fixtures: dict[str, Any] = dataclasses.field(default_factory=dict)
    says: str = "Yes"


def code_of(body, parameters="x, judge", before=""):
    """A file with one test, its body at line 5 and after."""
    head = (before.strip() + "\n" * 3).split("\n")[:3]
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return "\n".join([*head, f"def test_it({parameters}):", body, "__tb_test_fn = test_it", ""])


def returning(value):
    return code_of(f"return {value}")


TALK = [
    {"T": "Text", "role": "system", "content": "Be kind."},
    {"T": "Text", "role": "user", "content": "Is it raining?"},
    {"T": "Text", "role": "assistant", "content": "let me think", "metadata": {"tag": "think"}},
    {
        "T": "ParallelToolCall",
        "tool_calls": [{"T": "ToolCall", "name": "look", "arguments": {"at": "sky"}, "id": "c1"}],
    },
    {"T": "ToolResponse", "name": "look", "content": "{}", "id": "c1"},
    {"T": "Text", "role": "assistant", "content": "Rain!", "metadata": {"tag": "direct"}},
    {"T": "Text", "role": "assistant", "content": "It is raining.", "metadata": {"tag": "text"}},
    {"T": "Text", "role": "user", "content": "Thanks.", "metadata": {"is_user_llm": True}},
    {"T": "Text", "role": "assistant", "content": "Bye. <DONE>", "metadata": {"tag": "text", "is_done": True}},
]
IMPORTS = "from thinkingbox.common import Judge, TestContext\nfrom thinkingbox.common.chat_types import Text, ToolCall"

CASES = [
    Case("nothing is raised", code_of("pass"), "passed", 1.0),
    Case("the imports of datasets", code_of("assert isinstance(x, TestContext)", before=IMPORTS), "passed", 1.0),
    Case("a reward is returned", returning("0.25"), "passed", 0.25),
    Case("a reward of nothing still passes", returning("0"), "passed", 0.0),
    Case("True is a reward of one", returning("True"), "passed", 1.0),
    Case("False is a reward of nothing", returning("False"), "passed", 0.0),
    Case("a number in a string is a number", returning("'0.5'"), "passed", 0.5),
    Case("more than one is no reward", returning("1.5"), "void"),
    Case("less than nothing is no reward", returning("-0.1"), "void"),
    Case("not a number is no reward", returning("float('nan')"), "void"),
    Case("infinity is no reward", returning("float('inf')"), "void"),
    Case("a list is no reward", returning("[1.0]"), "void"),
    Case("an object is no reward", returning("object()"), "void"),
    Case("an assertion fails", code_of("y = 1\nassert y == 2, f'y is {y}'"), "failed", line=6),
    Case("an assertion in a helper", code_of("helper()", before="def helper():\n    assert 0, 'no'"), "failed", line=2),
    Case("a raised AssertionError", code_of("raise AssertionError"), "failed", line=5),
    Case("an assertion outside of the test", code_of("pass", before="assert 1 == 2, 'early'"), "failed", line=1),
    Case("an assertion in the library", code_of("import unittest\nunittest.TestCase().fail('no')"), "failed", line=6),
    Case("a subclass of AssertionError", code_of("class E(AssertionError): pass\nraise E('no')"), "failed", line=6),
    Case("a missing server", code_of("assert x.effects['shop']['total'] == 3"), "void"),
    Case("another exception", code_of("raise ValueError('odd')"), "void"),
    Case("an exception because of an assertion", code_of("try: assert 0\nexcept AssertionError: 1 / 0"), "void"),
    Case("SystemExit", code_of("raise SystemExit(0)"), "void"),
    Case("the end of the process", code_of("import os\nos._exit(0)"), "void"),
    Case("a syntax error", code_of("assert ("), "void"),
    Case("no test function", "x = 1\n", "void"),
    Case("a test with too few parameters", code_of("pass", parameters="x"), "void"),
    Case("a test with its own parameter", code_of("pass", parameters="x, judge, other"), "void"),
    Case("an async test", "async def test_it(x, judge): pass\n__tb_test_fn = test_it\n", "void"),
    Case("a default is no fixture", code_of("pass", parameters="x, judge, *, other=3"), "passed", 1.0),
    Case("a test called by its last name", "def __tb_test_fn(x, judge):\n    return 0.5\n", "passed", 0.5),
    Case(
        "effects",
        code_of("assert x.effects['shop']['total'] == 3"),
        "passed",
        1.0,
        None,
        {"effects": {"shop": {"total": 3}}},
    ),
    Case(
        "the response", code_of("assert x.response == 'Bye. <DONE>'"), "passed", 1.0, None, {"response": "Bye. <DONE>"}
    ),
    Case("metadata may be written", code_of("x.metadata['seen'] = 3"), "passed", 1.0),
    Case(
        "the first question",
        code_of("assert x.query() == 'Is it raining?'"),
        "passed",
        1.0,
        evidence={"messages": TALK},
    ),
    Case("no question", code_of("x.query()"), "void"),
    Case(
        "the whole transcript",
        code_of(
            r"assert x.transcript() == 'User: Is it raining?\n\nAssistant: Rain!\n\nAssistant: It is raining.\n\n"
            r"User: Thanks.\n\nAssistant: Bye. <DONE>', x.transcript()"
        ),
        "passed",
        1.0,
        evidence={"messages": TALK},
    ),
    Case(
        "the end of the transcript",
        code_of(
            r"""
            assert x.transcript(1) == 'Assistant: Bye. <DONE>', x.transcript(1)
            assert x.transcript(limit=2) == 'Assistant: It is raining.\n\nUser: Thanks.\n\nAssistant: Bye. <DONE>'
            assert x.transcript(99) == x.transcript(0)
            """
        ),
        "passed",
        1.0,
        evidence={"messages": TALK},
    ),
    Case("a limit below zero", code_of("x.transcript(-1)"), "void"),
    Case(
        "what messages are",
        code_of(
            """
            kinds = [type(m).__name__ for m in x.messages]
            assert kinds == ['Text', 'Text', 'Text', 'ParallelToolCall', 'ToolResponse', 'Text', 'Text', 'Text', 'Text']
            assert [m.tag for m in x.messages if isinstance(m, Text)][2:4] == ['think', 'direct']
            call = x.messages[3].tool_calls[0]
            assert isinstance(call, ToolCall) and (call.name, call.arguments, call.id) == ('look', {'at': 'sky'}, 'c1')
            assert x.messages[4].content == '{}' and not x.messages[2].is_visible
            made = Text(role='assistant', content='made')
            assert made.tag == 'text' and made.metadata == {} and made.model_dump()['T'] == 'Text'
            assert ToolCall(name='a', arguments={}).id.startswith('call_')
            """,
            before=IMPORTS,
        ),
        "passed",
        1.0,
        evidence={"messages": TALK},
    ),
    Case(
        "calls and their answers",
        code_of(
            """
            (pair,) = x.tool_calls
            assert pair.tool_call.arguments == {'at': 'sky'} and pair.tool_response.content == '{}'
            assert x.tool_direct_responses == ['Rain!'] and x.init_result == {'shop': {'day': 3}}
            """
        ),
        "passed",
        1.0,
        evidence={
            "tool_calls": [{"tool_call": TALK[3]["tool_calls"][0], "tool_response": TALK[4]}],
            "tool_direct_responses": ["Rain!"],
            "init_result": {"shop": {"day": 3}},
        },
    ),
    # --- judges
    Case("a judge says yes", code_of("assert judge.text_yesno(x.response, 'Polite?')"), "passed", 1.0),
    Case("a judge says no", code_of("assert judge.text_yesno(x.response, 'Polite?')"), "failed", line=5, says="No"),
    Case("a judge compares", code_of("assert judge.compare_yesno('a', 'b', 'Same?')"), "passed", 1.0),
    Case("a judge is asked without a text", code_of("assert judge.yesno('Is it true?')"), "passed", 1.0),
    Case("a prompt of its own", code_of("assert judge.evaluate_bool('You judge.', 'Fine?')"), "passed", 1.0),
    Case("a judge finds no repeat", code_of("assert judge.no_repeat('a', ['b', 'c'])"), "passed", 1.0, says="No"),
    Case("nothing to repeat", code_of("assert judge.no_repeat('a', [])"), "passed", 1.0),
    Case("a judge reads text only", code_of("judge.text_yesno(None, 'Polite?')"), "void"),
    Case("a method that no judge has", code_of("judge.custom_rubric_score('a')"), "void"),
    Case(
        "no decisions are kept of one word",
        code_of("judge.yesno('?')\nassert judge.drain_decisions() == []"),
        "passed",
        1.0,
    ),
    # --- fixtures
    Case(
        "a fixture with arguments",
        code_of("assert ledger.currency == 'CHF'", parameters="x, judge, ledger"),
        "passed",
        1.0,
        fixtures={"ledger": {"type": f"{FIXTURES}.Ledger", "currency": "CHF"}},
    ),
    Case(
        "a fixture that needs others",
        code_of(
            "assert account.ledger.currency == 'EUR' and account.x is x and account.judge is judge\n"
            "assert (account.note, account.limit) == ('none', 3)",
            parameters="x, judge, account",
        ),
        "passed",
        1.0,
        fixtures={
            "account": {"type": f"{FIXTURES}.Account"},
            "ledger": {"type": f"{FIXTURES}.Ledger"},
            "note": {"type": f"{FIXTURES}.broken"},  # not needed: the parameter has a default
        },
    ),
    Case(
        "contexts are entered",
        code_of("assert steps == ['enter b']", parameters="x, judge, steps"),
        "passed",
        1.0,
        fixtures={"steps": {"type": f"{FIXTURES}.opened", "name": "b"}},
    ),
    Case(
        "a context that fails the test when it is left",
        code_of("pass", parameters="x, judge, strict"),
        "failed",
        fixtures={"strict": {"type": f"{FIXTURES}.strict"}},
    ),
    Case(
        "a context that is content when it is left",
        code_of("x.metadata['seen'] = True", parameters="x, judge, strict"),
        "passed",
        1.0,
        fixtures={"strict": {"type": f"{FIXTURES}.strict"}},
    ),
    Case(
        "a context that fails the test when it is entered",
        code_of("pass", parameters="x, judge, shop"),
        "failed",
        fixtures={"shop": {"type": f"{FIXTURES}.refusing"}},
    ),
    Case(
        "a context that swallows what the test raises",
        code_of("raise ValueError('odd')", parameters="x, judge, cushion"),
        "passed",
        1.0,
        fixtures={"cushion": {"type": f"{FIXTURES}.Swallows"}},
    ),
    Case(
        "a fixture that cannot be made is no verdict",
        code_of("pass", parameters="x, judge, broken"),
        "void",
        fixtures={"broken": {"type": f"{FIXTURES}.broken"}},
    ),
    Case(
        "fixtures in a circle",
        code_of("pass", parameters="x, judge, first"),
        "void",
        fixtures={"first": {"type": f"{FIXTURES}.needs_second"}, "second": {"type": f"{FIXTURES}.needs_first"}},
    ),
    Case(
        "a fixture that needs what there is not",
        code_of("pass", parameters="x, judge, picky"),
        "void",
        fixtures={"picky": {"type": f"{FIXTURES}.asks_too_much"}},
    ),
    Case(
        "a fixture that there is not",
        code_of("pass", parameters="x, judge, lost"),
        "void",
        fixtures={"lost": {"type": f"{FIXTURES}.nothing_here"}},
    ),
    Case(
        "a fixture without a parameter is not made",
        code_of("pass"),
        "passed",
        1.0,
        fixtures={"broken": {"type": f"{FIXTURES}.broken"}},
    ),
    Case(
        "a rubric",
        code_of(
            """
            Config = rubric_judge.Config
            rubrics = [Config(criterion='polite', weight=3), Config(criterion='short', weight=1)]
            result = rubric_judge.evaluate('Hello.', rubrics, throw_on_failure=True)
            assert x.metadata['rubric_reward'] == result.reward == result.assert_passed() == 1.0
            assert x.metadata['rubric_scores'][0] == {'criterion': 'polite', 'rating': 1, 'score': 3.0}
            return result.reward
            """,
            parameters="x, judge, rubric_judge",
        ),
        "passed",
        1.0,
        fixtures={"rubric_judge": {"type": "thinkingbox.common.rubrics_judge.RubricJudge", "max_workers": 2}},
    ),
    Case(
        "a rubric below its threshold",
        code_of(
            "rubrics = [rubric_judge.Config(criterion='polite', weight=3)]\n"
            "rubric_judge.evaluate('Hello.', rubrics, throw_on_failure=True)",
            parameters="x, judge, rubric_judge",
        ),
        "failed",
        line=6,
        fixtures={"rubric_judge": {"type": "thinkingbox.common.rubrics_judge.RubricJudge"}},
        says="No",
    ),
    Case(
        "a rubric of nothing that is said",
        code_of(
            "RubricJudge(judge, x).evaluate(' ', [RubricJudge.Config(criterion='polite', weight=3)])",
            before="from thinkingbox.common.rubrics_judge import RubricJudge",
        ),
        "void",
    ),
    Case(
        "a penalty of more than everything",
        code_of(
            "RubricJudge.Config(criterion='rude', weight=2, is_penalty=True, penalty_type='multiplicative')",
            before="from thinkingbox.common.rubrics_judge import RubricJudge",
        ),
        "void",
    ),
    Case(
        "an answer as good as its reference",
        code_of("assert evaluator.evaluate('$125', 'bar.pdf', 'p3') is True", parameters="x, judge, evaluator"),
        "passed",
        1.0,
        evidence={"response": "It rains.", "messages": TALK},
        fixtures={"evaluator": {"type": "thinkingbox.fixtures.GeneratedAnswerEvaluator"}},
    ),
    Case(
        "an answer that is not",
        code_of("evaluator.evaluate('$125')", parameters="x, judge, evaluator"),
        "failed",
        line=5,
        evidence={"response": "It rains.", "messages": TALK},
        fixtures={"evaluator": {"type": "thinkingbox.fixtures.GeneratedAnswerEvaluator", "fail_on_mismatch": False}},
        says="No",
    ),
    Case(
        "graders",
        code_of(
            "score = match_score({'k': 1, 'l': 3}, {'k': 1, 'l': 2}, partial=True)\n"
            "return average_reward({'a': score, 'b': 1}, {'a': 1})",
            before="from thinkingbox.common.graders import average_reward, match_score",
        ),
        "passed",
        0.5,
    ),
]
