"""A person as the agent of one episode, line by line in a terminal."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence

from tbx_envs.env import ToolEnv
from tbx_envs.errors import did_you_mean
from tbx_envs.messages import DONE_MARK, Text, ToolCall, Turn
from tbx_envs.rendering import transcript_text

COMMANDS = ("say", "tools", "rules", "done", "quit", "help")
HELP = """\
  any words             are said to the user (/say WORDS, if they look like a call)
  /TOOL {"key": ...}    calls a tool, for example /find_patient {"name": "..."}
  /tools                lists the tools and their arguments
  /rules                shows the rules you must follow
  /done [words]         says the last words and ends the conversation
  /quit                 leaves before the end"""

# A name, and what arguments begin with: an object, a bracket as in Python, or the name of the first one.
_WRITTEN_CALL = re.compile(r"(\w+)\s*([{(]|\w+\s*=)")


def play(env: ToolEnv, seed: int, read: Callable[[], str], write: Callable[[str], None]) -> bool | None:
    """One episode of `env` with a person as the agent.

    Args:
        env: environment of the task.
        seed: seed of the episode.
        read: function that returns the next line, or raises EOFError after the last.
        write: function that shows a text.

    Returns:
        Whether the check passed; None when the person left before the end.

    Raises:
        EnvironmentFault: infrastructure error.
    """
    env.reset(seed=seed)
    write(f"Task {env.task.uid}. You are the agent; /help shows what you can type.\n")
    shown = len(_rules(env))  # they are long: /rules shows them
    while True:
        write(transcript_text(env.transcript[shown:]))
        shown = len(env.transcript)
        try:
            line = read().strip()
        except EOFError:
            write("")  # the prompt is left open
            return None
        if line == "/quit":
            return None
        turn = _turn(env, line, write)
        if turn is None:
            continue
        shown += 1  # the person's own line is on the screen already
        _, _, terminated, truncated, info = env.step(turn)
        if terminated or truncated:
            write(transcript_text(env.transcript[shown:]))
            write("\n".join([f"ended: {info['finish_reason']}", *_verdict(info["check"])]))
            return bool(info["check"]["passed"])


def _rules(env: ToolEnv) -> list[str]:
    """The system's messages before all others."""
    said = itertools.takewhile(lambda message: isinstance(message, Text) and message.role == "system", env.transcript)
    return [message.text for message in said]


def _verdict(check: dict[str, object]) -> list[str]:
    if check["passed"]:
        return ["passed: the records are as they should be"]
    differences = check["differences"]
    assert isinstance(differences, list)
    return ["failed:", *(f"  {line}" for line in differences)]


def _turn(env: ToolEnv, line: str, write: Callable[[str], None]) -> Turn | None:
    """The turn of a line; None when the line was a question to the terminal, which is answered here."""
    names = [tool["function"]["name"] for tool in env.tools]
    if not line.startswith("/"):
        if (call := _call_meant(line, names)) is not None:
            write(f"Nothing was said. With a slash it is a call: {call}\nTo say these words to the user: /say {line}")
            return None
        return Turn(text=line) if line else None
    command, _, rest = line[1:].partition(" ")
    match command:
        case "say" if rest:
            return Turn(text=rest)
        case "done":
            return Turn(text=f"{rest} {DONE_MARK}".strip())
        case "rules":
            write("\n\n".join(_rules(env)))
        case "tools":
            write("\n".join(_signature(tool["function"]) for tool in env.tools))
        case "help":
            write(HELP)
        case _ if command in names:
            return _call(command, rest, write)
        case _:
            near = did_you_mean(f"/{command}", [f"/{known}" for known in (*names, *COMMANDS)])
            write(f"'/{command}' is neither a command nor a tool.{near}\n{HELP}")
    return None


def _call_meant(line: str, names: Sequence[str]) -> str | None:
    """What a line without a slash should be: it is a command's name, or a tool's, alone or with arguments in any of
    the ways in which people write them; None for words."""
    if line in COMMANDS or line in names:
        return f"/{line}"
    written = _WRITTEN_CALL.match(line)
    if written is None or written[1] not in names:
        return None
    return f"/{line}" if written[2] == "{" else f'/{written[1]} {{"key": "value"}}'


def _call(name: str, text: str, write: Callable[[str], None]) -> Turn | None:
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        write(f'Arguments are one JSON object, such as /{name} {{"key": "value"}}.')
        return None
    return Turn(calls=(ToolCall("", name, arguments),))


def _signature(function: dict[str, object]) -> str:
    parameters = function["parameters"]
    assert isinstance(parameters, dict)
    required = parameters.get("required", [])
    shown = ", ".join(name if name in required else f"{name}?" for name in parameters.get("properties", {}))
    first_line = str(function["description"]).partition("\n")[0]
    return f"  /{function['name']} {{{shown}}}\n      {first_line}"
