"""The cache never changes what is read, only how long that takes."""

import json

import pytest

from tbx_envs.thinkingbox.dataset import file_cache
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.file_cache import cache_folder, cached_json
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText, load_yaml

TEXT = "x" * file_cache.MIN_CHARACTERS


class Reader:
    """Gives a value, and counts how often it was asked."""

    def __init__(self, value):
        self.value, self.times = value, 0

    def __call__(self, text):
        self.times += 1
        return self.value


def entries(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("value", [None, {"b": [1, 2.5, None], "a": "é\ud800"}, []])
def test_a_text_is_read_once(own_cache, value):
    reader = Reader(value)
    assert [cached_json("kind", TEXT, reader) for _ in range(3)] == [value] * 3
    assert json.dumps(cached_json("kind", TEXT, reader)) == json.dumps(value)  # keys keep their order
    assert reader.times == 1 and len(entries(own_cache)) == 1


def test_another_text_or_another_reader_is_another_entry(own_cache):
    assert cached_json("kind", TEXT, Reader(1)) == 1
    assert cached_json("kind", TEXT + ".", Reader(2)) == 2
    assert cached_json("other", TEXT, Reader(3)) == 3
    assert len(entries(own_cache)) == 3


@pytest.mark.parametrize("damage", [b"", b"x", b"{}", b"0" * 64 + b"\n1"])
def test_a_damaged_entry_counts_as_missing_and_is_replaced(own_cache, damage):
    cached_json("kind", TEXT, Reader(1))
    [entry] = entries(own_cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    reader = Reader(1)
    assert cached_json("kind", TEXT, reader) == 1 and reader.times == 1
    assert entry.read_bytes() == whole


def test_an_entry_with_a_changed_value_is_not_believed(own_cache):
    cached_json("kind", TEXT, Reader({"a": 1}))
    [entry] = entries(own_cache)
    entry.write_bytes(entry.read_bytes().replace(b'"a":1', b'"a":2'))
    assert cached_json("kind", TEXT, Reader({"a": 1})) == {"a": 1}


def test_what_cannot_be_read_is_not_kept(own_cache):
    def fail(text):
        raise ValueError(text[:1])

    for _ in range(2):
        with pytest.raises(ValueError, match=r"x"):
            cached_json("kind", TEXT, fail)
    assert entries(own_cache) == []


def test_without_a_place_to_write_everything_works(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TBX_CACHE", str(tmp_path / "file" / "below"))
    reader = Reader(1)
    assert [cached_json("kind", TEXT, reader) for _ in range(2)] == [1, 1] and reader.times == 2


def test_a_disk_that_is_full_leaves_no_piece_behind(own_cache, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(file_cache.os, "replace", full)
    assert cached_json("kind", TEXT, Reader(1)) == 1 and entries(own_cache) == []


def test_a_short_text_is_not_worth_an_entry(own_cache):
    assert cached_json("kind", "short", Reader(1)) == 1 and not own_cache.exists()


def test_where_entries_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(file_cache.Path, "home", lambda: tmp_path)
    assert cache_folder({}) == tmp_path / ".cache/tbx/datasets"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}).as_posix() == "/x/tbx/datasets"
    assert cache_folder({"XDG_CACHE_HOME": "/x", "TBX_CACHE": "/y"}).as_posix() == "/y/datasets"
    assert cache_folder({"TBX_CACHE": "off"}) is None

    def homeless():
        raise RuntimeError("no home")

    monkeypatch.setattr(file_cache.Path, "home", homeless)
    assert cache_folder({}) is None


def test_yaml_from_the_cache_is_the_yaml_that_was_read(own_cache, tmp_path):
    text = "a: 2025-10-01\nb: {1: .5}\nc: |\n" + "  words\n" * 200
    first = load_yaml(YamlText(tmp_path / "a.yaml", text))
    assert entries(own_cache) and load_yaml(YamlText(tmp_path / "b.yaml", text, 7)) == first


def test_an_edited_file_gives_another_task_and_nothing_else_is_read_again(written, own_cache):
    words = "very " * 300
    test = 'def test_{0}(x, judge):\n    """!\n    scenario: shop\n    query: {1}{2}\n    """\n'
    folder = written({"test_case/a.py": test.format("a", words, "old") + test.format("b", words, "same")})
    before = Dataset(folder)
    assert [before.task(f"a.py:test_{name}").query[-4:].strip() for name in "ab"] == ["old", "same"]
    kept = entries(own_cache)
    path = folder / "test_case/a.py"
    path.write_text(path.read_text().replace("old", "new"))
    after = Dataset(folder)
    assert [after.task(f"a.py:test_{name}").query[-4:].strip() for name in "ab"] == ["new", "same"]
    assert before.task("a.py:test_a").query.endswith("old")  # what a process has read stays
    assert len(kept) == 2 and len(entries(own_cache)) == 3
