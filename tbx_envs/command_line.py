"""A parser of arguments for commands whose arguments are their own: its errors are ours, and say what to type.

Positional arguments may stand before and after options.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from tbx_envs.errors import ConfigError, did_you_mean

# What may stand where a keyboard has a hyphen: an editor or a page has replaced it.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
LARGEST_PORT = 65535
SETTING = "key=value"  # metavar of arguments that are settings


class ArgumentParser(argparse.ArgumentParser):
    """As `argparse.ArgumentParser`.

    Raises:
        ConfigError: by `parse_args`, for arguments that do not fit.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        try:
            # With subcommands, which cannot be mixed with positional arguments, the parser of one reads the rest.
            parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
            given, unknown = parse(args, namespace)
        except argparse.ArgumentError as error:
            self.error(str(error))
        if unknown:
            self.error(self._unknown(unknown[0]))
        self._refuse_misplaced(given)
        return given

    def _refuse_misplaced(self, given: argparse.Namespace) -> None:
        """Refuse `policy=nano` where `nano` is wanted, and a setting where something else comes first."""
        takes_settings = any(action.metavar == SETTING for action in self._actions)
        for action in self._actions:
            value = getattr(given, action.dest, None)
            if action.option_strings or action.nargs is not None or not isinstance(value, str):
                continue
            name, equals, rest = value.partition("=")
            if not equals or os.path.exists(value):
                continue
            if name == action.dest:
                self.error(f"'{value}': {name} is told by its place. Write {rest}")
            if takes_settings and name.replace(".", "_").isidentifier():
                self.error(f"'{value}' is a setting, and before it {action.dest} is missing")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"'{word}' is one argument too many"
        name = word.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        return f"there is no option {name}.{did_you_mean(name, options)}"

    def error(self, message: str) -> NoReturn:
        required = "the following arguments are required: "
        if message.startswith(required):
            # argparse counts those that may be left out, when positional arguments and options are mixed.
            spare = [action.metavar or action.dest for action in self._actions if action.nargs in ("*", "?")]
            names = [name for name in message.removeprefix(required).split(", ") if name not in spare]
            message = f"missing: {', '.join(names)}"
        elif choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            there = re.findall(r"[\w-]+", choice[2])
            message = f"'{choice[1]}' is none of {', '.join(there)}.{did_you_mean(choice[1], there)}"
        elif number := re.search(r"^argument (.*): invalid (?:int|float) value: '(.*)'$", message):
            message = f"{number[1]} wants a number, and '{number[2]}' is none"
        end = "" if message.endswith(("?", ".")) else "."
        raise ConfigError(f"{self.prog}: {message}{end} {self.prog} --help shows its arguments.")


def port(text: str) -> int:
    """The number of a port.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and int(text) <= LARGEST_PORT):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no port. Give a whole number up to {LARGEST_PORT}; 0 takes a free one"
        )
    return int(text)


def refuse_dashes(command: str, words: Sequence[str]) -> None:
    """Check that options begin with hyphens, and not with what an editor made of them.

    Raises:
        ConfigError: a word begins with another dash.
    """
    for word in words:
        if word[:1] and word[0] in _DASHES:
            rest = word.lstrip(_DASHES + "-")
            meant = ("-" if len(rest.partition("=")[0]) == 1 else "--") + rest
            raise ConfigError(
                f"{command}: '{word}' begins with '{word[0]}' (U+{ord(word[0]):04X}), which is not the hyphen of the "
                f"keyboard. Type {meant}."
            )
