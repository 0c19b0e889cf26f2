"""A model behind an OpenAI-compatible server, measured: pass rate, tokens, and what they cost.

    python examples/served_model.py
    python examples/served_model.py --base-url http://127.0.0.1:8000/v1 --model my-model

Without a server of yours, one that ships for tests answers on this machine: a few rules in place of a model. It speaks
the same protocol, tool calls included. One sees a pass rate of 60%, since these rules never ask for the fee of a late
visit, and the cost of each success at the prices below, by the tokens that the server counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
from pathlib import Path

import tbx_envs
from tbx_envs import EndpointAgent, Prices
from tbx_envs.endpoints.costs import run_costs
from tbx_envs.testing.loopback_endpoint import LoopbackEndpoint, Says

PRICES = Prices(input=0.50, cached=0.05, output=2.00)  # per million tokens


def rules_in_place_of_a_model(asked):
    """The next message of a conversation, which a server is sent as a whole each time."""
    said = [message["content"] for message in asked.body["messages"] if message["role"] == "user"]
    results = [json.loads(message["content"]) for message in asked.body["messages"] if message["role"] == "tool"]
    match len(results), len(said):
        case 0, _:
            name = re.search(r"(?:Hi, |this is )(\w+ \w+)", said[0])[1]
            return Says(calls=(("find_patient", json.dumps({"name": name})),))
        case 1, 1:
            return Says("What is your birth date?")
        case 1, _:
            facts = {
                "birth_date": re.search(r"\d{4}-\d\d-\d\d", said[-1])[0],
                "patient_id": results[0][0]["patient_id"],
            }
            return Says(calls=(("verify_birth_date", json.dumps(facts)),))
        case 2, _:
            asked_for = {"patient_id": results[0][0]["patient_id"], "clinician": re.search(r"Dr\. \w+", said[0])[0]}
            return Says(calls=(("list_visits", json.dumps(asked_for)),))
        case 3, _:
            return Says(calls=(("cancel_visit", json.dumps({"visit_id": results[2][0]["visit_id"]})),))
        case _:
            return Says("Your visit is cancelled. <DONE>")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Evaluate a served model on tasks of the clinic.")
    parser.add_argument("--base-url", help="of a server, such as http://127.0.0.1:8000/v1; none is one that ships")
    parser.add_argument("--model", default="rules", help="name of the model on that server")
    parser.add_argument("--api-key-env", help="environment variable that holds the server's key")
    parser.add_argument("--tasks", default="clinic/cancel_visit/00?", help="as `tbx evaluate` takes them")
    given = parser.parse_args(arguments)

    with contextlib.ExitStack() as closing:
        base_url = given.base_url or closing.enter_context(LoopbackEndpoint(rules_in_place_of_a_model)).base_url
        config = tbx_envs.EndpointConfig(base_url, given.model, api_key_env=given.api_key_env, prices=PRICES)
        endpoint = closing.enter_context(tbx_envs.ChatEndpoint(config))
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        tasks = tbx_envs.select_tasks(given.tasks)
        rows = tbx_envs.run(
            EndpointAgent(endpoint),
            tasks,
            attempts=1,
            seed=0,
            rows_path=Path(folder) / "rows.jsonl",
            max_void_retries=1,
        )
    for row in rows:
        print(f"{row['uid']}: {'passed' if row['passed'] else 'failed'} in {row['agent_turns']} turns")
    measured = tbx_envs.summarize(rows, attempts=1)
    costs = run_costs(rows, {"policy": PRICES}, reliable_tasks=measured["observed_1_of_1"])
    print(f"pass@1 {measured['pass_at_1']:.0%} of {measured['tasks']} tasks, {measured['voids']} void")
    print(f"cost {money(costs['total'])}, for each success {money(costs['per_success'])}")


def money(amount):
    return "unknown" if amount is None else f"{amount:.6f}"


if __name__ == "__main__":
    main()
