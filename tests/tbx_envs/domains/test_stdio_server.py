"""The clinic over a real stdio MCP server answers what it answers in process, and changes the same rows."""

import asyncio
import dataclasses
import subprocess
import sys

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tbx_envs.domains import load_domain
from tbx_envs.domains.in_process import InProcessSession
from tbx_envs.domains.mcp_server import read_result
from tbx_envs.domains.worlds import lend_world, return_world, template_for
from tbx_envs.tools.listing import function_dicts

SERVER = [sys.executable, "-m", "tbx_envs.domains.clinic.server"]


async def over_stdio(uid, calls):
    """The listing, and the answers to `calls`, of a server process for the task's world."""
    command, *arguments = [*SERVER, "--task", uid]
    async with Client(stdio_client(StdioServerParameters(command=command, args=arguments))) as client:
        tools = (await client.list_tools()).tools
        listing = function_dicts((tool.name, tool.description, tool.input_schema) for tool in tools)
        return listing, [read_result(await client.call_tool(name, arguments)) for name, arguments in calls]


def in_process(uid, calls):
    domain = load_domain("clinic")
    world = lend_world(template_for(domain.task(uid), domain))
    session = InProcessSession.open(domain, world, 10.0)
    answers = [session.call(name, arguments) for name, arguments in calls]
    listing = session.list_tools()
    return_world(world)
    return listing, answers


def calls_of(domain, uid):
    """The expected calls, calls that are rejected or invalid, and every read of the records afterwards."""
    task = domain.task(uid)
    expected = [(call.tool, dict(call.arguments)) for call in task.expected_calls]
    wrong = [("no_such_tool", {}), (expected[0][0], {}), (expected[0][0], {**expected[0][1], "extra": 1})]
    patient_ids = sorted(row["patient_id"] for row in task.world["patients"])
    reads = [
        (tool.name, {"patient_id": patient_id})
        for tool in domain.tools
        if not tool.mutates and tool.input_schema["required"] == ["patient_id"]
        for patient_id in patient_ids
    ]
    unknown = [(name, dict.fromkeys(arguments, "nobody")) for name, arguments in expected if "patient_id" in arguments]
    return [*expected, *wrong, *unknown, *reads]


@pytest.mark.parametrize("family", [0, -1])
def test_stdio_answers_like_in_process(family):
    domain = load_domain("clinic")
    uid = f"clinic/{list(domain.families)[family]}/001"
    calls = calls_of(domain, uid)
    listing, answers = asyncio.run(over_stdio(uid, calls))
    listing_in_process, answers_in_process = in_process(uid, calls)
    assert [dataclasses.astuple(answer) for answer in answers] == [
        dataclasses.astuple(answer) for answer in answers_in_process
    ]
    assert {answer.status for answer in answers} >= {"ok", "invalid"}
    assert str(listing) == str(listing_in_process)


def test_the_server_prints_nothing_by_itself_and_ends_with_its_input():
    ran = subprocess.run(SERVER, input=b"", capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, b"")


def test_importing_the_server_has_no_effect():
    program = "import tbx_envs.domains.clinic.server"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
