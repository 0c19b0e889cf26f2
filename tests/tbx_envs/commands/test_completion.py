"""What a shell offers: the words, and what bash makes of them."""

import shutil
import subprocess

import pytest

from tbx_envs.commands.cli import commands
from tbx_envs.commands.completion import SCRIPT, candidates


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tbx ev", ["evaluate"]),
        ("tbx evaluate po", ["policy="]),
        ("tbx evaluate policy=o", ["policy=oracle"]),
        ("tbx evaluate attempts=1 policy=sc", ["policy=scripted"]),
        ("tbx evaluate sampling.max_t", ["sampling.max_turn_tokens="]),
        ("tbx evaluate sampling=t", ["sampling=train"]),
        ("tbx evaluate agent=endpoint agent.endpoint.mo", ["agent.endpoint.model="]),
        ("tbx train +experiment=smol", ["+experiment=smollm2"]),
        ("tbx train --m", ["--multirun"]),
        ("tbx tasks s", ["show"]),
        ("tbx play clinic/cancel_visit/00", [f"clinic/cancel_visit/{number:03}" for number in range(10)]),
        ("tbx report ru", []),  # the shell offers files
        ("tbx nothing ", []),
    ],
)
def test_what_may_follow_a_line(line, offered):
    assert candidates(line) == offered


def test_all_commands_may_follow_the_first_word():
    assert set(commands()) < set(candidates("tbx "))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_is_given_what_follows_the_equals_sign_and_no_space_after_it(tmp_path):
    """One bash completes three lines; a stand-in for `tbx` answers as `candidates` does, without its start-up."""
    answers = {line: candidates(line) for line in ("tbx ev", "tbx evaluate po", "tbx evaluate seed=1 policy=o")}
    cases = "\n".join(f"'{line}') printf '%s\\n' {' '.join(words)};;" for line, words in answers.items())
    ask = "COMP_LINE='{}' COMP_POINT={}; _tbx_complete; echo \"${{COMPREPLY[*]}}\""
    asked = "\n".join(ask.format(line, len(line)) for line in answers)
    program = f'tbx() {{ case "$4" in\n{cases}\nesac; }}\n{SCRIPT}\n{asked}\ncomplete -p tbx'
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["evaluate", "policy=", "oracle", "complete -o default -F _tbx_complete tbx"]
