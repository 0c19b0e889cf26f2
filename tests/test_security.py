"""docs/security.md is held to account: every promise names a test that is there, and some are proved here."""

import ast
import importlib.resources
import pathlib
import pickle
import re
import shutil

import pytest

from tbx_envs.chat.template_text import FIXED_NOW, TemplateText
from tbx_envs.errors import CheckpointError, ConfigError
from tbx_envs.testing.byte_tokenizer import byte_tokenizer
from tbx_jax.policies.weights import load_policy

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| `(?P<file>tests/[\w/]+\.py)::(?P<test>\w+)` \|$", re.MULTILINE)


def promises():
    section = PAGE.split("## What is enforced")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [(line, ROW.match(line)) for line in rows]


def test_every_promise_names_a_test_that_is_there():
    assert len(promises()) > 20
    for line, row in promises():
        assert row is not None, f"not a promise and one test: {line}"
        tree = ast.parse((ROOT / row["file"]).read_text(encoding="utf-8"))
        assert row["test"] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, line


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for message in messages %}{{ message.__class__.__base__ }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_variables(escape):
    made = TemplateText(byte_tokenizer("[" + escape + "]"), {}, FIXED_NOW)
    said = [{"role": "user", "content": "Hi"}]
    try:
        rendered = made.render(said)
    except ConfigError:
        rendered = "[]"  # the sandbox said no; otherwise what is unsafe is undefined and renders as nothing
    assert rendered == "[]" and said == [{"role": "user", "content": "Hi"}]


# Calls by which a file could make objects or run code, and the files that may: what they read is their own.
MAY = {
    # A copy of a list of tools, made and read in memory.
    "tbx_envs/tools/listing.py": {"pickle.loads"},
    # Programs that run code of datasets, which is what they are for.
    "tbx_envs/thinkingbox/grading/worker/check_server/running.py": {"exec"},
    "tbx_envs/thinkingbox/servers/fork_server.py": {"exec"},
}
MAKES_OBJECTS = re.compile(
    r"(\w+\.)*(eval|exec|unsafe_load|full_load|Unpickler|read_pickle)"
    r"|(pickle|cPickle|dill|cloudpickle|joblib|marshal|torch|shelve)\.(load|loads|open)"
)
# A file without any of these words is not parsed.
MENTIONED = re.compile(r"pickle|dill|joblib|marshal|shelve|eval\(|exec\(|yaml|torch|trust_remote|(np|numpy)\.load")


def calls_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill", "cloudpickle", "joblib", "marshal"):
            yield f"{node.module}.loads", {}


def unsafe(name, given):
    if name in ("yaml.load", "yaml.load_all"):
        return given.get("Loader") in (None, "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CLoader")
    if name in ("np.load", "numpy.load", "jnp.load"):
        return given.get("allow_pickle", "False") != "False"
    return bool(MAKES_OBJECTS.fullmatch(name)) or given.get("trust_remote_code", "False") != "False"


def test_nothing_of_ours_unpickles_a_file_or_makes_objects_of_yaml():
    found = {}
    for package in ("tbx_envs", "tbx_jax"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.read_text("utf-8")
            tree = ast.parse(source if MENTIONED.search(source) else "")
            if calls := {name for name, given in calls_of(tree) if unsafe(name, given)}:
                found[file.relative_to(ROOT).as_posix()] = calls
    assert found == MAY


@pytest.mark.parametrize(
    "line",
    [
        *("pickle.load(file)", "yaml.load(text)", "np.load(path, allow_pickle=True)", "torch.load(path)", "eval(text)"),
        *("AutoTokenizer.from_pretrained(name, trust_remote_code=True)", "yaml.load(text, Loader=yaml.Loader)"),
        *("yaml.unsafe_load(text)", "from pickle import loads", "pickle.Unpickler(file)"),
    ],
)
def test_that_test_finds_what_it_looks_for(line):
    assert MENTIONED.search(line)
    assert any(unsafe(name, given) for name, given in calls_of(ast.parse(line)))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the file was unpickled",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "model.safetensors"])
def test_weights_in_a_pickle_file_are_refused_unread(tmp_path, name):
    nano = importlib.resources.files("tbx_jax.policies") / "nano"
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(str(nano / file), tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        load_policy(tmp_path)
