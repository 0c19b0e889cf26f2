import asyncio
import contextlib
import cProfile
import json
import queue
import threading
import time
from typing import Annotated

import pytest
from sqlalchemy import text

from tbx_envs.domains import in_process
from tbx_envs.domains.in_process import InProcessSession
from tbx_envs.domains.worlds import lend_world, rows_of, template_for
from tbx_envs.errors import ToolFault
from tbx_envs.testing.kiosk import METADATA
from tbx_envs.tools.listing import canonical_schema, domain_function_dicts
from tbx_envs.tools.tool import ToolContext, ToolRejection, tool

LIMIT_S = 0.2  # of a call that is meant to hang; every other test leaves the default


@pytest.fixture
def session_with(kiosk_with):
    worlds = []

    def build(*tools, timeout_s=10.0):
        domain = kiosk_with(*tools)
        world = lend_world(template_for(domain.task(f"{domain.name}/order/000"), domain))
        worlds.append(world)
        return InProcessSession.open(domain, world, timeout_s)

    yield build
    for world in worlds:
        world.close()


ORDER = {"item": "tea", "quantity": 2, "code": "1000"}


def test_a_call_is_answered_and_committed(session_with):
    session = session_with()
    answer = session.call("place_order", ORDER)
    assert (json.loads(answer.text), answer.status) == ({"order_id": "O2", "left": 7}, "ok")
    session.world.db.rollback()
    assert ("O2", "tea", 2, "1000", "open") in rows_of(session.world.raw, METADATA)["orders"]


def test_a_rejected_call_is_an_answer_and_leaves_nothing_behind(session_with):
    session = session_with()
    before = rows_of(session.world.raw, METADATA)
    answer = session.call("place_order", {**ORDER, "quantity": 100})
    assert answer.status == "rejected"
    assert answer.text == "100 of 'tea' cannot be ordered; 9 are left."
    session.world.db.commit()
    assert rows_of(session.world.raw, METADATA) == before


def test_a_call_that_cannot_be_made_is_invalid_and_runs_nothing(session_with):
    session = session_with()
    before = rows_of(session.world.raw, METADATA)
    for name, arguments in [
        ("place_oder", ORDER),
        ("place_order", {}),
        ("place_order", {**ORDER, "code": "\ud800"}),
    ]:
        assert session.call(name, arguments).status == "invalid"
    assert rows_of(session.world.raw, METADATA) == before


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), SystemExit(0), RecursionError(), KeyError("x")])
def test_what_a_tool_does_not_document_is_a_fault_and_leaves_nothing_behind(session_with, error):
    @tool(mutates=True)
    def explode(context: ToolContext) -> str:
        """Write, then raise."""
        context.db.execute(text("UPDATE items SET stock = 0"))
        raise error

    session = session_with(explode)
    before = rows_of(session.world.raw, METADATA)
    with pytest.raises(ToolFault, match=f"tool explode.*{type(error).__name__}") as fault:
        session.call("explode", {})
    assert fault.value.__cause__ is error
    assert rows_of(session.world.raw, METADATA) == before
    assert session.call("list_items", {}).status == "ok"


def test_a_result_without_a_json_form_is_a_fault(session_with):
    @tool(mutates=False)
    def give(context: ToolContext, *, what: Annotated[str, "What."]) -> object:
        """Give something."""
        return {"nan": float("nan"), "set": {1}}[what]

    session = session_with(give)
    for what in ("nan", "set"):
        with pytest.raises(ToolFault, match="tool give"):
            session.call("give", {"what": what})


def test_a_tool_that_hangs_is_a_fault_within_its_limit_and_the_next_call_works(session_with):
    release = threading.Event()

    @tool(mutates=False)
    def block(context: ToolContext) -> str:
        """Wait in a C call."""
        release.wait(60)
        return "late"

    @tool(mutates=False)
    def spin(context: ToolContext) -> str:
        """Loop in Python."""
        while True:
            pass

    @tool(mutates=False)
    def count(context: ToolContext) -> str:
        """Loop in SQLite."""
        forever = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
        return str(context.db.scalar(text(forever)))

    threads = set(threading.enumerate())
    for hang in (block, spin, count):
        session = session_with(hang, timeout_s=LIMIT_S)
        with pytest.raises(ToolFault, match=rf"tool {hang.name} did not answer within 0.2 s"):
            session.call(hang.name, {})
        assert session_with().call("list_items", {}).status == "ok"
    release.set()
    for thread in set(threading.enumerate()) - threads:
        if thread not in {driver.thread for drivers in in_process._idle_drivers.values() for driver in drivers}:
            thread.join(30)
            assert not thread.is_alive()


def test_a_tool_cannot_swallow_being_abandoned(session_with):
    stopped = threading.Event()

    @tool(mutates=False)
    def stubborn(context: ToolContext) -> str:
        """Catch everything."""
        while True:
            try:
                while True:
                    time.monotonic()
            except Exception:
                continue
            finally:
                stopped.set()

    with pytest.raises(ToolFault):
        session_with(stubborn, timeout_s=LIMIT_S).call("stubborn", {})
    assert stopped.wait(30)


@pytest.mark.parametrize("moment", ["in its tool", "at its answer", "at the end of its thread"])
def test_a_call_that_is_given_up_at_any_moment_prints_nothing_and_its_thread_ends(
    session_with, monkeypatch, caplog, moment
):
    """A thread that was told to end was hit by `ToolAbandoned` on its way out, and printed it over what was there."""

    @tool(mutates=False)
    def work(context: ToolContext) -> str:
        """Go on until it is given up, if this is the moment."""
        began.set()
        while moment == "in its tool":
            pass
        return "done"

    class Answers(queue.SimpleQueue):
        def put(self, answer):
            if moment == "at its answer" and answer != (None, None):
                driver.abandon(session)
            super().put(answer)

    def new_loop():
        loop = made()
        if moment == "at the end of its thread":
            loop.close = lambda: (driver.abandon(session), type(loop).close(loop))
        return loop

    made, printed, began = asyncio.SelectorEventLoop, [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(asyncio, "SelectorEventLoop", new_loop)
    session = session_with(work)
    driver = in_process._Driver()
    driver.replies = Answers()
    driver.requests.put((session, "call_tool", ("work", {})))
    if moment == "in its tool":
        assert began.wait(30)
        driver.abandon(session)
    if moment == "at the end of its thread":
        assert driver.replies.get(timeout=30)[1] is None
        driver.requests.put(None)
    driver.thread.join(30)
    assert not driver.thread.is_alive()
    assert printed == [] and caplog.records == []


def test_calls_can_be_profiled_also_after_one_that_was_given_up(session_with):
    """An exception that was withdrawn from a thread left CPython's flag for it set, and cProfile never returned."""

    @tool(mutates=False)
    def hang(context: ToolContext) -> str:
        """Never answer."""
        while True:
            pass

    def call_under_a_profiler():
        profile = cProfile.Profile()
        statuses.append(profile.runcall(session_with().call, "place_order", ORDER).status)

    statuses = []
    for before in (lambda: None, lambda: session_with(hang, timeout_s=LIMIT_S).call("hang", {})):
        with contextlib.suppress(ToolFault):
            before()
        thread = threading.Thread(target=call_under_a_profiler, daemon=True)
        thread.start()
        thread.join(30)
    assert statuses == ["ok", "ok"]


def test_it_works_inside_a_running_loop_and_from_several_threads(session_with):
    sessions = [session_with() for _ in range(4)]

    async def in_a_loop():
        return sessions[0].call("place_order", ORDER)

    assert asyncio.run(in_a_loop()).status == "ok"

    answers = {}

    def work(number):
        for _ in range(20):
            answers.setdefault(number, []).append(sessions[number].call("note", {"text": f"from {number}"}).status)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: ["ok"] * 20 for number in (1, 2, 3)}
    for number in (1, 2, 3):
        assert rows_of(sessions[number].world.raw, METADATA)["notes"] == [(f"from {number}",)] * 20


def test_calls_one_after_the_other_share_one_session(session_with):
    session_with().call("list_items", {})
    threads = threading.active_count()
    for _ in range(5):
        session_with().call("list_items", {})
    assert threading.active_count() == threads


def test_the_listing_through_mcp_is_the_domains_own_in_canonical_form(session_with):
    session = session_with()
    listed = session.list_tools()
    assert listed == domain_function_dicts(session.domain.tools)
    assert json.dumps(listed) == json.dumps(domain_function_dicts(session.domain.tools))
    assert [entry["function"]["name"] for entry in listed] == [tool.name for tool in session.domain.tools]


def test_the_order_of_a_schemas_keys_does_not_depend_on_how_it_came(session_with):
    for entry in session_with().domain.tools:
        schema = json.loads(json.dumps(entry.input_schema))
        shuffled = json.loads(json.dumps(schema, sort_keys=True))
        assert json.dumps(canonical_schema(schema)) == json.dumps(canonical_schema(shuffled))
        assert canonical_schema(schema) == schema


def test_the_text_of_a_rejection_is_the_tools_own(session_with):
    @tool(mutates=False)
    def refuse(context: ToolContext) -> str:
        """Say no."""
        raise ToolRejection("nö 🙂 \x00")

    answer = session_with(refuse).call("refuse", {})
    assert (answer.text, answer.status) == ("nö 🙂 \x00", "rejected")
