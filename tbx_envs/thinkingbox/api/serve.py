"""`tbx serve`: runs the original's HTTP session API (`tbx_envs.thinkingbox.api.session_api`) in the foreground."""

from __future__ import annotations

import argparse
import datetime
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.command_line import ArgumentParser, port
from tbx_envs.errors import ConfigError
from tbx_envs.web import addresses

if TYPE_CHECKING:
    from tbx_envs.web.access import Access

_DESCRIPTION = """
Serve tool servers to clients of ThinkingBox: give them this address as `mcp_proxy.endpoint_url`.

On loopback no token is needed. Elsewhere name a variable or a file with the privileged token; the client sends it as
its bearer token. An agent that reaches the server over the network gets a token of its own.
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until it is stopped (SIGINT, SIGTERM).

    Raises:
        ConfigError: it cannot start as asked.
    """
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    # Imported here, so that `tbx serve --help` does not wait for the web server's import.
    from tbx_envs.thinkingbox.api.live_sessions import LiveSessions
    from tbx_envs.thinkingbox.api.session_api import create_app
    from tbx_envs.thinkingbox.servers.server_pool import ServerPool
    from tbx_envs.thinkingbox.servers.servers_file import load_servers
    from tbx_envs.web import loopback

    _check_limits(given)
    clock = _clock(given.clock, given.clock_runs)
    access = _access(given)
    # Not even a command in the servers file may name the tokens, which a tool could then show.
    hidden = {given.token_env, given.agent_token_env}
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    servers = load_servers(given.servers, python=given.python, environ=environ)
    listener = loopback.bind(given.host, given.port)
    pool = ServerPool(
        servers,
        start=given.start,
        call_timeout_s=given.call_timeout,
        start_timeout_s=given.start_timeout,
        knowledge=not given.no_knowledge,
        always_first_part=given.first_part_only,
    )
    with pool:
        sessions = LiveSessions(
            pool, servers=tuple(servers), clock=clock, clock_runs=given.clock_runs, max_sessions=given.max_sessions
        )
        app = create_app(
            sessions,
            access,
            idle_s=given.idle_minutes * 60 or None,
            any_host=not addresses.is_loopback(given.host),  # there, a token is required
        )
        shown = ", ".join(
            [given.start, "no token" if access.privileged_token is None else "token", _shown_clock(clock, given)]
        )
        line = f"tbx serve: {loopback.url_of(listener)} serves {', '.join(servers)} ({shown})"
        loopback.until_stopped(app, listener, lambda: print(line, flush=True))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("tbx serve", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--servers", type=Path, required=True, help="the servers file (servers.yaml)")
    add("--python", required=True, help="interpreter that runs the servers ({python} in the servers file)")
    add(
        "--start", choices=("fork", "spawn"), default="fork", help="how a session's processes are created (%(default)s)"
    )
    add("--clock", help="moment of the servers' clock, such as 2025-10-01T13:00:00; it stands still")
    add("--clock-runs", action="store_true", help="the clock runs from that moment")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=port, default=8000, help="port to listen on; 0 takes a free one (%(default)s)")
    add("--token-env", metavar="NAME", help="environment variable that holds the privileged token")
    add("--token-file", type=Path, metavar="PATH", help="file that holds it")
    add("--agent-token-env", metavar="NAME", help="environment variable that holds the agent's token")
    add("--agent-token-file", type=Path, metavar="PATH", help="file that holds it")
    add("--max-sessions", type=int, default=256, help="maximum at the same time; others wait (%(default)s)")
    add("--idle-minutes", type=float, default=60.0, help="unused sessions end after this; 0: never (%(default)s)")
    add(
        "--call-timeout",
        type=float,
        default=300.0,
        help="upper limit in seconds of a call (%(default)s)",
    )
    add("--start-timeout", type=float, default=120.0, help="seconds for the start of a session (%(default)s)")
    add("--first-part-only", action="store_true", help="return only the first part of an answer, as the original does")
    add("--no-knowledge", action="store_true", help="start no search service for the servers")
    return parser


def _check_limits(given: argparse.Namespace) -> None:
    least = {"max_sessions": 1, "idle_minutes": 0, "call_timeout": 0.001, "start_timeout": 0.001, "port": 0}
    problems = [
        f"--{name.replace('_', '-')} {getattr(given, name):g} is too small; the minimum is {limit:g}."
        for name, limit in least.items()
        if not getattr(given, name) >= limit  # nan too
    ]
    if problems:
        raise ConfigError("tbx serve cannot start: " + " ".join(problems))


def _access(given: argparse.Namespace) -> Access:
    from tbx_envs.web.access import Access, read_token

    access = Access(
        privileged_token=read_token("privileged", variable=given.token_env, file=given.token_file),
        agent_token=read_token("agent", variable=given.agent_token_env, file=given.agent_token_file),
    )
    if not addresses.is_loopback(given.host) and access.privileged_token is None:
        raise ConfigError(
            f"--host {given.host} can be reached from other machines, and no token is configured: any client could run "
            f"tools and read what is checked. Name a token with --token-env or --token-file, or listen on 127.0.0.1."
        )
    return access


def _clock(text: str | None, runs: bool) -> datetime.datetime | None:
    if text is None:
        if runs:
            raise ConfigError("--clock-runs needs --clock, the moment from which the clock runs.")
        return None
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--clock {text} is not a date and time. Write it like 2025-10-01T13:00:00.") from error


def _shown_clock(clock: datetime.datetime | None, given: argparse.Namespace) -> str:
    if clock is None:
        return "real clock"
    return f"clock {clock.isoformat()}{' running' if given.clock_runs else ' standing still'}"
