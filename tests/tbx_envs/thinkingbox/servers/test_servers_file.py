import sys

import pytest

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.servers.servers_file import ProcessServer, RemoteServer, load_servers, require_servers


def write(tmp_path, text):
    path = tmp_path / "servers.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_servers_are_read_as_they_stand_and_in_order(tmp_path):
    path = write(
        tmp_path,
        """
use_internal_servers: true
servers:
  desk:
    type: mcp-process
    command: ["{python}", "-m", "desk", "--home={env[HOME_OF_DESK]}", "{{literal}}"]
    env: {COLOUR: "{python}"}
    cwd: here
  plain: {type: mcp-process, command: [run]}
  far: {type: mcp-remote, endpoint: "https://example.org/mcp", headers: {A: b}}
  far_sse: {type: mcp-remote, endpoint: "http://example.org", timeout: 2.5, transport: sse, credential: {type: x}}
""",
    )
    environ = {"HOME_OF_DESK": "/desk", "PATH": "/bin", "THINKINGBOX_DATA": "/data"}
    servers = load_servers(path, python="/opt/python", environ=environ)
    assert list(servers) == ["desk", "plain", "far", "far_sse"]
    desk = servers["desk"]
    assert desk.command_line() == ["/opt/python", "-m", "desk", "--home=/desk", "{literal}"]
    assert desk.cwd == str(tmp_path / "here")
    assert desk.environment() == {
        "PATH": "/bin",
        "THINKINGBOX_DATA": "/data",
        "COLOUR": "{python}",
        "FASTMCP_LOG_LEVEL": "WARNING",
    }
    assert servers["plain"] == ProcessServer("plain", ("run",), {}, None, "/opt/python", environ)
    assert servers["far"] == RemoteServer("far", "https://example.org/mcp", {"A": "b"}, 60.0, "streamable-http", None)
    assert servers["far_sse"] == RemoteServer("far_sse", "http://example.org", {}, 2.5, "sse", {"type": "x"})


def test_servers_find_the_files_of_their_checkout(tmp_path):
    path = write(tmp_path / "servers", "servers: {a: {type: mcp-process, command: [x]}}")

    def told(**options):
        return load_servers(path, python="p", **options)["a"].environment()["THINKINGBOX_DATA"]

    assert told(environ={}) == str(tmp_path)
    assert told(environ={}, checkout=tmp_path / "other") == str(tmp_path / "other")
    assert told(environ={"THINKINGBOX_DATA": "/mine"}, checkout=tmp_path) == "/mine"


def test_the_servers_own_log_level_is_kept(tmp_path):
    path = write(tmp_path, "servers: {a: {type: mcp-process, command: [x], env: {FASTMCP_LOG_LEVEL: DEBUG}}}")
    assert load_servers(path, python="p", environ={})["a"].environment()["FASTMCP_LOG_LEVEL"] == "DEBUG"
    environ = {"FASTMCP_LOG_LEVEL": "ERROR"}
    path = write(tmp_path, "servers: {a: {type: mcp-process, command: [x]}}")
    assert load_servers(path, python="p", environ=environ)["a"].environment()["FASTMCP_LOG_LEVEL"] == "ERROR"


def test_a_variable_that_is_not_set_matters_only_when_its_server_is_started(tmp_path):
    path = write(tmp_path, 'servers: {a: {type: mcp-process, command: ["{env[ONE]}", "{env[TWO]}", "{env[SET]}"]}}')
    server = load_servers(path, python="p", environ={"SET": "1"})["a"]
    with pytest.raises(ConfigError, match=r"server 'a' .* ONE, TWO are not set"):
        server.command_line()


def test_secrets_are_in_no_representation(tmp_path):
    text = 'servers: {a: {type: mcp-remote, endpoint: "http://x", headers: {Authorization: Bearer-s3cret}}}'
    assert "s3cret" not in repr(load_servers(write(tmp_path, text), python="p"))
    text = "servers: {a: {type: mcp-process, command: [x]}}"
    assert "s3cret" not in repr(load_servers(write(tmp_path, text), python="p", environ={"KEY": "s3cret"}))


def test_all_problems_of_a_file_come_at_once(tmp_path):
    path = write(
        tmp_path,
        """
use_internal_server: true
servers:
  a: {type: mcp-proces, command: [x]}
  b: {type: mcp-process}
  c: {type: mcp-process, command: "python -m x"}
  d: {type: mcp-process, command: ["{home}", "{", "{env[}", "{0}"], env: {PORT: 8108}}
  e: {type: mcp-remote, headers: [1]}
  f: {type: mcp-remote, endpoint: "ftp://x", timeout: 0, transport: websocket, credential: azure}
  g: 7
  h: {type: mcp-process, comand: [x]}
  i: {type: mcp-process, command: [x], transport: sse, cwd: 3}
""",
    )
    with pytest.raises(ConfigError) as caught:
        load_servers(path, python="p")
    message = str(caught.value)
    for part in (
        "unknown key 'use_internal_server'. Did you mean 'use_internal_servers'?",
        "server 'a' has type 'mcp-proces'",
        "server 'b': command is missing",
        "server 'c': command is 'python -m x', wanted a list",
        "'{home}': {home} is unknown",
        "'{': ",
        "'{env[}': ",
        "'{0}': {0} is unknown",
        "'PORT': 8108, wanted texts",
        "server 'e': endpoint is missing",
        "server 'e': headers is [1]",
        "endpoint is 'ftp://x'",
        "timeout is 0, wanted seconds above 0",
        "transport is 'websocket', wanted 'streamable-http' or 'sse'",
        "credential is str",
        "server 'g' is 7",
        "server 'h': unknown key 'comand'. Did you mean 'command'?",
        "server 'i': transport is 'sse', wanted 'stdio'",
        "server 'i': cwd is 3",
    ):
        assert part in message, part
    assert str(path) in message


@pytest.mark.parametrize("text", ["", "servers:", "{}"])
def test_a_file_without_servers_has_none(tmp_path, text):
    assert load_servers(write(tmp_path, text), python="p") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "wanted a mapping with the key 'servers', got list"),
        ("servers: [a]", "servers is list"),
        ("servers: {a: [", "not YAML"),
        ("use_internal_servers: 3", "use_internal_servers is 3"),
    ],
)
def test_a_file_of_another_kind_is_rejected(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        load_servers(write(tmp_path, text), python="p")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: the file of the servers is not there"):
        load_servers(tmp_path / "nowhere.yaml", python=sys.executable)


def test_a_server_that_is_needed_and_missing_is_named_with_its_likes(shop_servers):
    require_servers(shop_servers, ["bikes", "notes"])
    with pytest.raises(
        ConfigError, match=r"no server 'bike', 'cloud_drive'. Did you mean 'bikes'\?.*no internal servers"
    ):
        require_servers(shop_servers, ["notes", "bike", "cloud_drive"])
