"""A built-in domain as a real MCP server over stdin and stdout, with the same answers as in process.

One process serves one world: the initial world of a task. A fault of a tool becomes a protocol error, so that a client
can distinguish it from a rejected call.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from mcp.server.stdio import stdio_server

from tbx_envs.domains import Domain, load_domain
from tbx_envs.domains.mcp_server import build_server
from tbx_envs.domains.worlds import build_template, domain_tools, lend_world
from tbx_envs.task import Task
from tbx_envs.tools.calls import answer_call
from tbx_envs.tools.session import Answer


async def serve(domain: Domain, task: Task) -> None:
    """Serve the task's world until stdin closes. Nothing but the protocol is written to stdout."""
    template = build_template(task, domain)
    world = lend_world(template)
    tools = domain_tools(domain)

    def answer(name: str, arguments: dict[str, Any]) -> Answer:
        return answer_call(tools, world.db, domain.clock, name, arguments)

    server = build_server(f"tbx-{domain.name}", lambda: domain, answer)
    try:
        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())
    finally:
        world.close()


def main(domain_name: str, arguments: Sequence[str] | None = None) -> None:
    """The program `python -m tbx_envs.domains.<name>.server [--task UID]`."""
    domain = load_domain(domain_name)
    first = next(iter(domain.uids()))
    parser = argparse.ArgumentParser(
        prog=f"python -m tbx_envs.domains.{domain_name}.server",
        description=f"Serve the tools of '{domain_name}' on the world of one task: MCP on stdin and stdout.",
    )
    parser.add_argument("--task", metavar="UID", default=first, help="task of the initial world (default: %(default)s)")
    asyncio.run(serve(domain, domain.task(parser.parse_args(arguments).task)))
