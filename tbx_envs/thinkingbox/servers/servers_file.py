"""`servers.yaml`: the MCP servers of a dataset and how each is reached, in the format of ThinkingBox.

    servers:
      bikes:
        type: mcp-process
        command: ["{python}", "-m", "bikeshop_servers.bikes"]
        env: {BIKESHOP_SEARCH_PORT: "8108"}
      weather:
        type: mcp-remote
        endpoint: https://example.org/mcp

Nothing is started or looked up here. A part of a command may name an environment variable, `{env[NAME]}`; a variable
that is not set is an error only when its server is started, so that a file can be used for some of its servers.
"""

from __future__ import annotations

import dataclasses
import os
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.files import parsed_yaml, read_text
from tbx_envs.handed_down import handed_down

Transport = Literal["sse", "streamable-http"]
DEFAULT_REMOTE_TIMEOUT_S = 60.0  # as in the original

DATA_VARIABLE = "THINKINGBOX_DATA"  # the original's name for the folder of the data

_PROCESS_KEYS = ("type", "name", "command", "env", "cwd", "transport")
_REMOTE_KEYS = ("type", "name", "endpoint", "headers", "timeout", "transport", "credential")
_FILE_KEYS = ("use_internal_servers", "servers")


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessServer:
    """A server that is a program speaking MCP on its stdin and stdout.

    Attributes:
        name: name in the file.
        command: command as written, with placeholders that `command_line` fills.
        env: variables added to those that it inherits.
        cwd: working folder, absolute; None: that of this process.
        python: interpreter for `{python}`.
        environ: our environment: `{env[NAME]}` reads all of it, the process gets a part (`tbx_envs.handed_down`).
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    python: str
    environ: Mapping[str, str] = dataclasses.field(repr=False)

    def command_line(self) -> list[str]:
        """The command with its placeholders filled.

        Raises:
            ConfigError: it names environment variables that are not set.
        """
        asked = {name for part in self.command for name in _variables(part)}
        if missing := sorted(asked - set(self.environ)):
            raise ConfigError(
                f"server '{self.name}' is started with {' '.join(self.command)!r}, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set in the environment. Set it, or change the command in "
                f"servers.yaml."
            )
        return [part.format(python=self.python, env=self.environ) for part in self.command]

    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        return {"FASTMCP_LOG_LEVEL": "WARNING", **handed_down(self.environ), **self.env}


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server that is reached over HTTP.

    Attributes:
        name: name in the file.
        endpoint: address of the server.
        headers: headers of every request. They may hold secrets, so no message contains them.
        timeout_s: time limit of one HTTP exchange.
        transport: transport of MCP.
        credential: the file's configuration for getting a token, or None. Not supported: opening the server raises.
    """

    name: str
    endpoint: str
    headers: Mapping[str, str] = dataclasses.field(repr=False)
    timeout_s: float
    transport: Transport
    credential: Mapping[str, Any] | None = dataclasses.field(repr=False)


ServerSpec = ProcessServer | RemoteServer


def load_servers(
    path: str | os.PathLike[str],
    *,
    python: str,
    environ: Mapping[str, str] = os.environ,
    checkout: str | os.PathLike[str] | None = None,
) -> Mapping[str, ServerSpec]:
    """The servers of a file, in its order.

    Args:
        path: path of the file. A relative `cwd` in it is relative to the file's folder.
        python: interpreter for `{python}`.
        environ: our environment (see `ProcessServer`).
        checkout: folder of the data, the value of `THINKINGBOX_DATA` where that is not set: configurations of servers
            name files in it. None is the folder above the file's, as in a checkout.

    Raises:
        ConfigError: the file has errors; the message lists all of them.
    """
    path = Path(path)
    environ = {DATA_VARIABLE: os.path.abspath(checkout or path.absolute().parents[1]), **environ}
    problems: list[str] = []
    entries = _entries(_parsed(path), problems)
    servers = {
        name: server
        for name, entry in entries.items()
        if (server := _server(name, entry, path.absolute().parent, python, environ, problems)) is not None
    }
    if problems:
        raise ConfigError(f"{path}: " + _listed(problems))
    return servers


def require_servers(servers: Mapping[str, ServerSpec], names: Iterable[str]) -> None:
    """Check that all names are in the file.

    Raises:
        ConfigError: some are not; the message lists them.
    """
    if missing := [name for name in dict.fromkeys(names) if name not in servers]:
        hints = "".join(did_you_mean(name, servers) for name in missing)
        raise ConfigError(
            f"servers.yaml has no server {', '.join(map(repr, missing))}.{hints} It has: "
            f"{', '.join(servers) or 'none'}. tbx has no internal servers, regardless of `use_internal_servers`: give "
            f"the server an entry with its command."
        )


# --- reading ------------------------------------------------------------------------------------------------


def _parsed(path: Path) -> Any:
    import yaml

    to_do = "Give the servers.yaml of the checkout."
    text = read_text(path, "the file of the servers", to_do=to_do)
    try:
        return parsed_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {error or type(error).__name__}. {to_do}") from error


def _entries(content: Any, problems: list[str]) -> Mapping[str, Any]:
    """The section `servers` of the file."""
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        problems.append(f"wanted a mapping with the key 'servers', got {type(content).__name__}")
        return {}
    _note_misspelt("the file", content, _FILE_KEYS, problems)
    if not isinstance(content.get("use_internal_servers", True), bool):
        problems.append(f"use_internal_servers is {content['use_internal_servers']!r}, wanted true or false")
    servers = content.get("servers") or {}
    if not isinstance(servers, Mapping):
        problems.append(f"servers is {type(servers).__name__}, wanted a mapping from names to servers")
        return {}
    return {str(name): entry for name, entry in servers.items()}


def _server(
    name: str, entry: Any, folder: Path, python: str, environ: Mapping[str, str], problems: list[str]
) -> ServerSpec | None:
    if not isinstance(entry, Mapping):
        problems.append(f"server '{name}' is {entry!r}, wanted a mapping with 'type' and 'command' or 'endpoint'")
        return None
    kind = entry.get("type", "mcp-remote" if "endpoint" in entry and "command" not in entry else "mcp-process")
    reader = _Reader(f"server '{name}'", entry, problems)
    if kind == "mcp-process":
        return _process(name, reader, folder, python, environ)
    if kind == "mcp-remote":
        return _remote(name, reader)
    problems.append(f"server '{name}' has type {kind!r}, wanted 'mcp-process' or 'mcp-remote'")
    return None


def _process(name: str, reader: _Reader, folder: Path, python: str, environ: Mapping[str, str]) -> ProcessServer | None:
    reader.note_misspelt(_PROCESS_KEYS)
    reader.choice("transport", ("stdio",), "stdio")
    command = reader.command()
    env = reader.strings("env")
    cwd = reader.text("cwd", required=False)
    if command is None:
        return None
    where = None if cwd is None else str(folder / cwd)
    return ProcessServer(name, command, env, where, python, environ)


def _remote(name: str, reader: _Reader) -> RemoteServer | None:
    reader.note_misspelt(_REMOTE_KEYS)
    endpoint = reader.text("endpoint", required=True)
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        reader.problem(f"endpoint is {endpoint!r}, wanted an address that begins with http:// or https://")
    transport = reader.choice("transport", ("streamable-http", "sse"), "streamable-http")
    credential = reader.entry.get("credential")
    if credential is not None and not isinstance(credential, Mapping):
        reader.problem(f"credential is {type(credential).__name__}, wanted a mapping")
    headers, timeout_s = reader.strings("headers"), reader.seconds("timeout", DEFAULT_REMOTE_TIMEOUT_S)
    if endpoint is None:
        return None
    return RemoteServer(name, endpoint, headers, timeout_s, cast(Transport, transport), credential)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the keys of one entry; errors are added to `problems`, and valid values are returned."""

    who: str
    entry: Mapping[str, Any]
    problems: list[str]

    def problem(self, what: str) -> None:
        self.problems.append(f"{self.who}: {what}")

    def note_misspelt(self, known: tuple[str, ...]) -> None:
        _note_misspelt(self.who, self.entry, known, self.problems)

    def text(self, key: str, *, required: bool) -> str | None:
        value = self.entry.get(key)
        if isinstance(value, str) and value:
            return value
        if value is not None or required:
            self.problem(f"{key} is {value!r}, wanted a text" if value is not None else f"{key} is missing")
        return None

    def strings(self, key: str) -> dict[str, str]:
        value = self.entry.get(key) or {}
        if not isinstance(value, Mapping):
            self.problem(f"{key} is {value!r}, wanted a mapping from names to texts")
            return {}
        for name, text in value.items():
            if not isinstance(name, str) or not isinstance(text, str):
                self.problem(f"{key} has {name!r}: {text!r}, wanted texts on both sides; put them into quotes")
        return {str(name): str(text) for name, text in value.items()}

    def seconds(self, key: str, default: float) -> float:
        value = self.entry.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problem(f"{key} is {value!r}, wanted seconds above 0")
            return default
        return float(value)

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.entry.get(key, default)
        if value not in choices:
            self.problem(f"{key} is {value!r}, wanted {' or '.join(map(repr, choices))}")
            return default
        return str(value)

    def command(self) -> tuple[str, ...] | None:
        value = self.entry.get("command")
        if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
            self.problem("command is missing" if value is None else f"command is {value!r}, wanted a list of texts")
            return None
        for part in value:
            if reason := _placeholder_problem(part):
                self.problem(f"command has {part!r}: {reason}")
        return tuple(value)


def _placeholder_problem(part: str) -> str | None:
    """Why a part of a command cannot be filled in any environment, or None."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(part) if field is not None]
    except ValueError as error:
        return f"{error}; write {{{{ and }}}} for braces"
    for field in fields:
        if field != "python" and not (field.startswith("env[") and field.endswith("]") and len(field) > len("env[]")):
            return f"{{{field}}} is unknown; there are {{python}} and {{env[NAME]}}, and {{{{ }}}} for braces"
    return None


def _variables(part: str) -> list[str]:
    """Names of the environment variables in a part of a command."""
    fields = [field for _, field, _, _ in string.Formatter().parse(part) if field]
    return [field[len("env[") : -1] for field in fields if field.startswith("env[")]


def _note_misspelt(who: str, entry: Mapping[str, Any], known: tuple[str, ...], problems: list[str]) -> None:
    """Unknown keys are ignored, as in the original, unless one looks like a misspelt known key."""
    for key in entry:
        if key not in known and (hint := did_you_mean(str(key), [name for name in known if name not in entry])):
            problems.append(f"{who}: unknown key '{key}'.{hint}")


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0] + "."
    return f"{len(problems)} problems.\n" + "\n".join(f"  - {problem}" for problem in problems)
