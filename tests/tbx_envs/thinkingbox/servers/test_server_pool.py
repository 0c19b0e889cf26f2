"""Sessions of other people's servers, by fork and by spawn: the same promises, and the same answers."""

import copy
import dataclasses
import datetime
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from tbx_envs.errors import CheckFault, ConfigError, ToolFault
from tbx_envs.thinkingbox.servers import launcher
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import ProcessServer

ALL = ["bikes", "notes", "trouble"]
MOMENT = datetime.datetime(2025, 10, 1, 8, 30, tzinfo=datetime.UTC)


@pytest.fixture
def opened(pool):
    """Opens sessions that end with the test."""
    sessions = []

    def build(*servers, **configs):
        options = {key: configs.pop(key) for key in ("clock", "clock_runs", "session_id") if key in configs}
        sessions.append(pool.open(configs, servers=servers, **options))
        return sessions[-1]

    yield build
    for session in sessions:
        session.close()


def of(session, tool, /, **arguments):
    answer = session.call(tool, arguments)
    assert answer.status == "ok", answer
    return json.loads(answer.text)


# --- sessions -----------------------------------------------------------------------------------------------


def test_a_session_answers_and_its_effects_tell_what_was_done(opened):
    expected = [
        {"tool": "start_rental", "parameters": {"customer_id": "C3", "bike_id": "B1", "days": 2}},
        {"tool": "refund", "parameters": {"rental_id": "R1", "amount": 12.5}},
    ]
    session = opened("bikes", bikes={"golden_test_case": {"tool_interactions": expected}, "rubrics_yesno": ["Polite?"]})
    assert session.init_result == {"bikes": {}}
    assert of(session, "find_customer", email="cleo@example.org")["id"] == "C3"
    before = session.effects()["bikes"]
    assert before["result_db_hash"] != before["golden_db_hash"] and len(before["diff"]) == 3
    assert of(session, "start_rental", customer_id="C3", bike_id="B1", days=2)["id"] == "R2"
    assert of(session, "refund", rental_id="R1", amount="12.50")["refunded"] == 12.5  # the server's to coerce
    after = session.effects()["bikes"]
    assert (after["result_db_hash"], after["diff"], after["rubrics_yesno"]) == (
        before["golden_db_hash"],
        [],
        ["Polite?"],
    )


def test_each_session_has_a_world_of_its_own(opened):
    one, other = opened("bikes"), opened("bikes", bikes={"data_patch": {"customers": [{"id": "C1", "phone": "1"}]}})
    of(one, "update_customer", customer_id="C1", phone="555-9999")
    assert of(other, "find_customer", email="ada@example.org")["phone"] == "1"
    assert of(opened("bikes"), "find_customer", email="ada@example.org")["phone"] == "555-0101"


def test_arguments_are_passed_untouched(opened):
    arguments = {"$filter": "a eq 'b'", "none": None, "nested": {"none": None}, "é": "🙂\n", "f": 1.0}
    assert of(opened("trouble"), "echo", **arguments) == arguments


def test_several_servers_are_one_list_and_the_later_ones_tool_stands_at_the_first_ones_place(opened):
    session = opened(*ALL)
    names = [tool.name for tool in session.tools]
    bikes, trouble = names[:10], names[11:]
    assert bikes[:2] == ["find_customer", "list_bikes"] and bikes[7:] == ["add_note", "get_today", "search_policy"]
    assert names[10] == "list_notes" and trouble[:2] == ["fine", "empty"]
    assert {tool.name: tool.server for tool in session.tools}["add_note"] == "notes"
    of(session, "add_note", customer_id="C1", text="hello")
    assert session.effects()["notes"]["notes"] == [{"customer_id": "C1", "text": "hello"}]
    reverse = opened("notes", "bikes")
    assert [tool.name for tool in reverse.tools][:2] == ["list_notes", "add_note"]
    assert {tool.name: tool.server for tool in reverse.tools}["add_note"] == "bikes"
    assert list(reverse.init_result) == ["notes", "bikes"]


def test_reserved_tools_are_neither_listed_nor_reached(opened):
    session = opened(*ALL)
    assert not [tool.name for tool in session.tools if tool.name.startswith("__")]
    for name in ("__reserved__init", "__reserved__geteffects", "__reserved__server_tool", "no_such_tool"):
        answer = session.call(name, {"config": {}})
        assert (answer.text, answer.status) == (f"Error: function '{name}' does not exist", "invalid")
    for name, arguments in ((None, {}), ("find_customer", [1]), ("find_customer", {"email": "\ud800"}), ("\ud800", {})):
        assert session.call(name, arguments).status == "invalid"
    assert session.call_reserved("bikes", "get_rental", {"rental_id": "R1"})["id"] == "R1"
    assert session.call_reserved("trouble", "fine", {}) == "fine"
    assert set(session.call_reserved("bikes", "__reserved__geteffects", {})) >= {"result_db_hash"}
    for server, name in (("bikes", "list_notes"), ("nowhere", "fine")):
        with pytest.raises(ToolFault, match=f"no tool '{name}' of server '{server}'"):
            session.call_reserved(server, name, {})
    assert session.call("fine", {}).status == "ok"


def test_the_sessions_id_is_given_to_the_reserved_tools_that_ask_for_it(opened):
    session = opened("bikes", "notes", session_id="the-session")
    assert session.session_id == "the-session"
    assert session.effects()["notes"]["session_id"] == "the-session"
    assert session.call_reserved("notes", "__reserved__teardown", {}) == {"status": "ok", "session_id": "the-session"}
    assert opened("trouble").session_id != opened("trouble").session_id


def test_a_published_schema_has_no_references_and_no_titles(opened):
    tools = {tool.name: tool for tool in opened("trouble").tools}
    assert tools["with_schema"].input_schema == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "day": {"type": "string", "format": "date"},
            "days": {"type": "array", "items": {"title": "Day", "type": "string", "format": "date"}},
            "any": True,
        },
        "required": ["day"],
    }
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert tools["tree"].input_schema == {
        "type": "object",
        "properties": {"first": node},
        "$defs": {"Node": node},
    }
    assert tools["plain"].description == ""
    assert len(tools) > 25  # the list came in two pages


def test_results_become_text(opened):
    session = opened("trouble")
    odd = ("empty", "null", "image", "several", "others", "is_error", "structured", "structured_beside_null")
    texts = {name: session.call(name, {}) for name in (*odd, "half_a_pair")}
    assert {name: answer.status for name, answer in texts.items()} == {
        **dict.fromkeys(texts, "ok"),
        "is_error": "rejected",
    }
    assert {name: answer.text for name, answer in texts.items()} == {
        "empty": "",
        "null": "",
        "image": "[image that cannot be shown: image/png, 6 bytes]",
        "several": "one\n[image that cannot be shown: image/png, 6 bytes]\ntwo",
        "others": "[audio that cannot be shown: audio/wav, 6 bytes]\n[link to file:///plan.pdf: Plan of the stations]\n"
        "opening\n[resource that cannot be shown: file:///b, application/zip]",
        "structured": '{"née": [1]}',
        "structured_beside_null": '{"née": [1]}',
        "half_a_pair": "half \ufffd of it",
        "is_error": "the shop says no",
    }
    invalid = session.call("invalid_params", {})
    assert (invalid.text, invalid.status) == ("Error: no such argument", "invalid")
    assert session.call("fine", {}).text == "fine"


def test_the_first_part_alone_is_kept_on_request(shop_servers):
    with ServerPool(shop_servers, knowledge=False, always_first_part=True) as pool:
        session = pool.open({}, servers=["trouble"])
        assert session.call("several", {}).text == "one"
        assert session.call("empty", {}).text == ""


def test_notifications_and_requests_of_a_server_do_not_disturb_a_call(opened):
    assert opened("trouble").call("chatter", {}).text == "fine"


def test_large_answers_and_arguments_arrive_whole(opened):
    session = opened("trouble")
    assert session.call("large", {"size": 3_000_000}).text == "x" * 3_000_000
    assert of(session, "echo", text="y" * 2_000_000) == {"text": "y" * 2_000_000}


def test_a_process_has_the_environment_folder_and_arguments_of_the_file(opened, shop_servers):
    session = opened("trouble")
    looked = of(session, "look")
    assert (looked["cwd"], looked["argv"]) == (os.path.realpath(shop_servers["trouble"].cwd), ["an argument"])
    assert looked["pid"] == looked["group"]
    assert of(session, "look", name="BIKESHOP_COLOUR") == "green {python}"
    assert of(session, "look", name="FASTMCP_LOG_LEVEL") == "WARNING"
    assert of(session, "look", name="PATH") == os.environ["PATH"]
    assert "PYTEST_CURRENT_TEST" in os.environ and of(session, "look", name="PYTEST_CURRENT_TEST") is None


@pytest.mark.parametrize(
    ("init", "result"),
    [("empty_object", {}), ("ok", {"shop": "open"}), ("slow", {})],
)
def test_what_init_says_is_kept_without_its_status(opened, init, result):
    assert opened("trouble", trouble={"init": init}).init_result == {"trouble": result}


@pytest.mark.parametrize(
    "init", ["error", "no_json", "list", "other_status", "without_status", "is_error", "no_content", "image"]
)
def test_an_init_that_does_not_say_that_all_is_well_is_a_fault(pool, init):
    with pytest.raises(ToolFault, match="server 'trouble' was not initialised: '__reserved__init' answered") as fault:
        pool.open({"trouble": {"init": init}}, servers=["trouble"])
    if init == "error":
        assert "no bikes" in str(fault.value)


@pytest.mark.parametrize("effects", ["error", "no_json", "list", "is_error", "no_content", "image"])
def test_effects_that_cannot_be_read_are_a_fault(opened, effects):
    session = opened("trouble", trouble={"effects": effects})
    with pytest.raises(CheckFault, match="server 'trouble': '__reserved__geteffects' answered"):
        session.effects()


def test_teardown_never_raises_and_a_closed_session_is_over(pool):
    for teardown in ("ok", "error", "no_json", "die", "exit_zero", "garbage", "is_error"):
        session = pool.open({"trouble": {"teardown": teardown}}, servers=["trouble"])
        session.close()
        session.close()
        session.discard()
        with pytest.raises(ToolFault, match="this session is over"):
            session.call("fine", {})


def test_a_server_that_is_unknown_or_cannot_be_started_as_configured_is_an_error_of_configuration(pool):
    with pytest.raises(ConfigError, match="no server 'bike'"):
        pool.open({}, servers=["bike"])
    with pytest.raises(ConfigError, match=r"server 'elsewhere' .* BIKESHOP_PYTHON is not set"):
        pool.open({}, servers=["bikes", "elsewhere"])


@pytest.mark.parametrize(
    "changes", [{"python": "/nowhere/python"}, {"cwd": "/nowhere"}, {"command": ("/nowhere/server", "x")}]
)
def test_a_command_that_cannot_be_run_is_named(trouble_with, how, changes):
    pool = ServerPool({"trouble": trouble_with(**changes)}, start=how, knowledge=False)
    with pool, pytest.raises((ConfigError, ToolFault), match="/nowhere"):
        pool.open({}, servers=["trouble"])


def test_a_server_that_has_ended_before_its_start_is_noticed_is_explained_all_the_same(trouble_with, monkeypatch):
    """Both messages come in one read when this process was busy; here always."""
    original, held = launcher._Program._take, []

    def together(self, message):
        held.append(message)
        if "started" not in message:
            for one in held:
                original(self, one)
            held.clear()

    monkeypatch.setattr(launcher._Program, "_take", together)
    pool = ServerPool({"trouble": trouble_with(command=("/nowhere/server", "x"))}, start="spawn", knowledge=False)
    with pool, pytest.raises((ConfigError, ToolFault), match="/nowhere"):
        pool.open({}, servers=["trouble"])


def test_servers_find_their_search_service(shop_servers, how):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bikes = dataclasses.replace(shop_servers["bikes"], env={"BIKESHOP_SEARCH_PORT": str(port)})
    sources = [{"name": "Damage.md", "snippets": ["A damaged bike goes to repair."]}, {"name": "B", "snippets": ["b"]}]
    with ServerPool({"bikes": bikes}, start=how, knowledge_port=port) as pool:
        sessions = [pool.open({"bikes": {"sources": sources[:number]}}, servers=["bikes"]) for number in (2, 1)]
        found = [of(session, "search_policy", query="damaged bike", max_results=2)["snippets"] for session in sessions]
        assert [[hit["source"] for hit in hits] for hits in found] == [["Damage.md", "B"], ["Damage.md"]]
        for session in sessions:
            session.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert json.load(answer)["ok"]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")


# --- fork and spawn -----------------------------------------------------------------------------------------


def transcript(pool, clock):
    """Everything that a conversation with all servers shows."""
    calls = [
        ("find_customer", {"email": "ada@example.org"}),
        ("find_customer", {"email": "nobody"}),
        ("find_customer", {}),
        ("start_rental", {"customer_id": "C2", "bike_id": "B1", "days": 1}),
        ("start_rental", {"customer_id": "C1", "bike_id": "B1", "days": "3"}),
        ("end_rental", {"rental_id": "R1", "damage": "yes"}),
        ("add_note", {"customer_id": "C1", "text": "x"}),
        ("get_today", {}),
        ("search_policy", {"query": "x"}),
        ("several", {}),
        ("invalid_params", {}),
        ("count", {}),
    ]
    config = {"bikes": {"data_patch": {"bikes": [{"id": "B9", "kind": "kids", "station": "east", "status": "free"}]}}}
    session = pool.open(config, servers=ALL, clock=clock, session_id="s")
    shown = [session.tools, session.init_result, [session.call(*call) for call in calls], session.effects()]
    session.close()
    return shown


def test_fork_and_spawn_list_answer_and_change_the_same(pool_of):
    forked = transcript(pool_of("fork"), MOMENT)
    assert forked == transcript(pool_of("spawn"), MOMENT)
    assert forked == transcript(pool_of("fork"), MOMENT)  # with the listing known


def test_a_server_that_cannot_be_forked_is_spawned_and_a_log_line_says_why(trouble_with, caplog, tmp_path):
    (tmp_path / "bare.py").write_text("from bikeshop_servers import trouble\ntrouble.main()\n")
    (tmp_path / "middle.py").write_text(
        "from bikeshop_servers import trouble\nif __name__ == '__main__':\n    trouble.main()\nX = 1\n"
    )
    folder = trouble_with().cwd
    cases = {
        "import_thread": ({}, "its import started threads (shop-watcher)"),
        "import_socket": ({}, "its import left open a connection"),
        "bare": ({"command": ("{python}", str(tmp_path / "bare.py"))}, "has no `if __name__"),
        "middle": ({"command": ("{python}", str(tmp_path / "middle.py"))}, "does not end with its only"),
        "inline": ({"command": ("{python}", "-c", "from bikeshop_servers.trouble import main; main()")}, "its command"),
        "shell": ({"command": ("/bin/sh", "-c", f"exec {sys.executable} -m bikeshop_servers.trouble")}, "its command"),
    }
    for at_start, (changes, why) in cases.items():
        server = trouble_with(at_start, **changes)
        server.env["PYTHONPATH"] = folder
        with ServerPool({"trouble": server}, knowledge=False) as pool:
            caplog.clear()
            for _ in range(2):
                assert pool.open({}, servers=["trouble"]).call("fine", {}).text == "fine", at_start
            assert [record.message for record in caplog.records if why in record.message], (at_start, caplog.text)
            assert len(caplog.records) == 1


def test_a_script_can_be_forked_as_well(trouble_with, caplog, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        "import beside\nfrom bikeshop_servers import trouble\n"
        "if __name__ == '__main__':\n    assert beside.here and __file__.endswith('server.py')\n    trouble.main()\n"
    )
    (tmp_path / "beside.py").write_text("here = True\n")
    server = trouble_with(command=("{python}", "-u", "-X", "dev", str(script), "given"))
    server.env["PYTHONPATH"] = server.cwd
    shown = []
    for start in ("fork", "spawn"):
        with ServerPool({"trouble": server}, start=start, knowledge=False) as pool:
            session = pool.open({}, servers=["trouble"], clock=MOMENT)
            shown.append((of(session, "look")["argv"], session.call("fine", {})))
    assert shown[0] == shown[1] and shown[0][0] == ["given"] and not caplog.records


RANDOM_SERVER = """
import json, os, random, sys
{seed}
LATE = "late_module" in sys.modules
def main():
    import late_module
    for line in sys.stdin:
        asked = json.loads(line)
        result = {{}}
        if asked["method"] == "initialize":
            result = {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}},
                      "serverInfo": {{"name": "r", "version": "1"}}}}
        elif asked["method"] == "tools/list":
            result = {{"tools": [{{"name": "draw", "inputSchema": {{"type": "object"}}}}]}}
        elif asked["method"] == "tools/call":
            told = [random.random(), late_module.PID, os.getpid(), list(sys.modules).index("late_module")]
            result = {{"content": [{{"type": "text", "text": json.dumps(told)}}]}}
        if "id" in asked:
            print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": result}}), flush=True)
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("seed", ["", "random.seed(7)"])
def test_random_numbers_are_those_of_a_fresh_start_and_late_imports_are_done_once(tmp_path, seed):
    (tmp_path / "drawing.py").write_text(RANDOM_SERVER.format(seed=seed))
    (tmp_path / "late_module.py").write_text("import os\nPID = os.getpid()\n")
    server = ProcessServer("r", ("{python}", "-m", "drawing"), {}, str(tmp_path), sys.executable, os.environ)
    drawn = {}
    for start in ("fork", "spawn"):
        with ServerPool({"r": server}, start=start, knowledge=False) as pool:
            drawn[start] = [of(pool.open({}, servers=["r"]), "draw") for _ in range(3)]
    forked, spawned = ([row[0] for row in drawn[start]] for start in ("fork", "spawn"))
    if seed:
        assert len({*forked, *spawned}) == 1
    else:
        assert len({*forked, *spawned}) == 6
    assert len({row[1] for row in drawn["fork"]}) == 1  # imported by the rehearsal's parent, once
    assert all(row[1] == row[2] for row in drawn["spawn"])


LIBRARY_SERVER = RANDOM_SERVER.replace("import late_module\n    for", "for").replace(
    'told = [random.random(), late_module.PID, os.getpid(), list(sys.modules).index("late_module")]',
    "import late_library, own_late; told = [late_library.PID, own_late.PID, os.getpid()]",
)


@pytest.mark.parametrize(
    ("library", "is_taught"), [("", True), ("import threading; threading.Timer(600, print).start()", False)]
)
def test_libraries_that_sessions_import_late_are_imported_once_for_all_unless_a_fork_would_not_bear_it(
    tmp_path, library, is_taught
):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (tmp_path / "teaching.py").write_text(LIBRARY_SERVER.format(seed=""))
    (tmp_path / "own_late.py").write_text("import os\nPID = os.getpid()\n")
    (installed / "late_library.py").write_text(f"import os\nPID = os.getpid()\n{library}\n")
    env = {"PYTHONPATH": str(installed)}
    server = ProcessServer("r", ("{python}", "-m", "teaching"), env, str(tmp_path), sys.executable, os.environ)
    with ServerPool({"r": server}, knowledge=False) as pool:
        drawn = []
        for _ in range(200):
            session = pool.open({}, servers=["r"])
            drawn.append(of(session, "draw"))
            session.close()
            threading.Event().wait(0.01)
            if len(drawn) > 10 and drawn[-1][0] != drawn[-1][2]:
                break
            if not is_taught and len(drawn) > 30:
                break
    assert all(own == pid for _, own, pid in drawn)  # its own modules are not shared
    assert (drawn[-1][0] != drawn[-1][2]) == is_taught
    assert len({library_pid for library_pid, _, pid in drawn[-3:]}) == (1 if is_taught else 3)


# --- clock --------------------------------------------------------------------------------------------------


def test_a_clock_stands_still_or_goes_on_from_its_moment(opened):
    frozen = opened("bikes", clock=MOMENT)
    assert [of(frozen, "get_today") for _ in range(2)] == [
        {"today": "2025-10-01", "now": "2025-10-01T08:30:00+00:00"}
    ] * 2
    rental = of(frozen, "start_rental", customer_id="C1", bike_id="B1", days=1)
    assert rental["created_at"] == "2025-10-01T08:30:00+00:00"

    running = opened("bikes", clock=MOMENT, clock_runs=True)
    times = [datetime.datetime.fromisoformat(of(running, "get_today")["now"]) for _ in range(2)]
    assert MOMENT <= times[0] < times[1] < MOMENT + datetime.timedelta(minutes=5)


def test_a_clock_without_a_time_zone_is_utc_and_without_a_clock_it_is_today(opened):
    naive = opened("bikes", clock=datetime.datetime(2025, 10, 1, 8, 30))
    assert of(naive, "get_today")["now"] == "2025-10-01T08:30:00+00:00"
    elsewhere = datetime.timezone(datetime.timedelta(hours=2))
    moved = opened("bikes", clock=datetime.datetime(2025, 10, 1, 8, 30, tzinfo=elsewhere))
    assert of(moved, "get_today")["now"] == "2025-10-01T06:30:00+00:00"
    before = datetime.datetime.now(datetime.UTC)
    now = datetime.datetime.fromisoformat(of(opened("bikes"), "get_today")["now"])
    assert before <= now <= datetime.datetime.now(datetime.UTC)


def test_a_clock_that_cannot_be_set_is_said(trouble_with, tmp_path):
    shell = trouble_with(command=("/bin/sh", "-c", f"exec {sys.executable} -m bikeshop_servers.trouble"))
    pool = ServerPool({"trouble": shell}, start="spawn", knowledge=False)
    with pool, pytest.raises(ConfigError, match="the clock of server 'trouble' cannot be set"):
        pool.open({}, servers=["trouble"], clock=MOMENT)
    (tmp_path / "bare.py").write_text("from bikeshop_servers import trouble\ntrouble.main()\n")
    bare = trouble_with(command=("{python}", str(tmp_path / "bare.py")))
    bare.env["PYTHONPATH"] = bare.cwd
    pool = ServerPool({"trouble": bare}, knowledge=False)
    with pool, pytest.raises(ToolFault, match=r"its clock cannot be set: .*bare\.py has no `if __name__"):
        pool.open({}, servers=["trouble"], clock=MOMENT)


def test_an_interpreter_that_cannot_set_its_clock_is_told_what_to_install(trouble_with, tmp_path, how):
    # -S: what is installed is not seen
    without = trouble_with(command=("{python}", "-S", "-m", "bikeshop_servers.trouble"))
    old = trouble_with()
    (tmp_path / "time_machine-2.19.0.dist-info").mkdir()
    (tmp_path / "time_machine-2.19.0.dist-info" / "METADATA").write_text("Name: time-machine\nVersion: 2.19.0\n")
    old.env["PYTHONPATH"] = str(tmp_path)
    remedy = r"Run \S+ -m pip install 'time-machine>=3\.3', or give its tasks no clock"
    for server, why in (without, "it has no time-machine"), (old, r"it has time-machine 2\.19\.0"):
        said = rf"the clock of server 'trouble' cannot be set by \S+: {why}\. {remedy}"
        with ServerPool({"trouble": server}, start=how, knowledge=False) as pool:
            with pytest.raises(ConfigError, match=said):
                pool.open({}, servers=["trouble"], clock=MOMENT)
            assert pool.open({}, servers=["trouble"]).call("fine", {}).text == "fine"


# --- many at once -------------------------------------------------------------------------------------------


def test_sessions_from_many_threads_do_not_mix(pool_of):
    pool = pool_of("fork")
    failures = []

    def work(number):
        try:
            for turn in range(3):
                session = pool.open({}, servers=["trouble", "notes"])
                for step in range(5):
                    told = {"who": number, "turn": turn, "step": step}
                    assert of(session, "echo", **told) == told
                    of(session, "add_note", customer_id=str(number), text=str(step))
                assert of(session, "count") == 6
                assert len(session.effects()["notes"]["notes"]) == 5
                session.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_one_session_can_be_called_from_two_threads(pool_of):
    session = pool_of("fork").open({}, servers=["trouble"])
    texts = []
    slow = threading.Thread(target=lambda: texts.append(session.call("slow", {"seconds": 0.2}).text))
    slow.start()
    texts.append(session.call("fine", {}).text)
    slow.join()
    assert sorted(texts) == ["at last", "fine"]
    session.close()


# --- the pool's life ----------------------------------------------------------------------------------------


def test_a_closed_pool_opens_nothing_and_its_sessions_are_over(shop_servers):
    pool = ServerPool(shop_servers, knowledge=False)
    pool.close()
    with pytest.raises(ToolFault, match="the pool is closed"):
        pool.open({}, servers=["trouble"])
    pool = ServerPool(shop_servers, knowledge=False)
    session = pool.open({}, servers=["trouble"])
    pool.close()
    pool.close()
    with pytest.raises(ToolFault, match="the pool is closed"):
        session.call("fine", {})
    session.close()
    session.discard()


def test_a_pool_that_is_closed_during_a_call_answers_the_caller(shop_servers):
    pool = ServerPool(shop_servers, knowledge=False)
    session = pool.open({}, servers=["trouble"])
    closer = threading.Timer(0.2, pool.close)
    closer.start()
    with pytest.raises(ToolFault):
        session.call("hang", {})
    closer.join()


IN_ANOTHER_PROCESS = """
import os, sys, warnings
warnings.simplefilter("error")
from tbx_envs.thinkingbox.servers.servers_file import load_servers
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
pool = ServerPool(load_servers({file!r}, python=sys.executable), knowledge=False)
session = pool.open({{}}, servers=["trouble", "notes"])
session.call("fine", {{}})
{rest}
"""


def in_another_process(shop_servers, rest, **options):
    file = os.path.join(shop_servers["trouble"].cwd, "servers.yaml")
    program = IN_ANOTHER_PROCESS.format(file=file, rest=rest)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, **options)


def test_a_forgotten_pool_ends_with_the_interpreter(shop_servers):
    ran = in_another_process(shop_servers, "print('done')")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


def test_a_forked_child_can_neither_use_nor_close_the_pool_of_its_parent(shop_servers):
    ran = in_another_process(
        shop_servers,
        """
warnings.simplefilter("ignore")  # of a fork with threads
child = os.fork()
if child == 0:
    for use in (lambda: session.call("fine", {}), lambda: pool.open({}, servers=["trouble"])):
        try:
            use()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    session.close()
    session.discard()
    pool.close()
    with ServerPool(pool.servers, knowledge=False) as own:
        print(own.open({}, servers=["trouble"]).call("fine", {}).text, flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1], session.call("fine", {}).text)
""",
    )
    told = "ToolFault a pool belongs to the process that created it. Create one after the fork.\n"
    assert (ran.stdout, ran.stderr) == (told * 2 + "fine\n0 fine\n", "")


def test_a_session_keeps_its_pool(shop_servers):
    session = ServerPool(shop_servers, knowledge=False).open({}, servers=["trouble"])
    assert session.call("fine", {}).text == "fine"
    session.close()


def test_the_shops_hash_is_what_it_says(shop_servers, monkeypatch):
    monkeypatch.syspath_prepend(shop_servers["bikes"].cwd)
    from bikeshop_servers.shop import ROWS, Shop

    rows = copy.deepcopy(ROWS)
    del rows["rentals"][0]["created_at"]
    assert Shop().digest() == hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
