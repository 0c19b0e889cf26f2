"""Policies of the Hugging Face Hub, downloaded by `huggingface_hub` itself from a small Hub on loopback."""

import hashlib
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import urllib.parse

import jax
import numpy as np
import pytest
from tiny_policy import SAMPLING, build_tiny

from tbx_envs.commands.evaluate import policy_fingerprint
from tbx_envs.errors import CheckpointError
from tbx_jax.policies import hub_policy
from tbx_jax.policies.weights import load_policy, policy_folder, save_policy
from tbx_jax.serving.policy_app import opened_service

WANTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
WANTED |= {"tbx_checksums.json"}
# What repositories hold besides.
OTHERS = ("README.md", "consolidated.safetensors", "onnx/model.safetensors", "pytorch_model.bin", "modeling.py")
FIRST, SECOND = "1" * 40, "2" * 40


class Hub(http.server.ThreadingHTTPServer):
    """The part of the Hub's API that a download asks for.

    Attributes:
        commits: commit hash -> path in the repository -> content; all of `org/tiny`.
        refs: branches and tags -> commit hash.
        asked: (method, path) of every request.
    """

    def __init__(self, commits):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.commits, self.refs, self.asked = commits, {"main": FIRST}, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        match urllib.parse.unquote(self.path).partition("?")[0].strip("/").split("/", 5):
            case "api", "models", "org", "gated", *_:
                self.say(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            case "api", "models", "org", "tiny", "revision" | "tree" as what, revision:
                commit = self.server.refs.get(revision, revision)
                if commit not in self.server.commits:
                    self.say(404, {"error": "revision"}, {"X-Error-Code": "RevisionNotFound"})
                elif what == "revision":
                    self.say(200, {"id": "org/tiny", "sha": commit})
                else:
                    files = self.server.commits[commit].items()
                    tree = [{"type": "file", "path": path, "size": len(b), "oid": etag(b)} for path, b in files]
                    self.say(200, tree)
            case "org", "tiny", "resolve", commit, *path:
                content = self.server.commits[commit]["/".join(path)]
                self.say(200, content, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit})
            case _:
                self.say(404, {"error": "repository"}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def say(self, status, body, headers=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


def etag(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def hub(tiny_folder):
    """A Hub with two commits of `org/tiny`: the tiny policy among other files, and the same without a tokenizer."""
    files = {path.name: path.read_bytes() for path in pathlib.Path(tiny_folder).iterdir()}
    assert files.keys() == WANTED
    others = {name: name.encode() for name in OTHERS}
    second = {"config.json": b'{"model_type": "second"}'}
    with Hub({FIRST: {**files, **others}, SECOND: second}) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture(scope="module")
def cached(hub, tmp_path_factory):
    """HF_HOME after `org/tiny` was downloaded."""
    home = tmp_path_factory.mktemp("hub")
    asked(hub, home, "org/tiny")
    return home


@pytest.fixture
def offline(cached, monkeypatch):
    """This process uses the cache and asks nothing; as when HF_HOME and HF_HUB_OFFLINE are set before it starts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cached / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub_policy.hub_folder.cache_clear()
    yield
    hub_policy.hub_folder.cache_clear()


PROGRAM = """
import json, sys
from tbx_envs.errors import CheckpointError
from tbx_jax.policies.hub_policy import hub_folder

def folder_or_error(policy):
    try:
        return str(hub_folder(policy))
    except CheckpointError as error:
        return f"CheckpointError: {error}"

print(json.dumps([folder_or_error(policy) for policy in sys.argv[1:]]))
"""


def asked(hub, home, *policies, **variables):
    """The folder of each policy, or what is said instead, in a new process that has these variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environ = {**inherited, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **variables}
    command = [sys.executable, "-c", PROGRAM, *policies]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_policys_files_are_downloaded_once_into_the_shared_cache_and_no_others(hub, cached):
    hub.asked.clear()
    (folder,) = asked(hub, cached, "org/tiny")
    assert pathlib.Path(folder) == cached / "hub" / "models--org--tiny" / "snapshots" / FIRST
    assert set(os.listdir(folder)) == WANTED
    for name in WANTED:
        assert pathlib.Path(folder, name).read_bytes() == hub.commits[FIRST][name]
    assert not [path for _, path in hub.asked if "/resolve/" in path]  # the fixture has downloaded them before


def test_offline_the_cache_is_used_and_nothing_is_asked(hub, cached):
    hub.asked.clear()
    (folder,) = asked(hub, cached, "org/tiny", HF_HUB_OFFLINE="1")
    assert pathlib.Path(folder).name == FIRST and hub.asked == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "refs", {"main": FIRST, "v2": SECOND})
    folders = asked(hub, tmp_path, "org/tiny@v2", f"org/tiny@{SECOND}", "org/tiny@main", "org/tiny")
    assert [pathlib.Path(folder).name for folder in folders] == [SECOND, SECOND, FIRST, FIRST]


def test_a_process_keeps_to_the_commit_that_it_met_first(hub, tmp_path, monkeypatch):
    class Moving(dict):
        """Branches: `main` moves on as soon as it was asked for."""

        def get(self, name, default):
            commit = super().get(name, default)
            self["main"] = SECOND if name == "main" else self["main"]
            return commit

    monkeypatch.setattr(hub, "refs", Moving(main=FIRST))
    folders = [*asked(hub, tmp_path, "org/tiny", "org/tiny"), *asked(hub, tmp_path, "org/tiny")]
    assert [pathlib.Path(folder).name for folder in folders] == [FIRST, FIRST, SECOND]


@pytest.mark.parametrize(
    ("policy", "variables", "words"),
    [
        ("org/typo", {}, "no such folder, and http://127.0.0.1:* has no such repository. Give a policy's folder"),
        ("org/gated", {}, "the repository is gated. Ask for access at http://127.0.0.1:*/org/gated, then log in"),
        ("org/tiny@v9", {}, "org/tiny has no revision 'v9'. Give a branch, a tag"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "does not have all of the repository's files, and HF_HUB_OFFLINE is set"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1 does not answer. Download them first"),
        ("org/a..b", {}, "cannot be downloaded: HFValidationError"),
    ],
    ids=str,
)
def test_what_cannot_be_downloaded_is_said_with_what_to_do(hub, tmp_path, policy, variables, words):
    (said,) = asked(hub, tmp_path, policy, **variables)
    assert said.startswith(f"CheckpointError: policy {policy!r}: ")
    assert words.replace("127.0.0.1:*", f"127.0.0.1:{hub.server_port}") in said


def test_a_repository_without_a_configuration_is_no_policy(hub, offline, monkeypatch):
    folder = hub_policy.hub_folder("org/tiny")
    (folder / "config.json").rename(folder / "elsewhere")
    try:
        with pytest.raises(
            CheckpointError, match=r"'org/tiny': expected a folder with config\.json, the repository has"
        ):
            policy_folder("org/tiny")
    finally:
        (folder / "elsewhere").rename(folder / "config.json")


def test_a_policy_out_of_the_cache_is_loaded_and_saved_like_one_of_a_folder(offline, tmp_path, tiny_folder):
    model, params, tokenizer = build_tiny()
    loaded_model, loaded, loaded_tokenizer = load_policy("org/tiny")
    assert loaded_model == model and loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    save_policy(tmp_path / "saved", loaded_model, loaded, loaded_tokenizer, like="org/tiny", dtype=None)
    assert {path.name for path in (tmp_path / "saved").iterdir() if not path.is_symlink()} == WANTED
    for path in pathlib.Path(tiny_folder).iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


def test_the_fingerprint_is_that_of_the_same_files_in_a_folder_whatever_else_is_in_the_cache(
    offline, tmp_path, tiny_folder
):
    folder = hub_policy.hub_folder("org/tiny")
    fingerprint = policy_fingerprint("org/tiny", SAMPLING, 0.0)
    assert fingerprint["name"] == "org/tiny"
    assert fingerprint["sha256"] == policy_fingerprint(tiny_folder, SAMPLING, 0.0)["sha256"]
    (folder / "README.md").write_text("put here by another program")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    try:
        assert policy_fingerprint("org/tiny", SAMPLING, 0.0) == fingerprint
    finally:
        (folder / "README.md").unlink()
        shutil.rmtree(folder / "onnx")


def test_it_is_served_under_its_whole_name(offline):
    with opened_service("org/tiny", ("slots=1", "max_episode_tokens=64")) as service:
        assert service.served.model == "org/tiny"


def test_a_folder_that_is_there_wins_over_the_hub(offline, tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_policy.is_hub_name("org/tiny") and hub_policy.is_hub_name("org/tiny@v2")
    shutil.copytree(tiny_folder, tmp_path / "org" / "tiny")
    assert not hub_policy.is_hub_name("org/tiny")
    assert policy_folder("org/tiny") == pathlib.Path("org/tiny")


@pytest.mark.parametrize("policy", ["nano", "runs/first/policy", "./runs", "/runs/first", "../runs", "runs/"])
def test_other_paths_and_names_are_never_looked_for_on_the_hub(policy):
    assert not hub_policy.is_hub_name(policy)
