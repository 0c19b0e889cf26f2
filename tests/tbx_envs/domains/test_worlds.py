import dataclasses
import sqlite3

import pytest
import sqlalchemy
from sqlalchemy import insert, select, update

from tbx_envs.domains import load_domain, worlds
from tbx_envs.domains.worlds import (
    build_template,
    differences,
    digest,
    lend_world,
    return_world,
    rows_of,
    template_for,
)
from tbx_envs.errors import DomainError
from tbx_envs.task import ExpectedCall
from tbx_envs.testing.kiosk import ITEMS, METADATA, NOTES, ORDERS
from tbx_envs.tools.tool import tool


@pytest.fixture
def task(kiosk):
    return kiosk.task("kiosk/order/000")


@pytest.fixture
def world(task, kiosk):
    world = lend_world(template_for(task, kiosk))
    yield world
    return_world(world)


def test_a_world_holds_the_rows_of_the_task(task, world):
    with_sqlalchemy = [tuple(row) for row in world.db.execute(select(ITEMS).order_by(ITEMS.c.item))]
    wanted = sorted((row["item"], row["stock"], row["fresh_until"]) for row in task.world["items"])
    assert [(item, stock, str(until)) for item, stock, until in with_sqlalchemy] == wanted


def test_the_expected_rows_are_those_after_the_expected_calls(task, kiosk):
    template = template_for(task, kiosk)
    assert template.initial["orders"] == [("O1", "tea", 1, "0001", "open")]
    assert template.expected["orders"] == [("O1", "tea", 1, "0001", "open"), ("O2", "tea", 1, "1000", "open")]
    assert {item: stock for item, stock, _ in template.expected["items"]} == {"bun": 5, "juice": 3, "tea": 8}


def test_worlds_are_apart_and_a_restored_one_remembers_nothing(task, kiosk):
    template = template_for(task, kiosk)
    one, other = lend_world(template), lend_world(template)
    one.db.execute(update(ITEMS).values(stock=0))
    one.db.commit()
    assert rows_of(other.raw, METADATA) == template.initial
    one.db.execute(insert(NOTES), {"text": "never committed"})
    return_world(one)
    return_world(other)
    again = [lend_world(template) for _ in range(3)]
    assert all(rows_of(world.raw, METADATA) == template.initial for world in again)
    for world in again:
        return_world(world)


def test_a_world_with_a_result_left_open_is_not_used_again(task, kiosk):
    template = template_for(task, kiosk)
    busy = lend_world(template)
    result = busy.db.execute(select(ITEMS))
    result.fetchone()
    return_world(busy)
    fresh = lend_world(template)
    assert fresh is not busy
    assert rows_of(fresh.raw, METADATA) == template.initial
    return_world(fresh)


def test_a_world_rejects_a_reference_to_nothing(world):
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        world.db.execute(
            insert(ORDERS),
            {"order_id": "O9", "item": "gold", "quantity": 1, "code": "1", "status": "open", "attempts": 1},
        )
    world.db.rollback()


def test_differences_name_the_row_the_column_and_both_values(world, task, kiosk):
    expected = template_for(task, kiosk).expected
    world.db.execute(update(ITEMS).where(ITEMS.c.item == "tea").values(stock=7))
    world.db.execute(update(ORDERS).values(status="cancelled", attempts=99))
    world.db.execute(insert(NOTES), [{"text": "b"}, {"text": "a"}, {"text": "b"}])
    world.db.commit()
    assert differences(rows_of(world.raw, METADATA), expected, METADATA) == (
        "items: tea stock is 7, expected 8",
        "notes: a row is missing (text='order for 1000')",
        "notes: a row is unexpected (text='a')",
        "notes: a row is unexpected (text='b')",
        "notes: a row is unexpected (text='b')",
        "orders: O1 status is 'cancelled', expected 'open'",
        "orders: O2 is missing (item='tea', quantity=1, code='1000', status='open')",
    )


def test_change_and_revert_is_no_difference_and_unstable_columns_do_not_count(world, task, kiosk):
    initial = template_for(task, kiosk).initial
    world.db.execute(update(ITEMS).values(stock=ITEMS.c.stock + 1))
    world.db.execute(update(ITEMS).values(stock=ITEMS.c.stock - 1))
    world.db.execute(update(ORDERS).values(attempts=12))
    world.db.commit()
    rows = rows_of(world.raw, METADATA)
    assert differences(rows, initial, METADATA) == ()
    assert digest(rows) == digest(initial)


def test_rows_without_a_stable_key_are_compared_in_any_order(world, task, kiosk):
    template = template_for(task, kiosk)
    forwards, backwards = lend_world(template), lend_world(template)
    for target, texts in ((forwards, "abc"), (backwards, "cba")):
        for text in texts:
            target.db.execute(insert(NOTES), {"text": text})
        target.db.commit()
    assert digest(rows_of(forwards.raw, METADATA)) == digest(rows_of(backwards.raw, METADATA))
    assert digest(rows_of(forwards.raw, METADATA)) != digest(template.initial)
    return_world(forwards)
    return_world(backwards)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [ExpectedCall("place_order", {"item": "gold", "quantity": 1, "code": "1"})],
            "expected call 1 of 1.*rejected.*gold",
        ),
        (
            [ExpectedCall("list_items", {}), ExpectedCall("plac_order", {})],
            "expected call 2 of 2.*invalid.*plac_order",
        ),
        ([ExpectedCall("cancel_order", {})], "expected call 1 of 1, cancel_order.*invalid.*order_id is required"),
    ],
)
def test_an_expected_call_that_is_not_answered_ok_is_an_error_of_the_task(task, kiosk, calls, words):
    broken = dataclasses.replace(task, expected_calls=tuple(calls))
    with pytest.raises(DomainError, match=rf"(?s)task kiosk/order/000: {words}"):
        build_template(broken, kiosk)


def test_an_expected_call_whose_tool_raises_is_an_error_of_the_task(kiosk_with):
    @tool(mutates=True)
    def explode(context):
        """Explode."""
        raise ZeroDivisionError("boom")

    domain = kiosk_with(explode, expected_calls=(ExpectedCall("explode", {}),))
    with pytest.raises(DomainError, match=r"expected call 1 of 1, explode.*failed.*ZeroDivisionError: boom"):
        template_for(domain.task(f"{domain.name}/order/000"), domain)


@pytest.mark.parametrize(
    ("world_rows", "words"),
    [
        ({"itms": ({"item": "tea"},)}, "table 'itms'.*Did you mean 'items'"),
        ({"items": ({"item": "tea", "stok": 1},)}, "column 'stok'.*Did you mean 'stock'"),
        ({"items": ({"item": "tea"},)}, "rows of 'items' do not fit"),
        (
            {"orders": ({"order_id": "O1", "item": "x", "quantity": 1, "code": "", "status": "", "attempts": 0},)},
            "row 1 of 'orders' refers to a row of 'items'",
        ),
    ],
)
def test_a_world_that_does_not_fit_the_tables_is_an_error_of_the_task(task, kiosk, world_rows, words):
    with pytest.raises(DomainError, match=words):
        build_template(dataclasses.replace(task, world=world_rows), kiosk)


def test_a_changed_task_of_the_same_uid_gets_a_template_of_its_own(task, kiosk):
    first = template_for(task, kiosk)
    assert template_for(task, kiosk) is first
    changed = dataclasses.replace(task, expected_calls=())
    assert template_for(changed, kiosk).expected == first.initial
    assert template_for(task, kiosk).expected == first.expected


def test_templates_beyond_the_limit_are_closed(task, kiosk, monkeypatch):
    monkeypatch.setattr(worlds, "_MAX_TEMPLATES", 2)
    database = template_for(task, kiosk).database
    for number in range(1, 4):
        template_for(kiosk.task(f"kiosk/order/00{number}"), kiosk)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.execute("SELECT 1")


def test_a_task_whose_expected_call_fails_leaves_no_open_database(monkeypatch):
    opened = []
    connect = sqlite3.connect

    def recorded(*arguments, **options):
        opened.append(connect(*arguments, **options))
        return opened[-1]

    wrong = (ExpectedCall("cancel_visit", {"visit_id": "V1"}),)
    task = dataclasses.replace(load_domain("clinic").task("clinic/cancel_visit/000"), expected_calls=wrong)
    monkeypatch.setattr(sqlite3, "connect", recorded)
    with pytest.raises(DomainError, match="no booked visit V1"):
        build_template(task, load_domain("clinic"))
    assert opened
    still_open = []
    for database in opened:
        try:
            database.execute("SELECT count(*) FROM visits")
            still_open.append(database)
        except sqlite3.ProgrammingError:  # closed
            pass
    # Databases that stay are the empty one that the process keeps and idle worlds; none holds the task's rows.
    assert not any(database.execute("SELECT count(*) FROM visits").fetchone()[0] for database in still_open)
