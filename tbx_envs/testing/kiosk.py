"""A small fake domain, a kiosk that takes orders, for tests of environments and agents.

    domain = build_kiosk()
    register_domain(domain)
    env = ToolEnv("kiosk/order/000")

`tools` adds tools to its four, for example one that raises.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from sqlalchemy import (
    CheckConstraint,
    Column,
    Date,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    insert,
    select,
    update,
)

from tbx_envs.domains import AgentTurns, Domain, Family, Topic
from tbx_envs.messages import DONE_MARK, ToolCall, Turn
from tbx_envs.task import ExpectedCall, Split, Task, UserContext
from tbx_envs.tools.clock import WorldClock
from tbx_envs.tools.tool import Tool, ToolContext, ToolRejection, tool

CLOCK = WorldClock(datetime.datetime(2031, 5, 6, 9, 0))
RULES = "You take orders at a kiosk. Ask for the pickup code before you order. End with <DONE>."

METADATA = MetaData()
ITEMS = Table(
    "items",
    METADATA,
    Column("item", Text, primary_key=True),
    Column("stock", Integer, CheckConstraint("stock >= 0"), nullable=False),
    Column("fresh_until", Date),
)
ORDERS = Table(
    "orders",
    METADATA,
    Column("order_id", Text, primary_key=True),
    Column("item", Text, ForeignKey("items.item"), nullable=False),
    Column("quantity", Integer, nullable=False),
    Column("code", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempts", Integer, nullable=False, info={"unstable": True}),
)
NOTES = Table(  # without a stable key, so that equal rows are possible
    "notes",
    METADATA,
    Column("note_id", Integer, primary_key=True, info={"unstable": True}),
    Column("text", Text, nullable=False),
)


@tool(mutates=False)
def list_items(context: ToolContext) -> list[dict[str, Any]]:
    """List what the kiosk sells and how many are left."""
    rows = context.db.execute(select(ITEMS.c.item, ITEMS.c.stock).order_by(ITEMS.c.item))
    return [dict(row._mapping) for row in rows]


@tool(mutates=True)
def place_order(
    context: ToolContext,
    *,
    item: Annotated[str, "Name of the item."],
    quantity: Annotated[int, "How many."],
    code: Annotated[str, "Pickup code of the customer, four digits."],
    cup: Annotated[Literal["paper", "own"] | None, "Which cup, for drinks."] = None,
) -> dict[str, Any]:
    """Order an item for pickup."""
    stock = context.db.scalar(select(ITEMS.c.stock).where(ITEMS.c.item == item))
    if stock is None:
        raise ToolRejection(f"The kiosk does not sell '{item}'.")
    number = len(context.db.execute(select(ORDERS.c.order_id)).all()) + 1
    order = {"order_id": f"O{number}", "item": item, "quantity": quantity, "code": code, "status": "open"}
    context.db.execute(insert(ORDERS), {**order, "attempts": number})
    context.db.execute(insert(NOTES), {"text": f"order for {code}"})
    if quantity < 1 or quantity > stock:  # after two writes on purpose: a rejection must undo them
        raise ToolRejection(f"{quantity} of '{item}' cannot be ordered; {stock} are left.")
    context.db.execute(update(ITEMS).where(ITEMS.c.item == item).values(stock=stock - quantity))
    return {"order_id": order["order_id"], "left": stock - quantity}


@tool(mutates=True)
def cancel_order(context: ToolContext, *, order_id: Annotated[str, "Id of the order, for example O1."]) -> str:
    """Cancel an open order."""
    changed = context.db.execute(update(ORDERS).where(ORDERS.c.order_id == order_id).values(status="cancelled"))
    if changed.rowcount == 0:
        raise ToolRejection(f"There is no order '{order_id}'.")
    return "cancelled"


@tool(mutates=True)
def note(context: ToolContext, *, text: Annotated[str, "What to note down."]) -> str:
    """Note something down for the staff."""
    context.db.execute(insert(NOTES), {"text": text})
    return "noted"


TOOLS = (list_items, place_order, cancel_order, note)


def build_kiosk(name: str = "kiosk", *, tools: tuple[Tool, ...] = (), **task_changes: Any) -> Domain:
    """The domain.

    Args:
        name: name of the domain.
        tools: tools to add.
        task_changes: field -> value that replaces it in every task.
    """

    def build(number: int, split: Split) -> Task:
        return _task(name, number, split, task_changes)

    family = Family("order", "A customer orders something.", 6, 4, build, _near_misses, _scripted)
    return Domain(
        name=name,
        version=1,
        metadata=METADATA,
        tools=(*TOOLS, *tools),
        rules=RULES,
        clock=CLOCK,
        topics={
            "code": Topic(r"\bcode\b", ("My code is {value}.", "{value}.", "It is {value}.")),
            "cup": Topic(r"\bcup\b", ("{value}, please.",)),
            "name": Topic(r"\bname\b", ("{value}.",)),
        },
        consents={"paper": r"paper.*\?", "receipt": r"receipt.*\?", "default": r"shall I|is that right"},
        families={"order": family},
        lock={},
    )


def _task(domain: str, number: int, split: Split, changes: Mapping[str, Any]) -> Task:
    item, quantity, code = ("tea", "bun", "juice")[number % 3], 1 + number % 2, f"{1000 + 37 * number}"
    fields: dict[str, Any] = {
        "uid": f"{domain}/order/{number:03d}",
        "domain": domain,
        "family": "order",
        "version": 1,
        "split": split,
        "query": f"Hello, {quantity} {item} please.",
        "user": UserContext(
            request=f"I would like {quantity} {item}.",
            facts={"code": code, "cup": "own"},
            consents={"paper": False, "receipt": True, "default": True},
        ),
        "world": {
            "items": tuple(
                {"item": name, "stock": stock, "fresh_until": "2031-05-07"}
                for name, stock in (("tea", 9), ("bun", 5), ("juice", 3))
            ),
            "orders": (
                {
                    "order_id": "O1",
                    "item": "tea",
                    "quantity": 1,
                    "code": "0001",
                    "status": "open",
                    "attempts": 1,
                },
            ),
        },
        "expected_calls": (
            ExpectedCall("list_items", {}),
            ExpectedCall("place_order", {"item": item, "quantity": quantity, "code": code}),
        ),
        "labels": {"pressure": 1.0},
    }
    return Task(**{**fields, **changes})


def _near_misses(task: Task) -> dict[str, tuple[ExpectedCall, ...]]:
    *reads, order = task.expected_calls
    wrong = ExpectedCall(order.tool, {**order.arguments, "code": "9999"})
    return {"wrong code": (*reads, wrong), "no order": tuple(reads), "ordered twice": (*reads, order, order)}


def _scripted(task: Task, random_: random.Random, error_rate: float) -> AgentTurns:
    """Asks for the code, unless it errs and makes one up."""
    order = task.expected_calls[-1]
    code = "0000"
    if random_.random() >= error_rate * task.labels["pressure"]:
        answer = yield Turn("What is your pickup code?")
        code = next(word.strip(".") for word in answer[0].text.split() if word.strip(".").isdigit())
    yield Turn(calls=(ToolCall("", order.tool, {**order.arguments, "code": code}),))
    yield Turn(f"It is ordered. {DONE_MARK}")
