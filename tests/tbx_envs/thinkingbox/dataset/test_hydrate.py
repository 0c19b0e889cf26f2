"""A test and what other files say of it become one task; all that is wrong in any of them is told together."""

import datetime
import sys

import pytest

from tbx_envs.messages import Text, Turn
from tbx_envs.task import ExpectedCall, Limits
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems
from tbx_envs.thinkingbox.dataset.records import BuiltinTool, ToolChoice

SIMPLE = '''
def test_a(x, judge):
    """!
    scenario: shop
    query: Hello.
    {}
    """
'''
EVERYTHING = {
    "agent/think.yaml": """
        system_instructions: Be kind.
        unknown: left alone
        builtin_tools:
        - name: leave
          description: Ends it.
          input_schema: {type: object}
          is_end_turn: true
        - {name: say, description: Says it., input_schema: {}, direct_response: "{words}"}
        """,
    "scenario/shop.yaml": """
        world_state:
          b: {rows: [1], keep: yes, none: null}
          a: null
        tools:
        - name: look
        - {name: buy, is_end_turn: true}
        - name: pay
          override_description: Pays.
          override_arg_description: {amount: in cents}
          direct_response: Paid {amount}.
        - {name: buy, override_description: Buys.}
        bot_instructions: Rules.
        tags: [domain:d1, eval:e1, category:lost, of-scenario]
        metadata: {clock: 2025-10-01T09:00:00, of: scenario, both: scenario}
        fixtures: {f: {type: m.scenario}}
        unknown: left alone
        """,
    "test_case/conftest.yaml": "fixtures: {f: {type: m.top}, g: {type: m.top, n: 1}, h: {type: m.top}}",
    "test_case/shop/conftest.yaml": "fixtures: {g: {type: m.deeper}}",
    "test_case/shop/more/conftest.yaml": "# nothing but words",
    "test_case/shop/more/shop_a.meta.yaml": """
        $history:
          k:
          - {T: Text, role: user, content: before}
          - {T: Text, role: assistant, content: sure}
        """,
    "test_case/shop/more/shop_a.py": '''
        """!
        scenario: shop
        tags: [of-file]
        metadata: {both: test, mine: 1}
        """
        def test_all(x, judge):
            """!
            query: Hello {init[b][name]}.
            user_context: You want it.
            bot_instructions: More rules.
            max_user_sim_turns: 3
            max_agent_sim_turns: 0
            format_query: true
            history: "k:0:"
            tags: [of-test, domain:d2, category:c]
            init:
              c: {}
              b:
                rows: [2]
                golden_test_case:
                  tool_interactions:
                  - {tool: look, parameters: {$filter: a eq 'b', none: null}}
                  - {tool: pay, parameters: {amount: "25.00"}}
              a:
                golden_test_case:
                  tool_interactions:
                  - {tool: buy, parameters: null}
                  - {tool: buy}
            """
        ''',
}


def problems_of(dataset, uid):
    with pytest.raises(DatasetProblems) as raised:
        dataset.task(uid)
    return [(problem.path.name, problem.line, problem.text) for problem in raised.value.problems]


def test_a_task_has_all_that_its_files_say(written):
    task = Dataset(written(EVERYTHING)).task("shop_a.py:test_all")
    assert (task.uid, task.dataset, task.path, task.line) == (
        "shop_a.py:test_all",
        "checkout",
        "test_case/shop/more/shop_a.py",
        6,
    )
    assert (task.scenario, task.agent, task.family, task.split) == ("shop", "think", "shop", "train")
    assert (task.query, task.user_context, task.format_query) == ("Hello {init[b][name]}.", "You want it.", True)
    assert (task.bot_instructions, task.test_instructions) == ("Rules.\nMore rules.", "More rules.")
    assert task.system_instructions == "Be kind."
    assert task.builtin_tools == (
        BuiltinTool("leave", "Ends it.", {"type": "object"}, None, True),
        BuiltinTool("say", "Says it.", {}, "{words}", False),
    )
    assert task.tools == (  # the last entry of a name, at the place of the first
        ToolChoice("look"),
        ToolChoice("buy", "Buys."),
        ToolChoice("pay", "Pays.", {"amount": "in cents"}, "Paid {amount}."),
    )
    assert task.limits == Limits(user_turns=3, agent_turns=0)
    assert task.tags == ("domain:d2", "eval:e1", "category:c", "of-scenario", "of-file", "of-test")
    assert task.fixtures == {"f": {"type": "m.scenario"}, "g": {"type": "m.deeper"}, "h": {"type": "m.top"}}
    assert task.history == (Text("user", "before"), Turn("sure"))
    assert (task.clock, task.clock_runs) == (datetime.datetime(2025, 10, 1, 9), False)
    assert task.metadata == {"clock": "2025-10-01T09:00:00", "of": "scenario", "both": "test", "mine": 1}


def test_servers_are_those_of_the_scenario_then_those_of_the_test(written):
    task = Dataset(written(EVERYTHING)).task("shop_a.py:test_all")
    assert task.servers == ("b", "a", "c") == tuple(task.init)
    assert task.init["b"]["rows"] == [1, 2] and task.init["b"]["keep"] is True and task.init["b"]["none"] is None
    assert task.init["c"] == {}


def test_expected_calls_are_the_golden_ones_untouched_server_by_server(written):
    task = Dataset(written(EVERYTHING)).task("shop_a.py:test_all")
    assert task.expected_servers == ("b", "b", "a", "a")
    assert task.expected_calls == (
        ExpectedCall("look", {"$filter": "a eq 'b'", "none": None}),
        ExpectedCall("pay", {"amount": "25.00"}),
        ExpectedCall("buy", {}),
        ExpectedCall("buy", {}),
    )


def test_what_a_test_does_not_say_has_the_formats_defaults(written):
    task = Dataset(written({"test_case/a.py": SIMPLE.format("")})).task("a.py:test_a")
    assert task.limits == Limits(user_turns=10, agent_turns=sys.maxsize)
    assert (task.user_context, task.test_instructions, task.bot_instructions, task.format_query) == (
        None,
        None,
        "",
        False,
    )
    assert (task.tags, task.fixtures, task.history, task.metadata, task.clock) == ((), {}, (), {}, None)
    assert task.init == {"shop": {}} and task.expected_calls == ()


@pytest.mark.parametrize(
    ("metadata", "clock", "runs"),
    [
        ("{clock: 2025-10-01}", datetime.datetime(2025, 10, 1), False),
        ("{clock: 2025-10-01 18:30:00, clock_runs: true}", datetime.datetime(2025, 10, 1, 18, 30), True),
        ("{clock: '2025-10-01T18:30:00+02:00'}", datetime.datetime.fromisoformat("2025-10-01T18:30:00+02:00"), False),
        ("{clock: null}", None, False),
    ],
)
def test_a_clock_stands_in_metadata(written, metadata, clock, runs):
    files = {"test_case/a.py": f'"""!\nmetadata: {metadata}\n"""\n' + SIMPLE.format("")}
    task = Dataset(written(files)).task("a.py:test_a")
    assert (task.clock, task.clock_runs) == (clock, runs)


def test_the_agent_is_think_or_the_only_one_or_the_one_that_was_asked_for(written):
    test = {"test_case/a.py": SIMPLE.format("")}
    other = "system_instructions: Other.\nbuiltin_tools: []"
    folder = written({**test, "agent/other.yaml": other})
    assert Dataset(folder).task("a.py:test_a").agent == "think"
    assert Dataset(folder, agent="other").task("a.py:test_a").system_instructions == "Other."
    (folder / "agent/think.yaml").unlink()
    assert Dataset(folder).task("a.py:test_a").agent == "other"
    [(where, _, said)] = problems_of(Dataset(folder, agent="othr"), "a.py:test_a")
    assert where == "agent" and "no agent 'othr'. Did you mean 'other'?" in said
    (folder / "agent/other.yaml").unlink()
    assert "There is none." in problems_of(Dataset(folder), "a.py:test_a")[0][2]


def test_all_problems_of_all_files_of_a_task_are_told_together(written):
    files = {
        "agent/think.yaml": "builtin_tools: [{name: 5}]",
        "scenario/shop.yaml": "world_state: {}\ntools:\n- name: a\n- other: b\ntags: ['domain:']\n",
        "test_case/conftest.yaml": "fixtures:\n  f: {n: 1}\n",
        "test_case/a.meta.yaml": "$history: {k: []}",
        "test_case/a.py": '''
            def test_a(x, judge):
                """!
                scenario: shop
                query: [5]
                max_agent_sim_turns: -1
                tags: [1]
                """
            def test_b(x, judge):
                """!
                scenario: shop
                query: b
                history: "other:0:"
                """
            ''',
    }
    dataset = Dataset(written(files))
    elsewhere = [
        ("think.yaml", 1, "'system_instructions' is missing; add it"),
        ("think.yaml", 1, "'builtin_tools.0.name': input should be a valid string; it is 5"),
        ("think.yaml", 1, "'builtin_tools.0.description' is missing; add it"),
        ("think.yaml", 1, "'builtin_tools.0.input_schema' is missing; add it"),
        ("conftest.yaml", 2, "'fixtures.f.type' is missing; add it"),
    ]
    scenario = [
        ("shop.yaml", 4, "'tools.1.name' is missing; add it"),
        ("shop.yaml", 5, "tag 'domain:' has no value after the colon; give one"),
    ]
    assert problems_of(dataset, "a.py:test_a") == [
        *elsewhere,
        ("a.py", 4, "'query': input should be a valid string; it is [5]"),
        ("a.py", 5, "'max_agent_sim_turns': input should be greater than or equal to 0; it is -1"),
        ("a.py", 6, "tag 1 is not text; write text"),
        *scenario,
    ]
    history = ("a.py", 12, "history 'other:0:': no group 'other' in a.meta.yaml. It has 'k'.")
    assert problems_of(dataset, "a.py:test_b") == [*elsewhere, *scenario, history]


def test_a_scenario_that_is_not_there_is_told_with_near_ones(written):
    dataset = Dataset(written({"test_case/a.py": SIMPLE.format("").replace("shop", "shpo")}))
    assert problems_of(dataset, "a.py:test_a") == [
        ("a.py", 3, "there is no scenario 'shpo'. Did you mean 'shop'? There is shop.")
    ]
    outside = Dataset(written({"test_case/a.py": SIMPLE.format("").replace("shop", "../agent/think")}))
    assert "no scenario" in problems_of(outside, "a.py:test_a")[0][2]


def test_a_test_without_scenario_or_query_is_told_so(written):
    dataset = Dataset(written({"test_case/a.py": 'def test_a(x, judge):\n    """!\n    init: {}\n    """\n'}))
    assert [said for _, _, said in problems_of(dataset, "a.py:test_a")] == [
        "'scenario' is missing; add it",
        "'query' is missing; add it",
    ]


@pytest.mark.parametrize(
    ("scenario", "own", "said"),
    [
        (
            "world_state: {shop: [1]}\ntools: []",
            "init: {shop: {a: 1}}",
            "scenario 'shop' gives server 'shop' [1]; it must be a mapping",
        ),
        ("world_state: {shop: null}\ntools: []", "", "gives server 'shop' None; it must be a mapping, {} when"),
        (
            "world_state: {shop: {}}\ntools: [{name: leave}]",
            "",
            "leave: a tool of scenario 'shop' and of agent 'think'",
        ),
        ("world_state: {}\ntools: []\nmetadata: {clock: noon}", "", "metadata.clock is 'noon'; write a moment"),
        (
            "world_state: {}\ntools: []\nmetadata: {clock: 5, clock_runs: 1}",
            "",
            "metadata.clock_runs is 1; write true or false",
        ),
        (
            "world_state: {}\ntools: []",
            "init: {a: {golden_test_case: {tool_interactions: [{parameters: {}}]}}}",
            "call 0 of golden_test_case of server 'a'",
        ),
        (
            "world_state: {}\ntools: []",
            "init: {a: {golden_test_case: {tool_interactions: [{tool: a, parameters: [1]}]}}}",
            "wanted {tool: name, parameters: mapping}",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_told(written, scenario, own, said):
    files = {
        "agent/think.yaml": "system_instructions: a\nbuiltin_tools: [{name: leave, description: b, input_schema: {}}]",
        "scenario/shop.yaml": scenario,
        "test_case/a.py": SIMPLE.format(own),
    }
    found = problems_of(Dataset(written(files)), "a.py:test_a")
    assert [(name, line) for name, line, _ in found] == [("a.py", 1)] * len(found)
    assert any(said in text for _, _, text in found), found


def test_what_only_looks_like_golden_calls_is_a_servers_own_business(written):
    golden = "a: {golden_test_case: 5}, b: {golden_test_case: {tool_interactions: null}}, c: {golden_test_case: null}"
    own = f"init: {{{golden}}}"
    assert Dataset(written({"test_case/a.py": SIMPLE.format(own)})).task("a.py:test_a").expected_calls == ()


def test_tags_are_held_against_the_taxonomy_of_the_dataset(written):
    files = {
        "tag_taxonomy.yaml": "domain: {MISC: misc}\neval: {}\n",
        "scenario/shop.yaml": "world_state: {}\ntools: []\ntags: ['domain:mics', 'category:any', 'eval:any']",
        "test_case/a.py": SIMPLE.format("tags: ['domain:misc']"),
    }
    dataset = Dataset(written(files))
    wrong = "tag 'domain:mics' is not in the taxonomy. Did you mean 'misc'? Known: misc."
    assert problems_of(dataset, "a.py:test_a") == [("shop.yaml", 3, wrong)]


def test_yaml_tests_are_tasks_as_well(written):
    files = {
        "test_case/a.yaml": """
            test_cases:
            - uid: first one
              scenario: shop
              query: Hello.
              history: {key: k, start: 0, end: ""}
              metadata: {clock: 2025-10-01}
              test_code: __tb_test_fn = print
            - uid: second
              scenario: shop
            """,
        "test_case/a.meta.yaml": "$history: {k: [{T: Text, role: user, content: before}]}",
    }
    dataset = Dataset(written(files))
    task = dataset.task("a.yaml:first one")
    assert task.test_code == "__tb_test_fn = print" and task.line == 2
    assert task.history == (Text("user", "before"),) and task.clock == datetime.datetime(2025, 10, 1)
    assert problems_of(dataset, "a.yaml:second") == [
        ("a.yaml", 8, "'query' is missing; add it"),
        ("a.yaml", 8, "'test_code' is missing; add it"),
    ]
