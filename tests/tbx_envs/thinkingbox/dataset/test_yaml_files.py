"""YAML becomes JSON values, and what is wrong is told with its line in the file."""

import pytest

from tbx_envs.thinkingbox.dataset.problems import DatasetProblems
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_mapping, load_yaml, read_text


def nested_aliases(pattern):
    """300 bytes that stand for 9^8 values."""
    lines = ["a0: &a0 {x: y}"]
    for depth in range(1, 9):
        lines.append(f"a{depth}: &a{depth} {pattern.format(', '.join([f'*a{depth - 1}'] * 9))}")
    return "\n".join(lines)


def load(tmp_path, text, first_line=1):
    return load_yaml(YamlText(tmp_path / "a.yaml", text, first_line))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# words", None),
        ("a: 2025-10-01", {"a": "2025-10-01"}),
        ("a: 2025-10-01 09:30:00", {"a": "2025-10-01T09:30:00"}),
        (
            "{2: a, 1.5: b, true: c, ~: d, 2025-10-01: e}",
            {"2": "a", "1.5": "b", "true": "c", "null": "d", "2025-10-01": "e"},
        ),
        ("a: &x {b: [1, 2.0, yes, ~]}\nc: *x", {"a": {"b": [1, 2.0, True, None]}, "c": {"b": [1, 2.0, True, None]}}),
        ("a: !!omap [b: 1]", {"a": [["b", 1]]}),
        ("$filter: 'é \\ud83d'", {"$filter": "é \\ud83d"}),
    ],
)
def test_yaml_becomes_what_json_can_hold(tmp_path, text, value):
    assert load(tmp_path, text) == value


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb: [1", 11, "this is not YAML"),
        ("a: 1\nb: }", 11, "this is not YAML"),
        ("a: !!python/object:os.system 1", 10, "this is not YAML"),
        ("a: 2025-13-45", 10, "this is not YAML"),
        ("a: \x01", 10, "this is not YAML"),
        ("a:\n- 1\n- {b: .nan}", 12, "'a.1.b' is nan, which has no JSON form"),
        ("a:\n  b: -.inf", 11, "'a.b' is -inf"),
        ("x: 1\na: !!binary aGVsbG8=", 11, "which has no JSON form"),
        ("a: !!set {b}", 10, "which has no JSON form"),
        ("a:\n  b: &x\n    c: *x", 12, "an alias inside of the value that it names"),
        (nested_aliases("[{}]"), 10, "aliases in it stand for more than 100,000 values"),
        (nested_aliases("{{<<: [{}]}}"), 10, "aliases in it stand for more than 100,000 values"),
        ("[" * 5000, 10, "this is not YAML"),
        ("[" * 900 + "]" * 900, 10, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_or_no_json_is_told_with_its_line(tmp_path, text, line, said):
    with pytest.raises(DatasetProblems) as raised:
        load(tmp_path, text, first_line=10)
    [problem] = raised.value.problems
    assert (problem.line, said in problem.text) == (line, True), problem


def test_a_mapping_must_be_one(tmp_path):
    source = YamlText(tmp_path / "a.yaml", "- 1")
    with pytest.raises(DatasetProblems, match=r"a\.yaml line 1: a scenario must be a mapping .* it is a list"):
        load_mapping(source, "a scenario")


def test_lines_are_found_as_far_as_the_way_leads(tmp_path):
    source = YamlText(tmp_path / "a.yaml", "a:\n  b:\n  - x\n  - c: 1\n    d: 2\n", first_line=7)
    ways = {
        (): 7,
        ("a",): 7,
        ("a", "b"): 8,
        ("a", "b", 1): 10,
        ("a", "b", 1, "d"): 11,
        ("a", "b", 5, "d"): 8,
        ("z",): 7,
    }
    assert {way: source.line_of(way) for way in ways} == ways
    assert YamlText(tmp_path / "a.yaml", "a: [", 7).line_of(["a"]) == 7  # no YAML at all


def test_a_file_that_is_not_there_or_no_text_is_a_problem(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    for name, said in (
        ("none.yaml", "there is no such file"),
        ("bytes.yaml", "cannot be read"),
        (".", "cannot be read"),
    ):
        with pytest.raises(DatasetProblems, match=said):
            read_text(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.yaml").write_text("\ufeffa: 1", encoding="utf-8")
    assert read_text(tmp_path / "a.yaml") == "a: 1"


def test_aliases_may_repeat_as_much_as_a_file_without_them_could_hold(tmp_path):
    block = "a: &a [" + ", ".join(["1"] * 1000) + "]\n"
    value = load(tmp_path, block + "\n".join(f"b{number}: *a" for number in range(90)))
    assert len(value) == 91 and all(len(item) == 1000 for item in value.values())
