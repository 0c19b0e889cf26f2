"""The servers of the public data, as far as they are there: TBX_DATASETS names a checkout, TBX_SERVERS_PYTHON an
interpreter that has their packages. Expected calls are replayed through the tools; the golden hash is the servers' own.
"""

from __future__ import annotations

import datetime
import json
import os

import pytest

from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import load_servers

RELEASE = "thinkingbox_bench_v1"
PYTHON = os.environ.get("TBX_SERVERS_PYTHON", "")
RETAIL = "sandbox_external_retail"
FROZEN = datetime.datetime(2025, 10, 1, tzinfo=datetime.UTC)
TASKS_EACH = 2

pytestmark = pytest.mark.real_data


@pytest.fixture(scope="module")
def dataset():
    if not PYTHON:
        pytest.skip("TBX_SERVERS_PYTHON is not set: there is no interpreter for the public servers")
    from tbx_envs.thinkingbox.dataset import registered_datasets

    for dataset in registered_datasets():
        if RELEASE in dataset.lists and dataset.servers_file is not None:
            return dataset
    pytest.skip(f"TBX_DATASETS names no checkout with {RELEASE} and servers: it is {os.environ.get('TBX_DATASETS')!r}")


@pytest.fixture(scope="module")
def tasks_of(dataset):
    """server -> its tasks of the benchmark."""
    tasks = {}
    for uid in dataset.list_uids(RELEASE):
        task = dataset.task(uid)
        tasks.setdefault(task.servers[0], []).append(task)
    return tasks


@pytest.fixture(scope="module", params=["fork", "spawn"])
def pool(request, dataset):
    with ServerPool(load_servers(dataset.servers_file, python=PYTHON), start=request.param) as pool:
        yield pool


def test_the_expected_calls_lead_to_the_expected_database(pool, tasks_of, record_property):
    hashes = {}
    for server, tasks in tasks_of.items():
        for task in tasks[:TASKS_EACH]:
            session = pool.open(task.init, servers=task.servers)
            offered = {tool.name for tool in session.tools}
            assert {choice.name for choice in task.tools} == offered
            for call in task.expected_calls:
                assert session.call(call.tool, call.arguments).status == "ok"
            effects = session.effects()[server]
            session.close()
            hashes[task.uid] = effects["result_db_hash"]
            assert effects["result_db_hash"] == effects["golden_db_hash"], (task.uid, effects["diff"])
    assert len(hashes) == TASKS_EACH * 5


def test_a_session_without_calls_does_not_have_the_expected_database(pool, tasks_of):
    for server, tasks in tasks_of.items():
        session = pool.open(tasks[0].init, servers=tasks[0].servers)
        effects = session.effects()[server]
        session.close()
        assert effects["result_db_hash"] != effects["golden_db_hash"]


def test_the_two_tools_that_read_the_clock_answer_as_on_the_day_it_shows(pool, tasks_of):
    """Warranties are the tasks' own, those whose state has changed since; whether one covers is worked out here.
    Promotions are ours, since no task has any."""
    patches = (task.init[RETAIL].get("data_patch") or {} for task in tasks_of[RETAIL])
    stale = [patch for patch in patches if any(is_stale(contract) for contract in contracts_of(patch))]
    for patch in stale[:TASKS_EACH]:
        session = pool.open(
            {RETAIL: {"data_patch": {**patch, PROMOTIONS: PROMOTION_ROWS}}}, servers=[RETAIL], clock=FROZEN
        )
        for contract in contracts_of(patch):
            asked = {"order_id": contract["order_id"], "sku": contract["sku"]}
            answer = json.loads(session.call("check_warranty_coverage", asked).text)
            assert answer["has_coverage"] == any(
                covers(other, FROZEN) for other in contracts_of(patch) if all(other[key] == asked[key] for key in asked)
            )
        told = {
            code: session.call("get_promotion_details", {"promo_code": code}).text
            for code in ("PAST", "THATDAY", "TODAY")
        }
        assert {code for code, text in told.items() if "not found or expired" not in text} == {"THATDAY"}, told
        session.close()


def promotion(code, first, last):
    rate = {"discount_type": "percentage", "discount_value": 20.0}
    return {"id": code, "promo_code": code, **rate, "valid_from": first, "valid_until": last}


PROMOTIONS = "external_retail_toolset_promo_models_active_promotions"
PROMOTION_ROWS = [
    promotion("PAST", "2025-08-01T00:00:00Z", "2025-09-30T23:59:59Z"),
    promotion("THATDAY", "2025-10-01T00:00:00Z", "2025-10-01T00:00:00Z"),
    promotion("TODAY", "2025-10-01T00:00:01Z", "2999-01-01T00:00:00Z"),
]


def contracts_of(patch):
    return patch.get("external_retail_toolset_extend_models_warranty_contracts", ())


def covers(contract, moment):
    return at(contract["start_date"]) <= moment <= at(contract["end_date"])


def is_stale(contract):
    return covers(contract, FROZEN) != covers(contract, datetime.datetime.now(datetime.UTC))


def at(text):
    moment = datetime.datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
