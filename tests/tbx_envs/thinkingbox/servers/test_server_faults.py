"""Servers that misbehave: every way ends in a `ToolFault` that says what happened, and nothing is sent twice."""

import os
import re
import signal
import sys
import threading

import pytest

from tbx_envs.errors import ConfigError, ToolFault
from tbx_envs.thinkingbox.servers import launcher
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import ProcessServer

LIMIT_S = 0.5  # where something is meant to hang; everything else has half a minute

# tool of `trouble` -> what the fault must say
NOTICED = {
    "die": r"it closed its stdout; its process was killed by SIGKILL",
    "exit_zero": r"it closed its stdout; its process ended with status 0",
    "raise": r"it closed its stdout; its process ended with status 1[^$]*ZeroDivisionError: division by zero",
    "complain": r"its process ended with status 7[^$]*complaint 19999",
    "close_stdout": r"it closed its stdout",
    "print_line": r"it wrote 'about to answer' to its stdout, which is no message",
    "print_blank": r"it wrote '' to its stdout, which is no message",
    "garbage": r"to its stdout, which is no message of the protocol",
    "half_line": r"it wrote '{\"jsonrpc\": \"2.0\", \"id\"' and closed its stdout; its process ended with status 0",
    "not_rpc": r"it wrote '{\"hello\": \"world\"}' to its stdout",
    "wrong_id": r"it answered .*, which belongs to no request",
    "error_without_id": r"it answered .*what\?.*, which belongs to no request",
    "no_result": r"answered what is no result of a tool",
    "protocol_error": r"failed: out of order",
}
HANGING = ("hang", "hang_deaf", "spin")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def started_by(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come true within 10 s")


@pytest.mark.parametrize("tool", NOTICED)
def test_misbehaviour_in_a_call_is_noticed_at_once_and_ends_the_session(pool, tool):
    session = pool.open({}, servers=["trouble", "notes"] if tool == "die" else ["trouble"])
    with pytest.raises(ToolFault, match=NOTICED[tool]) as fault:
        session.call(tool, {})
    assert re.match(rf"server 'trouble' in a call of '{tool}': ", str(fault.value))
    for use in (lambda: session.call("fine", {}), session.effects):
        with pytest.raises(ToolFault, match="this session is over"):
            use()
    session.close()


@pytest.mark.parametrize("tool", HANGING)
def test_a_call_that_hangs_is_a_fault_within_its_limit_and_its_process_is_killed(pool, tool):
    session = pool.open({}, servers=["trouble"])
    pid = session.call_reserved("trouble", "look", {})["pid"]
    with pytest.raises(ToolFault, match=rf"in a call of '{tool}': did not answer within {LIMIT_S} s"):
        session.call(tool, {}, timeout_s=LIMIT_S)
    wait_until(lambda: not is_alive(pid))


def test_the_pools_limit_holds_for_calls_and_teardown_unless_a_call_has_one_of_its_own(trouble_with, how):
    with ServerPool({"trouble": trouble_with()}, start=how, knowledge=False, call_timeout_s=1) as pool:
        session = pool.open({}, servers=["trouble"])
        assert session.call("slow", {"seconds": 1.5}, timeout_s=30).text == "at last"
        with pytest.raises(ToolFault, match=r"did not answer within 1 s"):
            session.call("hang", {})
        session = pool.open({"trouble": {"teardown": "hang_deaf"}}, servers=["trouble"])
        pid = session._links["trouble"]._process.pid
        session.close()  # never raises
        wait_until(lambda: not is_alive(pid))


def test_an_answer_too_many_is_noticed_with_the_next_call_at_the_latest(pool):
    session = pool.open({}, servers=["trouble"])
    with pytest.raises(ToolFault, match="which belongs to no request"):
        for _ in range(2):
            session.call("answer_twice", {})


def test_a_server_that_dies_between_calls_is_a_fault_of_the_next(pool):
    session = pool.open({}, servers=["trouble"])
    os.kill(session.call_reserved("trouble", "look", {})["pid"], signal.SIGKILL)
    with pytest.raises(ToolFault, match="it closed its stdout; its process was killed by SIGKILL"):
        session.call("fine", {})


@pytest.mark.parametrize("init", ["die", "exit_zero", "garbage", "print_line", "wrong_id", "protocol_error"])
def test_misbehaviour_in_init_is_a_fault_of_opening(pool, init):
    with pytest.raises(ToolFault, match="server 'trouble' in a call of '__reserved__init': "):
        pool.open({"trouble": {"init": init}}, servers=["notes", "trouble"] if init == "die" else ["trouble"])


@pytest.mark.parametrize("effects", ["die", "exit_zero", "garbage", "wrong_id", "protocol_error"])
def test_misbehaviour_while_effects_are_read_is_a_fault(pool, effects):
    session = pool.open({"trouble": {"effects": effects}}, servers=["trouble"])
    with pytest.raises(ToolFault, match="server 'trouble' in a call of '__reserved__geteffects': "):
        session.effects()


def test_init_and_effects_have_limits_too(trouble_with, how):
    with ServerPool({"trouble": trouble_with()}, start=how, knowledge=False, start_timeout_s=2) as pool:
        with pytest.raises(ToolFault, match=r"in a call of '__reserved__init': did not answer within"):
            pool.open({"trouble": {"init": "hang"}}, servers=["trouble"])
        session = pool.open({"trouble": {"effects": "hang"}}, servers=["trouble"])
        with pytest.raises(ToolFault, match=r"in a call of '__reserved__geteffects': did not answer within 2 s"):
            session.effects()


AT_START = {
    "import_error": r"RuntimeError: the shop is closed",
    "import_exit": r"SystemExit|ended with status 3",
    "import_print": r"printed to stdout while it was imported.*welcome|it wrote 'welcome to the shop'",
    "list_twice": r"lists 'with_schema' more than once",
    "list_dangling": r"tool 'tree': its schema refers to '#/\$defs/Nothing', which is missing",
    "list_garbage": r"while it listed its tools: it wrote 'tools: many'",
    "hello_error": r"while it was greeted: failed: .*not today",
    "hello_die": r"while it was greeted: it closed its stdout; its process ended with status 4[^$]*I do not want to",
}


@pytest.mark.parametrize("at_start", AT_START)
def test_a_server_that_cannot_be_started_is_a_fault_that_shows_why(trouble_with, how, at_start):
    with ServerPool({"trouble": trouble_with(at_start)}, start=how, knowledge=False, start_timeout_s=30) as pool:
        for _ in range(2):  # the second time it is tried anew
            with pytest.raises(ToolFault, match=AT_START[at_start]):
                pool.open({}, servers=["trouble"])


@pytest.mark.parametrize("at_start", ["import_hang", "hello_hang", "list_hang"])
def test_a_server_that_does_not_come_up_is_a_fault_within_the_limit(trouble_with, how, at_start):
    pool = ServerPool({"trouble": trouble_with(at_start)}, start=how, knowledge=False, start_timeout_s=1)
    with pool, pytest.raises(ToolFault, match=r"server 'trouble' .*: did not answer in time"):
        pool.open({}, servers=["trouble"])


NOT_THERE = {
    "package": (("{python}", "-m", "nowhere.desk"), r"module 'nowhere.desk'\. .*TBX_SERVERS_PYTHON.*servers_python="),
    "module": (("{python}", "-m", "bikeshop_servers.nothing"), r"module 'bikeshop_servers.nothing'\. .*TBX_SERVERS"),
    "in_a_module": (("{python}", "-m", "bikeshop_servers.trouble.x"), r"module 'bikeshop_servers.trouble.x'"),
    "main": (("{python}", "-m", "bikeshop_servers"), r"No module named 'bikeshop_servers.__main__'"),
    "own": (("python3", "-m", "nowhere"), r"module 'nowhere'\. Install .* servers\.yaml"),
    "script": (("{python}", "nowhere.py"), r"find its script\. Correct its command or cwd.*/nowhere\.py is not there"),
}


@pytest.mark.parametrize("case", NOT_THERE)
def test_a_server_that_is_not_there_is_an_error_of_configuration_that_says_what_to_do(
    trouble_with, how, case, tmp_path
):
    command, told = NOT_THERE[case]
    if case == "own":
        (tmp_path / "python3").symlink_to(sys.executable)
        command = (str(tmp_path / "python3"), *command[1:])
    with ServerPool({"trouble": trouble_with(command=command)}, start=how, knowledge=False) as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match=told) as caught:
                pool.open({}, servers=["trouble"])
            interpreter = command[0].format(python=sys.executable)
            assert f"cannot start: {interpreter} does not find" in str(caught.value)


@pytest.mark.parametrize("missing", ["nowhere", "desk.nowhere"])
def test_a_module_that_the_server_fails_to_import_is_a_fault_of_the_server(trouble_with, how, missing, tmp_path):
    package = tmp_path / "desk"
    package.mkdir()
    (package / "__init__.py").write_text(f"import {missing}\n")
    (package / "server.py").write_text("if __name__ == '__main__':\n    pass\n")
    server = trouble_with(command=("{python}", "-m", "desk.server"), cwd=str(tmp_path))
    with (
        ServerPool({"trouble": server}, start=how, knowledge=False) as pool,
        pytest.raises(ToolFault, match=rf"No module named '{missing}'"),
    ):
        pool.open({}, servers=["trouble"])


def test_a_way_to_start_that_does_not_exist_is_an_error_of_configuration(trouble_with):
    with pytest.raises(ConfigError, match=r"started by 'forked'. Give start one of fork, spawn"):
        ServerPool({"trouble": trouble_with()}, start="forked")


def test_a_fork_server_that_dies_takes_its_sessions_along_and_is_started_anew(trouble_with):
    with ServerPool({"trouble": trouble_with()}, knowledge=False) as pool:
        session, other = pool.open({}, servers=["trouble"]), pool.open({}, servers=["trouble"])
        pid = session.call_reserved("trouble", "look", {})["pid"]
        session.call("leave_processes", {})
        left = started_by(pid)
        os.kill(parent_of(pid), signal.SIGKILL)
        with pytest.raises(ToolFault, match="it closed its stdout; its process"):
            other.call("hang", {}, timeout_s=30)
        wait_until(lambda: not is_alive(pid))
        assert pool.open({}, servers=["trouble"]).call("fine", {}).text == "fine"
        assert len(left) == 2
        wait_until(lambda: not any(is_alive(process) for process in left))  # though it could not end them any more
        with pytest.raises(ToolFault):
            session.call("fine", {})


def test_a_fork_server_that_is_stopped_is_asked_once_and_replaced(trouble_with, monkeypatch):
    monkeypatch.setattr(launcher, "SILENCE_S", 2.0)
    silenced, asked = launcher._Program._silenced, []
    monkeypatch.setattr(launcher._Program, "_silenced", lambda self: asked.append(1) or silenced(self))
    with ServerPool({"trouble": trouble_with()}, knowledge=False) as pool:
        session = pool.open({}, servers=["trouble"])
        stopped = parent_of(session.call_reserved("trouble", "look", {})["pid"])
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(3):
            assert pool.open({}, servers=["trouble"]).call("fine", {}).text == "fine"
        assert asked == [1] and not is_alive(stopped)


@pytest.mark.parametrize("tool", ["hang", "die", "slow"])
def test_no_call_arrives_twice(pool, tool, tmp_path):
    log = tmp_path / "log"
    session = pool.open({"trouble": {"log": str(log)}}, servers=["trouble"])
    session.call("echo", {"step": 1})
    with pytest.raises(ToolFault):
        session.call(tool, {"seconds": 2 * LIMIT_S}, timeout_s=LIMIT_S)
    for _ in range(2):
        with pytest.raises(ToolFault):
            session.call("echo", {"step": 2})
    session.close()
    assert log.read_text().splitlines() == ['echo {"step": 1}', f'{tool} {{"seconds": {2 * LIMIT_S}}}']


def test_a_fault_in_one_session_leaves_the_others_alone(pool_of):
    pool = pool_of("fork")
    sessions = [pool.open({}, servers=["trouble"]) for _ in range(4)]
    with pytest.raises(ToolFault):
        sessions[0].call("die", {})
    with pytest.raises(ToolFault):
        sessions[1].call("garbage", {})
    assert [session.call("fine", {}).text for session in sessions[2:]] == ["fine", "fine"]
    for session in sessions:
        session.close()


def test_one_server_that_fails_to_start_leaves_no_session_of_the_others(trouble_with, shop_servers, how):
    servers = {"notes": shop_servers["notes"], "trouble": trouble_with("hello_die")}
    with ServerPool(servers, start=how, knowledge=False) as pool:
        with pytest.raises(ToolFault, match="server 'trouble'"):
            pool.open({}, servers=["notes", "trouble"])
        wait_until(lambda: not pool._engine._links and not pool._engine._endings)


def test_a_server_that_misses_a_variable_which_was_held_back_says_how_it_gets_it(tmp_path):
    (tmp_path / "needy.py").write_text("import os\nos.environ['DATABASE_URL']\n")
    environ = {**os.environ, "DATABASE_URL": "postgres://me:pw@db"}
    server = ProcessServer("needy", ("{python}", "-m", "needy"), {}, str(tmp_path), sys.executable, environ)
    words = r"It names DATABASE_URL, which is set here.* TBX_PASS_VARIABLES"
    pool = ServerPool({"needy": server}, start="spawn", knowledge=False)
    with pool, pytest.raises(ToolFault, match=words) as caught:
        pool.open({}, servers=["needy"])
    assert "pw" not in str(caught.value)
