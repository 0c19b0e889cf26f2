"""MCP server `trouble`: misbehaves in every way that a server can, chosen by the tool's name or by the configuration.

It speaks the protocol by hand, line by line, so that it can break it. Configuration given to `__reserved__init`:

    init       how the init itself answers: a name of `MISBEHAVIOUR` or of `RESERVED_ANSWERS`
    effects    the same for `__reserved__geteffects`
    teardown   the same for `__reserved__teardown`
    log        a file that gets a line for each call as it arrives, "tool arguments"

The environment variable BIKESHOP_TROUBLE makes it misbehave while it is imported or listed: `import_error`,
`import_exit`, `import_print`, `import_hang`, `import_thread`, `import_socket`, `list_twice`, `list_dangling`,
`list_garbage`, `list_hang`, `hello_hang`, `hello_error`, `hello_die`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

AT_START = os.environ.get("BIKESHOP_TROUBLE", "")
config: dict[str, Any] = {}
calls = 0

if AT_START == "import_error":
    raise RuntimeError("the shop is closed")
if AT_START == "import_exit":
    sys.exit(3)
if AT_START == "import_print":
    print("welcome to the shop")
if AT_START == "import_hang":
    time.sleep(600)
if AT_START == "import_thread":
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="shop-watcher").start()
if AT_START == "import_socket":
    connection = socket.socket()


# --- answers --------------------------------------------------------------------------------------------------


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def send_parts(number: Any, parts: Any, is_error: bool = False) -> None:
    send({"id": number, "result": {"content": parts, "isError": is_error}})


def send_text(number: Any, text: str, is_error: bool = False) -> None:
    send_parts(number, [{"type": "text", "text": text}], is_error)


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def hang() -> None:
    while True:
        time.sleep(600)


def spin() -> None:
    while True:
        pass


def ignore_everything_and_hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()


def close_stdout() -> None:
    os.close(1)
    os.close(0)
    hang()


def leave_processes() -> None:
    """Two processes that outlive their parent: one in its group, one in a session of its own."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def complain() -> None:
    for line in range(20_000):
        print(f"complaint {line}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(7)


MISBEHAVIOUR: dict[str, Callable[[Any], None]] = {
    "die": lambda number: os.kill(os.getpid(), signal.SIGKILL),
    "exit_zero": lambda number: sys.exit(0),
    "raise": lambda number: 1 / 0,
    "hang": lambda number: hang(),
    "hang_deaf": lambda number: ignore_everything_and_hang(),
    "spin": lambda number: spin(),
    "complain": lambda number: complain(),
    "close_stdout": lambda number: close_stdout(),
    "print_line": lambda number: (say("about to answer\n"), send_text(number, "fine")),
    "print_blank": lambda number: (say("\n"), send_text(number, "fine")),
    "garbage": lambda number: say("\x00\xff{{{ not json\n"),
    "half_line": lambda number: (say('{"jsonrpc": "2.0", "id"'), os._exit(0)),
    "not_rpc": lambda number: say('{"hello": "world"}\n'),
    "wrong_id": lambda number: send_text(number + 1000, "fine"),
    "error_without_id": lambda number: send({"id": None, "error": {"code": -32700, "message": "what?"}}),
    "answer_twice": lambda number: (send_text(number, "fine"), send_text(number, "fine")),
    "no_result": lambda number: send({"id": number, "result": {"content": "text"}}),
    "protocol_error": lambda number: send({"id": number, "error": {"code": -32603, "message": "out of order"}}),
}

RESERVED_ANSWERS: dict[str, Callable[[Any], None]] = {
    "ok": lambda number: send_text(number, '{"status": "ok", "shop": "open"}'),
    "empty_object": lambda number: send_text(number, "{}"),
    "error": lambda number: send_text(number, '{"status": "error", "message": "no bikes", "traceback": "line 1"}'),
    "no_json": lambda number: send_text(number, "Error!"),
    "list": lambda number: send_text(number, "[1, 2]"),
    "other_status": lambda number: send_text(number, '{"status": "fine"}'),
    "without_status": lambda number: send_text(number, '{"shop": "open"}'),
    "is_error": lambda number: send_text(number, '{"status": "ok"}', is_error=True),
    "no_content": lambda number: send_parts(number, []),
    "image": lambda number: send_parts(number, [IMAGE]),
    "slow": lambda number: (time.sleep(0.3), send_text(number, "{}")),
}

IMAGE = {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": "aGVsbG8=", "mimeType": "audio/wav"}
LINK = {"type": "resource_link", "uri": "file:///plan.pdf", "name": "plan", "description": "Plan of the stations"}
TEXT_RESOURCE = {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "opening"}}
BLOB_RESOURCE = {"type": "resource", "resource": {"uri": "file:///b", "mimeType": "application/zip", "blob": "aGk="}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


ODD: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "fine": lambda number, given: send_text(number, "fine"),
    "empty": lambda number, given: send_parts(number, []),
    "null": lambda number, given: send_parts(number, None),
    "image": lambda number, given: send_parts(number, [IMAGE]),
    "several": lambda number, given: send_parts(number, [text_part("one"), IMAGE, text_part("two")]),
    "others": lambda number, given: send_parts(number, [AUDIO, LINK, TEXT_RESOURCE, BLOB_RESOURCE]),
    "structured": lambda number, given: send({"id": number, "result": {"structuredContent": {"née": [1]}}}),
    "structured_beside_null": lambda number, given: send(
        {"id": number, "result": {"content": None, "structuredContent": {"née": [1]}}}
    ),
    "half_a_pair": lambda number, given: send_text(number, "half \ud800 of it"),
    "is_error": lambda number, given: send_text(number, "the shop says no", is_error=True),
    "invalid_params": lambda number, given: send(
        {"id": number, "error": {"code": -32602, "message": "no such argument"}}
    ),
    "slow": lambda number, given: (time.sleep(given["seconds"]), send_text(number, "at last")),
    "count": lambda number, given: send_text(number, str(calls)),
    "echo": lambda number, given: send_text(number, json.dumps(given, sort_keys=True)),
    "large": lambda number, given: send_text(number, "x" * given["size"]),
    "chatter": lambda number, given: (
        send({"method": "notifications/message", "params": {"level": "info", "data": "hello"}}),
        send({"id": "from-server", "method": "ping"}),
        send_text(number, "fine"),
    ),
    "leave_processes": lambda number, given: (leave_processes(), send_text(number, str(os.getpid()))),
    "look": lambda number, given: send_text(
        number,
        json.dumps({"pid": os.getpid(), "group": os.getpgid(0), "cwd": os.getcwd(), "argv": sys.argv[1:]})
        if not given
        else json.dumps(os.environ.get(given["name"])),
    ),
}


# --- the protocol ---------------------------------------------------------------------------------------------


def listed() -> list[dict[str, Any]]:
    anything = {"type": "object", "properties": {}}
    names = ["__reserved__init", "__reserved__geteffects", "__reserved__teardown", *ODD, *MISBEHAVIOUR]
    tools = [{"name": name, "inputSchema": anything, "description": f"Tool {name}."} for name in names]
    tools.append({"name": "plain", "inputSchema": {"type": "object"}})
    titled = {
        "type": "object",
        "title": "Rental",
        "$defs": {"Day": {"title": "Day", "type": "string", "format": "date"}},
        "properties": {
            "title": {"title": "Title", "type": "string"},
            "day": {"$ref": "#/$defs/Day", "description": "lost, as in the original"},
            "days": {"type": "array", "title": "Days", "items": {"$ref": "#/$defs/Day"}},
            "any": True,
        },
        "required": ["day"],
    }
    tools.append({"name": "with_schema", "inputSchema": titled, "description": "Has references."})
    if AT_START == "list_twice":
        tools.append(tools[-1])
    reference = "#/$defs/Nothing" if AT_START == "list_dangling" else "#/$defs/Node"
    node = {"type": "object", "properties": {"next": {"$ref": reference}}}
    schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    tools.append({"name": "tree", "inputSchema": schema})
    return tools


def call(number: Any, name: str, given: dict[str, Any]) -> None:
    global calls
    if name == "__reserved__init":
        config.update(given["config"])
        name = config.get("init", "empty_object")
    elif name == "__reserved__geteffects":
        name = config.get("effects", "empty_object")
    elif name == "__reserved__teardown":
        name = config.get("teardown", "ok")
    else:
        calls += 1
        if "log" in config:
            with open(config["log"], "a") as log:
                log.write(f"{name} {json.dumps(given)}\n")
        if name in ODD:
            ODD[name](number, given)
            return
    {**RESERVED_ANSWERS, **MISBEHAVIOUR}[name](number)


def answer(request: dict[str, Any]) -> None:
    number, method = request.get("id"), request.get("method")
    if method == "initialize":
        if AT_START == "hello_hang":
            hang()
        if AT_START == "hello_die":
            print("I do not want to", file=sys.stderr, flush=True)
            os._exit(4)
        if AT_START == "hello_error":
            send({"id": number, "error": {"code": -32603, "message": "not today"}})
            return
        server = {"name": "trouble", "version": "1"}
        version = request["params"]["protocolVersion"]
        send(
            {"id": number, "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}}
        )
    elif method == "tools/list":
        if AT_START == "list_hang":
            hang()
        if AT_START == "list_garbage":
            say("tools: many\n")
        tools = listed()
        first, rest = tools[:20], tools[20:]  # in two pages
        if request.get("params", {}).get("cursor"):
            send({"id": number, "result": {"tools": rest}})
        else:
            send({"id": number, "result": {"tools": first, "nextCursor": "more"}})
    elif method == "tools/call":
        call(number, request["params"]["name"], request["params"].get("arguments") or {})
    elif method == "ping":
        send({"id": number, "result": {}})


def main() -> None:
    for line in sys.stdin:
        answer(json.loads(line))


if __name__ == "__main__":
    main()
