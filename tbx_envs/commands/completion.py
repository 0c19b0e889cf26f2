"""`tbx completion`: what a shell offers after the first letters of a subcommand, a key or a value.

    eval "$(tbx completion bash)"        in ~/.bashrc; in zsh after: autoload -U bashcompinit && bashcompinit

Hydra's own completion knows programs of one command only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tbx_envs.command_line import ArgumentParser
from tbx_envs.commands.cli import commands
from tbx_envs.commands.command import HydraCommand
from tbx_envs.commands.overrides import known_of

# Bash takes "=" for the end of a word, so it is given what follows it only.
SCRIPT = """\
_tbx_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##*[[:space:]]}"
    COMPREPLY=($(tbx completion bash --line "$line" 2>/dev/null))
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
    if [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _tbx_complete tbx
"""
_OPTIONS = ("--cfg", "--help", "--info", "--multirun")
_TASKS = ("all", "train", "heldout", "datasets")


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx completion", description='Completion for a shell: eval "$(tbx completion bash)".')
    parser.add_argument("shell", choices=("bash", "zsh"), help="the script is the same: zsh needs bashcompinit")
    parser.add_argument("--line", help="print what may follow this line instead of the script; the script asks so")
    given = parser.parse_args(arguments)
    print(SCRIPT if given.line is None else "\n".join(candidates(given.line)), end="" if given.line is None else "\n")


def candidates(line: str) -> list[str]:
    """Words that may stand where the line ends, each beginning with what is there; empty where files may.

    >>> candidates("tbx ev")
    ['evaluate']
    """
    words = line.split()
    begun = words.pop() if words and not line[-1:].isspace() else ""
    return sorted(word for word in _words(words[1:], begun) if word.startswith(begun))


def _words(before: Sequence[str], begun: str) -> Iterable[str]:
    if not before:
        return (*commands(), "--help", "--version")
    name, *given = before
    command = commands().get(name)
    if isinstance(command, HydraCommand):
        return _overrides(command.config_name, given, begun)
    if name == "tasks" and not given:
        return ("list", "show", "validate")
    if (name == "play" and not given) or (name == "tasks" and given == ["show"]):
        from tbx_envs.evaluation.task_lists import select_tasks

        return select_tasks("all")
    return ()


def _overrides(name: str, given: Sequence[str], begun: str) -> Iterable[str]:
    key, equals, _ = begun.partition("=")
    known = known_of(name, [word for word in given if "=" in word])
    if not equals:
        added = (f"+{group}=" for group in known.groups if group == "experiment")
        return (*(f"{key}=" for key in known.keys), *added, *_OPTIONS)
    if key == "policy":
        from tbx_envs.commands.evaluate import AGENTS, policy_models

        values: Iterable[str] = (*AGENTS, *(policy for models in policy_models() for policy in models.names))
    elif key == "tasks":
        values = _TASKS
    else:
        values = known.groups.get(key.lstrip("+").partition("@")[0], ())
    return (f"{key}={value}" for value in values)
