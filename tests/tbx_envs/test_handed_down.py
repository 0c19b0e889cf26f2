"""What a dataset's programs get of the environment, and what they can read of it elsewhere."""

import json
import os
import subprocess
import sys

import pytest

from tbx_envs.errors import ConfigError
from tbx_envs.handed_down import ALLOWED, handed_down, missing_hint

SECRETS = {
    "MYMODEL": "sk-1",
    "DATABASE_URL": "postgres://me:pw@db",
    "GITHUB_PAT": "ghp_1",
    "hf_token": "hf_1",
    "TBX_TOKEN": "t",
    "THINKINGBOX_API_KEY": "k",
    "PYTHONANYWHERE_API_TOKEN": "p",
    "LC_SECRET": "l",
    "HTTPS_PROXY": "http://me:pw@proxy",
    "AWS_PROFILE": "me",
    "path": "lower case is another name",
    "PATH_2": "x",
}
NEEDED = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C",
    "LANG": "C",
    "TZ": "UTC",
    "PYTHONPATH": "a",
    "TMPDIR": "/t",
}


def test_variables_are_handed_down_by_a_list_of_names_and_by_nothing_that_a_name_looks_like():
    assert handed_down({**SECRETS, **NEEDED}) == NEEDED
    assert all(name.isupper() and not any(word in name for word in ("KEY", "TOKEN", "PASS_W")) for name in ALLOWED)


def test_further_variables_are_handed_down_by_name():
    environ = {**SECRETS, **NEEDED, "TBX_PASS_VARIABLES": "DATABASE_URL, AWS_PROFILE NOT_SET"}
    assert handed_down(environ).keys() == {*NEEDED, "TBX_PASS_VARIABLES", "DATABASE_URL", "AWS_PROFILE"}


@pytest.mark.parametrize("given", ["A,sk-123", "A=sk-123", "*", "TBX_*"])
def test_a_list_of_names_that_is_none_is_an_error_that_does_not_repeat_it(given):
    with pytest.raises(ConfigError, match=r"TBX_PASS_VARIABLES: entry . of . is not the name") as caught:
        handed_down({"TBX_PASS_VARIABLES": given})
    assert "123" not in str(caught.value)


def test_a_program_that_missed_a_variable_names_it_and_the_hint_says_how_it_gets_it():
    hint = missing_hint("KeyError: 'DATABASE_URL'; PATH is set, NOT_SET is not", {**SECRETS, **NEEDED})
    assert (
        "It names DATABASE_URL, which is set here" in hint and "TBX_PASS_VARIABLES" in hint and "postgres" not in hint
    )
    for words in ("", "KeyError: 'PATH'", "it said GITHUB_PAT_2"):
        assert missing_hint(words, {**SECRETS, **NEEDED}) == ""


HIDING = """
import json, os, subprocess, sys
import tbx_envs
from tbx_envs.errors import DomainError
os.environ["CHANGED"] = "new"
del os.environ["GONE"]
before = dict(os.environ)
for _ in range(2):
    try:
        tbx_envs.register_dataset("/there/is/none")
    except DomainError:
        pass
os.environ["LATER"] = "later"
shown = subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], capture_output=True).stdout.decode()
child = subprocess.run([sys.executable, "-S", "-c", "import os, json; print(json.dumps(dict(os.environ)))"],
                       capture_output=True).stdout
print(json.dumps([shown, before == {k: v for k, v in os.environ.items() if k != "LATER"}, json.loads(child)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the block in /proc")
def test_what_is_held_back_is_in_no_environment_block_and_our_own_children_still_get_it():
    environ = {**os.environ, **SECRETS, "CHANGED": "old-s3cret", "GONE": "gone-s3cret", "LANG": "C.UTF-8"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-S", "-c", HIDING], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown, same, of_child = json.loads(done.stdout)
    assert same and of_child["MYMODEL"] == "sk-1" and of_child["CHANGED"] == "new" and of_child["LATER"] == "later"
    assert "LANG=C.UTF-8" in shown.split("\0") and f"PATH={os.environ['PATH']}" in shown.split("\0")
    values = {*SECRETS.values(), "old-s3cret", "gone-s3cret"}
    assert [value for value in values if value in {entry.partition("=")[2] for entry in shown.split("\0")}] == []
