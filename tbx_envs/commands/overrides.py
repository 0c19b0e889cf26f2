"""What is typed after a subcommand of Hydra's: overrides (`policy=oracle`) and options (`-m`).

Hydra speaks to people who compose configurations: for a misspelt key it recommends `+`, which is wrong here, and for
`--policy oracle` its parser prints all of its own options. These functions say which word is wrong and what to type.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tbx_envs.errors import ConfigError, did_you_mean

# Options of Hydra. Those with a value take the next word, or what follows "="; that of --info may be left out.
_OPTIONS = frozenset({"-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun"}) | {
    *("-sc", "--shell-completion"),
}
_OPTIONS_WITH_VALUE = frozenset({"-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"}) | {
    *("-cd", "--config-dir", "--experimental-rerun", "-i", "--info"),
}
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?P<value>=.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What a configuration knows.

    Attributes:
        keys: keys with the path that leads to each, such as `sampling.slots`.
        groups: group -> its options, such as `sampling` -> `evaluate`, `train`.
        chosen: groups that the configuration has a choice of already.
    """

    keys: tuple[str, ...]
    groups: dict[str, tuple[str, ...]]
    chosen: frozenset[str]


def sorted_words(command: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options and overrides.

    Args:
        command: name of the subcommand and of its configuration.
        words: words after the subcommand.

    Raises:
        ConfigError: a word is neither.
    """
    options: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _OPTIONS:
            options.append(word)
        elif word.partition("=")[0] in _OPTIONS_WITH_VALUE:
            options.append(word)
            if rest and "=" not in word and (word not in ("-i", "--info") or rest[0] in _INFO):
                options.append(rest.pop(0))
        elif word.startswith("-") or not _is_override(word):
            raise ConfigError(f"tbx {command}: {_neither(command, word, rest)}")
        else:
            overrides.append(word)
    return options, overrides


def _is_override(word: str) -> bool:
    return word.startswith("~") or word.find("=") > 0


def _neither(command: str, word: str, rest: Sequence[str]) -> str:
    """What to type instead of a word that is neither an override nor an option."""
    if word.startswith("="):
        return f"'{word}' has no key. Write KEY{word}."
    if rest[:1] == ["="]:
        return f"KEY=VALUE is one word, without spaces. Write {word}={''.join(rest[1:2])}."
    wrong = f"there is no option {word.partition('=')[0]}" if word.startswith("-") else f"'{word}' is no setting"
    given, _, value = word.lstrip("-+").partition("=")
    given = given.replace("-", "_") if word.startswith("-") else given
    if not value and rest and not rest[0].startswith("-") and not _is_override(rest[0]):
        value = rest[0]
    known = known_of(command, ())
    key = _meant(given, known)
    if key is None:
        options = _OPTIONS | _OPTIONS_WITH_VALUE if word.startswith("-") else ()
        near = did_you_mean(word, options) or near_key(given, (*known.keys, *known.groups))
        return f"{wrong}.{near} Settings are given as KEY=VALUE; tbx {command} --help shows them."
    plus = "" if key in known.chosen or key in known.keys else "+"
    return f"{wrong}. Settings are given as KEY=VALUE: write {plus}{key}={value or '...'}."


def _meant(key: str, known: Known) -> str | None:
    """The key or group of that name, or the one key whose path ends with it."""
    if key in known.keys or key in known.groups:
        return key
    ending = [full for full in known.keys if full.endswith(f".{key}")]
    return ending[0] if len(ending) == 1 else None


def reworded(command: str, overrides: Sequence[str], error: Exception) -> str:
    """The message about overrides that Hydra did not accept."""
    problems = [problem for override in overrides for problem in _problems(command, overrides, override)]
    if problems:
        return f"tbx {command}: " + "\n".join(problems)
    words = str(error).partition("\nSet the environment variable HYDRA_FULL_ERROR")[0].partition("\nSee https://")[0]
    if type(error).__name__ == "OverrideParseException":
        words += "\nA value with brackets, commas or spaces is quoted twice, such as tasks='\"a, b\"'."
    return f"tbx {command} {' '.join(overrides)}: {words}"


def _problems(command: str, overrides: Sequence[str], override: str) -> Iterator[str]:
    parts = _OVERRIDE.fullmatch(override)
    assert parts is not None  # every text is one
    known = known_of(command, overrides)
    key, value = parts["key"], (parts["value"] or "=")[1:]
    if key.partition("@")[0] in known.groups:
        yield from _group_problems(known, key, value, override)
    elif key in known.keys:
        if parts["sign"] == "+":
            yield f"the key '{key}' is there already. Write {override[1:]}, without the plus."
    elif parts["sign"] not in ("+", "++") and not key.startswith("hydra"):
        needed = _choice_with(command, key, known)
        near = f" It belongs to {needed}: give that, too." if needed else near_key(key, known.keys)
        yield f"there is no key '{key}'.{near} tbx {command} --help shows all keys."


def _group_problems(known: Known, key: str, value: str, override: str) -> Iterator[str]:
    group = key.partition("@")[0]
    there = known.groups[group]
    placed = sorted(choice for choice in known.chosen if choice.startswith(f"{group}@"))
    for option in value.strip("'\"[]").split(","):
        if option not in (*there, "null", ""):
            yield f"{group} has no '{option}'.{did_you_mean(option, there)} There are: {', '.join(there)}."
            return
    if key in known.chosen:
        if override.startswith("+"):
            yield f"{key} is chosen already. Write {override.lstrip('+')}, without the plus."
    elif placed:
        yield f"{group} is chosen in {len(placed)} places. Write {' or '.join(f'{place}={value}' for place in placed)}."
    elif not override.startswith("+"):
        yield f"{key} is no part of the configuration until it is added. Write +{override}."


def _choice_with(command: str, key: str, known: Known) -> str | None:
    """The choice of a group that brings this key, such as `agent=endpoint`."""
    group = key.partition(".")[0]
    choices = (f"{group}={option}" for option in known.groups.get(group, ()))
    return next((choice for choice in choices if key in known_of(command, [choice]).keys), None)


def near_key(asked: str, keys: Iterable[str]) -> str:
    """As `did_you_mean`, with the keys that end like the one asked for before others."""
    known = [key for key in keys if not key.startswith("hydra")]
    last = asked.rpartition(".")[2]
    ending = [key for key in known if key.rpartition(".")[2] == last]
    if ending:
        return f" Did you mean {', '.join(repr(key) for key in ending[:3])}?"
    if near := did_you_mean(asked, known):
        return near
    # A part of the path may be right, as in `learning_rat` or `optm.learning_rate`.
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
    found = did_you_mean(last, names)
    return re.sub(r"'([^']+)'", lambda name: repr(names[name[1]]), found)


def known_of(command: str, overrides: Sequence[str]) -> Known:
    """The keys and groups of a subcommand's configuration, with the choices that were made as far as there are any."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    with initialize_config_module("tbx_conf", version_base=None):
        loader = GlobalHydra.instance().config_loader()
        names = loader.list_groups("")
        groups = {group: tuple(loader.get_group_options(group, ObjectType.CONFIG)) for group in names}
        groups = {group: options for group, options in groups.items() if options and group != "hydra"}
        choices = []
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            if value in groups.get(key, ()):
                choices.append(override)
        try:
            composed = compose(command, overrides=choices, return_hydra_config=True)
        except Exception:  # the choices do not go together: the keys without them are better than none
            composed = compose(command, return_hydra_config=True)
        chosen = frozenset(composed.hydra.runtime.choices)
    return Known(tuple(_paths(composed)), groups, chosen)


def _paths(config: Any, before: str = "") -> Iterator[str]:
    from omegaconf import DictConfig

    for key in config:
        if not before and key == "hydra":
            continue
        yield f"{before}{key}"
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from _paths(node, f"{before}{key}.")
