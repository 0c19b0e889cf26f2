"""Python and YAML files of tests: what is a test, what it is configured with, and the code of its check."""

import textwrap

import pytest

from tbx_envs.thinkingbox.dataset.problems import DatasetProblems
from tbx_envs.thinkingbox.dataset.test_files import PythonTestFile, read_test_file


@pytest.fixture
def python_file(tmp_path):
    def write(text, name="shop.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return read_test_file(path)

    return write


def problems_of(read, *arguments):
    with pytest.raises(DatasetProblems) as raised:
        read(*arguments)
    return [(problem.line, problem.text) for problem in raised.value.problems]


def test_a_function_is_a_test_when_its_first_statement_is_yaml(python_file):
    file = python_file('''
        """Words about the file."""
        import json

        def helper(x):
            """Says what it does."""

        def late(x, judge):
            x = 1
            """!
            query: too late
            """

        async def waits(x, judge):
            """!
            query: not called
            """

        class Holder:
            def test_inside(x, judge):
                """!
                query: not at the top
                """

        def test_first(x, judge):
            """!
            query: Hello.
            """

        def any_name(x, judge): "!query: Bye."
    ''')
    assert file.names == ("test_first", "any_name")
    assert file.test("test_first").config == {"query": "Hello."}
    assert file.test("any_name").config == {"query": "Bye."}


@pytest.mark.parametrize("nothing", ["!", "! ", "!\n  # only words", " !query: x"])
def test_a_string_without_yaml_makes_no_test(python_file, nothing):
    assert python_file(f"def test_a(x, judge):\n    {nothing!r}\n").names == ()


def test_defaults_add_up_and_count_for_the_tests_after_them(python_file):
    file = python_file('''
        """!
        scenario: one
        user_context: known to all
        init: {shop: {a: 1}}
        """
        def test_a(x, judge):
            """!
            query: a
            """
        """!
        scenario: two
        surprise: left alone
        """
        def test_b(x, judge):
            """!
            query: b
            user_context: null
            init: {shop: {b: 2}}
            """
        """!
        scenario: three
        """
    ''')
    everywhere = {"user_context": "known to all", "init": {"shop": {"a": 1}}}
    assert file.test("test_a").config == {"scenario": "one", **everywhere, "query": "a"}
    # a key of the test's own replaces the default as a whole
    own = {"query": "b", "user_context": None, "init": {"shop": {"b": 2}}}
    assert file.test("test_b").config == {"scenario": "two", "surprise": "left alone", **own}


@pytest.mark.parametrize(
    ("of_file", "of_test", "together"),
    [
        ("[a, domain:x]", "[b]", ["a", "domain:x", "b"]),
        ("[a]", None, ["a"]),
        (None, "[b]", ["b"]),
        ("[a]", "{labels: [b]}", {"labels": ["b"]}),
    ],
)
def test_tags_of_file_and_test_are_put_together_when_both_are_lists(python_file, of_file, of_test, together):
    default = f'"""!\ntags: {of_file}\n"""\n' if of_file else ""
    own = f"\n    tags: {of_test}" if of_test else ""
    file = python_file(f'{default}def test_a(x, judge):\n    """!\n    query: a{own}\n    """\n')
    assert file.test("test_a").config["tags"] == together


def test_the_code_of_a_test_is_the_file_with_the_other_tests_lines_empty(python_file):
    file = python_file('''
        import json

        @decorated
        def test_a(x, judge):
            """!
            query: a
            """
            assert 1

        WORD = "kept"
        def test_b(x, judge):
            """!
            query: b
            """
            assert 2
        def helper():
            return 3
    ''')
    a = '''import json

@decorated
def test_a(x, judge):
    """!
    query: a
    """
    assert 1

WORD = "kept"





def helper():
    return 3

__tb_test_fn = test_a
'''
    b = '''import json

@decorated






WORD = "kept"
def test_b(x, judge):
    """!
    query: b
    """
    assert 2
def helper():
    return 3

__tb_test_fn = test_b
'''
    assert (file.test("test_a").test_code, file.test("test_b").test_code) == (a, b)
    assert (file.test("test_a").line, file.test("test_b").line) == (4, 11)


@pytest.mark.parametrize("ending", ["", "\n", "\n\n"])
def test_the_code_of_a_test_keeps_how_its_file_ends(tmp_path, ending):
    path = tmp_path / "shop.py"
    path.write_text(f"def test_a(x, judge):\n    '!query: a'\ndef test_b(x, judge):\n    '!query: b'{ending}")
    file = PythonTestFile(path)
    own_b = "def test_b(x, judge):\n    '!query: b'"
    assert file.test("test_b").test_code == f"\n\n{own_b}{ending}\n__tb_test_fn = test_b\n"
    own_a = "def test_a(x, judge):\n    '!query: a'"
    assert file.test("test_a").test_code == f"{own_a}\n\n{ending}\n__tb_test_fn = test_a\n"


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("\n    query: a\n    tags: [skip]\n    ", True),
        ("\n    query: a\n    tags:\n    - other\n    - SKIP\n    ", True),
        ("{query: a, tags: [skip]}", True),
        ("\n    {query: a, tags: {skip: true}}\n    ", True),
        ('\n    "tags": [skip]\n    query: a\n    ', True),
        ("\n    query: skip it\n    init:\n      shop:\n        tags: [skip]\n    ", False),
        ("\n    query: please skip\n    tags: [skipper]\n    ", False),
        ("\n    query: |\n      tags: skip\n    ", False),
    ],
)
def test_a_test_with_the_tag_skip_is_not_known(python_file, text, skipped):
    file = python_file(f'def test_a(x, judge):\n    """!{text}"""\ndef test_b(x, judge):\n    "!query: b"\n')
    assert file.names == (("test_b",) if skipped else ("test_a", "test_b"))
    assert "test_a" not in file.test("test_b").test_code  # its lines are empty in any case


def test_a_file_may_skip_all_of_its_tests(python_file):
    file = python_file('"""!\ntags: [skip]\n"""\ndef test_a(x, judge):\n    "!query: a"\n')
    assert file.names == ()


def test_names_are_known_without_reading_yaml(python_file, monkeypatch):
    def fail(*_):
        raise AssertionError("YAML was read")

    monkeypatch.setattr("tbx_envs.thinkingbox.dataset.test_files.load_mapping", fail)
    assert python_file('def test_a(x, judge):\n    """!\n    query: [broken, skip\n    """\n').names == ("test_a",)


def test_a_test_is_read_without_reading_the_others(python_file):
    file = python_file("def test_a(x, judge):\n    '!query: ['\ndef test_b(x, judge):\n    '!query: b'\n")
    assert file.test("test_b").config == {"query": "b"}
    assert problems_of(file.test, "test_a")[0][0] == 2


def test_a_key_that_no_test_has_is_told_with_its_line(python_file):
    file = python_file('''
        def test_a(x, judge):
            """!
            query: a
            qery: b
            metadata: {}
            """
    ''')
    (first, said), (second, also) = problems_of(file.test, "test_a")
    assert (first, second) == (4, 5)
    assert "no 'qery'. Did you mean 'query'?" in said and "no 'metadata'" in also and "user_context" in also


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1; y = 2\n", 1, "share this line"),
        (
            "def test_a(x):\n    '!query: a'\n\ndef test_a(x):\n    '!query: b'\n",
            4,
            "'test_a' exists already, at line 1",
        ),
        ("def broken(:\n", 1, "this is not Python"),
        ("x = '\0'\n", None, "this is not Python"),
    ],
)
def test_a_file_whose_tests_cannot_be_told_apart_is_rejected(python_file, text, line, said):
    [(at, words)] = problems_of(python_file, text)
    assert (at, said in words) == (line, True), words


def test_all_problems_of_a_file_are_told_at_once(python_file):
    text = "a = 1; b = 2\nc = 3; d = 4\ndef t(x):\n    '!query: a'\ndef t(x):\n    '!query: a'\n"
    assert [line for line, _ in problems_of(python_file, text)] == [1, 2, 5]


@pytest.mark.parametrize(
    ("text", "said"), [("'!- a list'\n", "must be a mapping"), ("'!uid: a'\n", "uid cannot be a default")]
)
def test_defaults_that_are_none_are_told_of_every_test_after_them(python_file, text, said):
    file = python_file(f"{text}def test_a(x, judge):\n    '!query: a'\n")
    [(line, words)] = problems_of(file.test, "test_a")
    assert line == 1 and said in words


def test_strings_with_odd_escapes_are_the_datasets_own_business(python_file):
    assert python_file('PATTERN = "\\\\d"\n'.replace("\\\\", "\\")).names == ()  # warnings are errors here


def test_yaml_files_hold_tests_as_well(python_file):
    file = python_file(
        """
        # a comment
        test_cases:
        - uid: first
          scenario: shop
          query: a
          test_code: |
            def f(x, judge): pass
            __tb_test_fn = f
          surprise: left alone
        - uid: second
          tags: [skip]
        """,
        name="shop.yaml",
    )
    assert file.names == ("first",)
    test = file.test("first")
    assert test.test_code == "def f(x, judge): pass\n__tb_test_fn = f\n" and test.line == 3
    assert test.source.line_of([*test.keys, "query"]) == 5


@pytest.mark.parametrize(
    ("text", "lines", "said"),
    [
        ("test_cases: {}\n", [1], "must be a list of mappings"),
        ("other: 1\n", [1], "must be a list of mappings"),
        ("- a\n", [1], "must be a mapping"),
        ("", [1], "it is empty"),
        ("test_cases:\n- uid: 5\n- {uid: 'a:b'}\n- uid: c\n- uid: c\n", [2, 3, 5], "without a colon"),
    ],
)
def test_a_yaml_file_without_sound_tests_is_rejected(python_file, text, lines, said):
    found = problems_of(python_file, text, "shop.yaml")
    assert [line for line, _ in found] == lines and said in found[0][1]
