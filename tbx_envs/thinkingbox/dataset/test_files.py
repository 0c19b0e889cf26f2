"""Test files: Python files whose functions begin with a string of YAML, and YAML files of tests.

A Python file is parsed with `ast`, never imported, and only its top level is read. A string that begins with `!` is
YAML: on its own it sets defaults for the tests after it, and as the first statement of a function it makes that
function a test:

    '''!
    scenario: shop
    '''
    def test_a(x, judge):
        '''!
        query: Hello.
        '''
        assert x.effects

Names are listed without reading any YAML, and a test is read without reading the others.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tbx_envs.errors import did_you_mean
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems, Problem, problem
from tbx_envs.thinkingbox.dataset.tags import is_skipped
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_mapping, read_text

# Keys in the YAML of a test function.
FUNCTION_KEYS = (
    *("scenario", "query", "user_context", "max_user_sim_turns", "max_agent_sim_turns"),
    *("bot_instructions", "history", "init", "format_query", "tags"),
)
# The name by which a check finds its function.
TEST_FUNCTION = "__tb_test_fn"


@dataclasses.dataclass(frozen=True, slots=True)
class RawTest:
    """One test of a test file.

    Attributes:
        name: name within the file.
        config: keys and values of its YAML, with the file's defaults.
        test_code: code that the check executes.
        line: first line of the test.
        source: YAML that `config` was read from, to find lines in.
        keys: keys that lead to `config` in the source.
    """

    name: str
    config: Mapping[str, Any]
    test_code: str
    line: int
    source: YamlText
    keys: tuple[str | int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Quoted:
    """YAML in a string.

    Attributes:
        text: text after the `!`, with its indentation.
        line: line in the file where it begins.
    """

    text: str
    line: int

    def source(self, path: Path) -> YamlText:
        return YamlText(path, textwrap.dedent(self.text), self.line)


@dataclasses.dataclass(frozen=True, slots=True)
class _Function:
    """A test function.

    Attributes:
        first_line, last_line: its lines in the file, from 1.
        yaml: its YAML.
        num_defaults: number of strings of defaults before it.
    """

    first_line: int
    last_line: int
    yaml: _Quoted
    num_defaults: int


class PythonTestFile:
    """A Python file of tests.

    Args:
        path: path of the file, which is read once.

    Attributes:
        path: path of the file.
        names: names of the tests, in order, without those tagged `skip`.

    Raises:
        DatasetProblems: the file is not Python, or its tests cannot be distinguished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = read_text(path)
        self._functions: dict[str, _Function] = {}
        self._defaults: list[_Quoted] = []
        self._merged: dict[int, dict[str, Any]] = {}
        self._find_tests(_statements(path, self._text))
        self.names = tuple(name for name, function in self._functions.items() if not self._is_skipped(function))

    def test(self, name: str) -> RawTest:
        """One test.

        Raises:
            DatasetProblems: its YAML or the defaults cannot be used.
        """
        function = self._functions[name]
        source = function.yaml.source(self.path)
        return RawTest(name, self._config(function, source), self._test_code(name), function.first_line, source)

    def _find_tests(self, statements: list[ast.stmt]) -> None:
        problems = []
        last_line = 0
        for node in statements:
            if node.lineno <= last_line:
                text = "two statements share this line, so a test cannot be cut out; put each on a line of its own"
                problems.append(Problem(self.path, node.lineno, text))
            last_line = node.end_lineno or node.lineno
            if (defaults := _yaml_of(node)) is not None:
                self._defaults.append(defaults)
            elif isinstance(node, ast.FunctionDef) and (found := _yaml_of(node.body[0])) is not None:
                if node.name in self._functions:
                    first = self._functions[node.name].first_line
                    text = f"test '{node.name}' exists already, at line {first}; give one of them another name"
                    problems.append(Problem(self.path, node.lineno, text))
                self._functions[node.name] = _Function(node.lineno, last_line, found, len(self._defaults))
        if problems:
            raise DatasetProblems(problems)

    def _config(self, function: _Function, source: YamlText) -> dict[str, Any]:
        config, own = self._merged_defaults(function.num_defaults), load_mapping(source, "a test's YAML")
        unknown = [
            Problem(
                self.path,
                source.line_of([key]),
                f"a test has no '{key}'.{did_you_mean(key, FUNCTION_KEYS)} It has {', '.join(FUNCTION_KEYS)}.",
            )
            for key in own
            if key not in FUNCTION_KEYS
        ]
        if unknown:
            raise DatasetProblems(unknown)
        default_tags, own_tags = config.get("tags"), own.get("tags")
        if isinstance(default_tags, list) and isinstance(own_tags, list):
            own = {**own, "tags": [*default_tags, *own_tags]}
        return {**config, **own}

    def _merged_defaults(self, number: int) -> dict[str, Any]:
        """The first `number` strings of defaults, merged so that later ones win; read once."""
        if number not in self._merged:
            defaults: dict[str, Any] = {}
            for source in (quoted.source(self.path) for quoted in self._defaults[:number]):
                given = load_mapping(source, "a file's YAML of defaults")
                if own := sorted({"uid", "test_code"} & set(given)):
                    text = f"{' and '.join(own)} cannot be a default, since the function gives it; remove it"
                    raise problem(self.path, source.line_of(own[:1]), text)
                defaults.update(given)
            self._merged[number] = defaults
        return self._merged[number]

    def _is_skipped(self, function: _Function) -> bool:
        """Reads YAML only if it may contain a tag `skip`. Invalid YAML is reported when the test is read."""
        if not any(map(_may_skip, [function.yaml, *self._defaults[: function.num_defaults]])):
            return False
        try:
            return is_skipped(self._config(function, function.yaml.source(self.path)).get("tags"))
        except DatasetProblems:
            return False

    @functools.cached_property
    def _without_tests(self) -> str:
        """The file with the lines of all tests emptied."""
        lines = self._text.split("\n")
        for function in self._functions.values():
            lines[function.first_line - 1 : function.last_line] = [""] * (function.last_line - function.first_line + 1)
        return "\n".join(lines)

    @functools.cached_property
    def _starts(self) -> tuple[list[int], list[int]]:
        """Start of each line, in the file and in the file without tests; and one more entry for the end."""
        return _line_starts(self._text), _line_starts(self._without_tests)

    def _test_code(self, name: str) -> str:
        """The file with the other tests' lines emptied, which keeps line numbers, and the test's name at the end."""
        function = self._functions[name]
        starts, bare_starts = self._starts
        first, after = function.first_line - 1, function.last_line
        before = self._without_tests[: bare_starts[first]]
        own = self._text[starts[first] : starts[after]]
        return f"{before}{own}{self._without_tests[bare_starts[after] :]}\n{TEST_FUNCTION} = {name}\n"


class YamlTestFile:
    """A YAML file of tests: `test_cases`, a list of mappings with `uid`, `test_code` and the other keys of a test.

    Args:
        path: path of the file, which is read once.

    Attributes:
        path: path of the file.
        names: names of the tests, in order, without those tagged `skip`.

    Raises:
        DatasetProblems: the file has no such list, or its tests cannot be distinguished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = YamlText(path, read_text(path))
        cases = load_mapping(self._source, "a test file").get("test_cases")
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
            text = "'test_cases' must be a list of mappings; move YAML files without tests out of test_case/"
            raise problem(path, self._source.line_of(["test_cases"]), text)
        self._cases: dict[str, int] = {}
        problems = []
        for number, case in enumerate(cases):
            name = case.get("uid")
            line = self._source.line_of(["test_cases", number])
            if not isinstance(name, str) or not name or ":" in name:
                text = f"a test's uid must be text without a colon; it is {name!r}"
                problems.append(Problem(path, line, text))
            elif name in self._cases:
                problems.append(Problem(path, line, f"uid '{name}' exists already; give one of them another"))
            else:
                self._cases[name] = number
        if problems:
            raise DatasetProblems(problems)
        self._read = cases
        self.names = tuple(name for name, number in self._cases.items() if not is_skipped(cases[number].get("tags")))

    def test(self, name: str) -> RawTest:
        """One test; missing keys are reported when it is validated."""
        number = self._cases[name]
        keys = ("test_cases", number)
        case = self._read[number]
        return RawTest(name, case, case.get("test_code") or "", self._source.line_of(keys), self._source, keys)


TestFile = PythonTestFile | YamlTestFile


def read_test_file(path: Path) -> TestFile:
    """The file of tests, by its ending."""
    return PythonTestFile(path) if path.suffix == ".py" else YamlTestFile(path)


def _statements(path: Path, text: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about strings such as "\d" in the dataset's code
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise problem(path, line, f"this is not Python: {getattr(error, 'msg', error)}") from error


def _yaml_of(node: ast.stmt) -> _Quoted | None:
    """The YAML of a statement that is a string beginning with `!`; None for any other statement.

    A string that holds only comments is not YAML.
    """
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return None
    text = node.value.value
    if not (isinstance(text, str) and text.startswith("!") and re.search(r"^\s*[^\s#]", text[1:], re.MULTILINE)):
        return None
    return _Quoted(text[1:], node.value.lineno)


def _line_starts(text: str) -> list[int]:
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    return [*starts, len(text)]


def _may_skip(quoted: _Quoted) -> bool:
    """False only if the YAML certainly has no tag `skip`.

    In plain block style, all keys of the top level have the indentation of the first one.
    """
    text = quoted.text
    if not re.search(r"\bskip\b", text, re.IGNORECASE):
        return False
    first = re.search(r"^([ \t]*)([^\s#].*)$", text, re.MULTILINE)
    if first is None or first.start() == 0 or not re.match(r"[A-Za-z_]\w*:", first[2]):
        return True  # not plain block style, or it begins right after the `!`
    return bool(re.search(rf"^{first[1]}[\"']?tags\b", text, re.MULTILINE))
