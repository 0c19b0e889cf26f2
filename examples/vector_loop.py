"""A training loop of your own over the vector environment: groups of attempts, advantages, faults dropped.

    python examples/vector_loop.py

The policy has one parameter: how likely it is to check who is calling before it cancels a visit. Each update attempts
four tasks eight times, takes a reward minus the mean of its group as the advantage (as GRPO does), and follows the
gradient of the policy's log-probability. One sees the pass rate go from about a fifth to almost one, since an episode
is rewarded only where the check was made.
"""

from __future__ import annotations

import json
import re

import gymnasium
import numpy as np

import tbx_envs

GROUP_SIZE = 8
UPDATES = 12
LEARNING_RATE = 4.0


def attempt(opening, checks_identity):
    """One attempt: yields actions, is sent the observation that answers each one."""
    name = re.search(r"(?:Hi, |this is )(\w+ \w+)", opening)[1]
    clinician = re.search(r"Dr\. \w+", opening)[0]
    patient_id = json.loads((yield call("find_patient", name=name)))[0]["patient_id"]
    if checks_identity:
        answer = yield "What is your birth date?"
        birth_date = re.search(r"\d{4}-\d\d-\d\d", answer)[0]
        yield call("verify_birth_date", patient_id=patient_id, birth_date=birth_date)
    visit = json.loads((yield call("list_visits", patient_id=patient_id, clinician=clinician)))[0]
    yield call("cancel_visit", visit_id=visit["visit_id"])
    yield "Your visit is cancelled. <DONE>"


def call(tool, **arguments):
    """A call as a language model writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def roll_out(envs, seed, decisions):
    """The reward of each slot's episode; NaN where a fault of the environment made it void.

    Args:
        decisions: for each slot, whether its attempt checks the identity.
    """
    observations, infos = envs.reset(seed=seed)
    agents = [attempt(observation, bool(checks)) for observation, checks in zip(observations, decisions, strict=True)]
    rewards = np.zeros(envs.num_envs)
    running = np.ones(envs.num_envs, bool)
    if "fault" in infos:  # an episode that could not even start
        rewards[infos["_fault"]], running[infos["_fault"]] = np.nan, False
    answers = [None] * envs.num_envs  # what starts a generator
    while running.any():
        actions = [agents[slot].send(answers[slot]) if running[slot] else None for slot in range(envs.num_envs)]
        answers, stepped, terminated, truncated, _ = envs.step(actions)
        rewards += stepped  # 0.0 before the end, and for a slot that has ended
        running &= ~(terminated | truncated)
    return rewards


def advantages(rewards_pg):
    """Reward minus the mean of its group; 0 for void attempts, which are in no mean either."""
    clean = ~np.isnan(rewards_pg)
    sums = np.where(clean, rewards_pg, 0.0).sum(axis=1, keepdims=True)
    means = sums / np.maximum(clean.sum(axis=1, keepdims=True), 1)
    return np.where(clean, rewards_pg - means, 0.0)


def main():
    calm = (tbx_envs.find_task(uid) for uid in tbx_envs.select_tasks("clinic/cancel_visit/*"))
    uids = [task.uid for task in calm if task.split == "train" and task.labels["case"] == "in time"][:4]
    envs = gymnasium.make_vec(
        tbx_envs.registration.env_id(uids[0]), num_envs=1, uids=[uid for uid in uids for _ in range(GROUP_SIZE)]
    )
    random = np.random.default_rng(0)
    logit, pass_rates = -1.5, []
    for update in range(UPDATES):
        probability = 1.0 / (1.0 + np.exp(-logit))
        decisions = random.random(envs.num_envs) < probability
        rewards = roll_out(envs, update * envs.num_envs, decisions)
        advantages_pg = advantages(rewards.reshape(len(uids), GROUP_SIZE))
        gradient = (decisions.reshape(advantages_pg.shape) - probability) * advantages_pg  # of log-probabilities
        logit += LEARNING_RATE * gradient.mean()
        pass_rates.append(float(np.nanmean(rewards)))
        print(f"update {update + 1:2}: P(check) {probability:.2f}, passed {pass_rates[-1]:.2f}")
    envs.close()
    return pass_rates


if __name__ == "__main__":
    main()
