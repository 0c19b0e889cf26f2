"""An evaluation run: one policy attempts every task several times; one row of JSON for each attempt.

The folder of an evaluation run holds

    evaluation.json   the fingerprint: policy, seed, attempts, hashes of the tasks, version
    rows.jsonl        one row per attempt, appended as episodes end
    episodes.jsonl    the same episodes in full, for `tbx show`
    voids.jsonl       one row per void try that was repeated, appended as it ends
    spending.jsonl    tokens of each completion of a served model, appended as it arrives (`tbx evaluate` only)
    summary.json      the measures, written at the end

An interrupted evaluation run resumes where it stopped if its fingerprint is the same: clean rows are kept, a line cut
off by the interruption is dropped. An attempt that a fault (an infrastructure error) has voided is repeated with a
fresh seed; after `max_void_retries` it stays a void row, which is in no measure and in every report. Resuming repeats
void rows, since a fault (a server that was down) says nothing about the policy. A task that cannot be run at all (its
scenario names a tool that no server has) is set aside: its attempts are void with a fault of kind `task` and are not
repeated, the other tasks go on, and summary and report say why.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.agents import Agent, Attempt
from tbx_envs.doors import shown
from tbx_envs.episode import Episode
from tbx_envs.errors import CheckFault, ConfigError, DomainError, PolicyFault, TaskFault
from tbx_envs.evaluation.files import Row, RunLog
from tbx_envs.evaluation.metrics import Tally, measures
from tbx_envs.seeding import derive
from tbx_envs.sources import find_task, is_heldout_family, task_hash
from tbx_envs.version import __version__

# An evaluation run with a greater share of void attempts ends with an error: its measures rest on too few attempts.
MAX_VOID_SHARE = 0.05


def run(
    agent: Agent,
    uids: Sequence[str],
    *,
    attempts: int,
    seed: int,
    rows_path: Path | str,
    max_void_retries: int,
    policy: Mapping[str, Any] | None = None,
    progress: Callable[[Row], None] | None = None,
    kept: Callable[[Sequence[Row]], None] | None = None,
) -> list[Row]:
    """Attempt every task `attempts` times and write a row for each attempt.

    Args:
        agent: agent that makes the attempts.
        uids: task ids, each once.
        attempts: number of attempts at each task.
        seed: seed of the evaluation run; an attempt's seed is derived from it, the task, the attempt's number and how
            often the attempt was void.
        rows_path: file of rows; the other files are written beside it.
        max_void_retries: number of times that a void attempt is repeated.
        policy: what is evaluated, for the fingerprint and the rows: `name`, and everything else that distinguishes two
            policies (settings, the hash of a checkpoint).
        progress: function called with each new row.
        kept: function called once, before the first attempt, with the rows of an interrupted run that stay.

    Returns:
        The rows of all attempts, including those kept, by task in the order of `uids` and by attempt.

    Raises:
        ConfigError: the folder holds an evaluation run with another fingerprint, a task is given twice, `uids` or
            `attempts` is no such thing, or the agent has no method `run`.
        PolicyFault: the agent as a whole failed, or yielded other episodes than asked for, or none. Finished attempts
            stay in the file.
    """
    if isinstance(uids, str):
        raise ConfigError(f"uids={uids!r} is a text; give a list of task ids, such as select_tasks({uids!r}).")
    if attempts < 1:
        raise ConfigError(f"attempts={attempts}: give the number of attempts at each task, 1 or more.")
    if len(set(uids)) < len(uids):
        raise ConfigError(f"{len(uids) - len(set(uids))} task(s) are given twice; give each once.")
    make_attempts = _attempts_of(agent)
    policy = {"name": type(agent).__name__, **(policy or {})}
    fingerprint = run_fingerprint(policy, uids, attempts, seed)
    log = RunLog(Path(rows_path), fingerprint)
    wanted = [(uid, attempt) for uid in uids for attempt in range(attempts)]
    rows = log.rows
    pending = [key for key in wanted if key not in rows or rows[key]["passed"] is None]
    if kept is not None:
        kept([rows[key] for key in wanted if key in rows and rows[key]["passed"] is not None])
    tried = {key: log.last_try(*key) for key in pending}
    retries = {key: 0 if last is None else last["retry"] + 1 for key, last in tried.items()}
    voids = {key: NO_VOIDS if last is None else _voids(last) for key, last in tried.items()}
    for round_number in range(max_void_retries + 1):
        final = round_number == max_void_retries
        made = [Attempt(uid, n, attempt_seed(seed, uid, n, retries[uid, n])) for uid, n in pending]
        pending = []
        for episode in _checked(make_attempts(made), made, agent):
            key = (episode.uid, episode.attempt)
            row = row_of(episode, policy["name"], retries[key], fingerprint["tasks"][episode.uid], voids[key])
            if row["passed"] is None and row["fault"] != TaskFault.kind and not final:
                log.append_void_try(row)
                retries[key] += 1
                voids[key] = _voids(row)
                pending.append(key)
                continue
            log.append(row, episode)
            if progress is not None:
                progress(row)
        if not pending:
            break
    log.rewrite_in_order(wanted)
    return [rows[key] for key in wanted]


def run_fingerprint(policy: Mapping[str, Any], uids: Sequence[str], attempts: int, seed: int) -> dict[str, Any]:
    """What identifies an evaluation run, as JSON values: one with the same fingerprint may be resumed."""
    tasks = {uid: task_hash(uid) for uid in uids}
    fingerprint = {"policy": policy, "attempts": attempts, "seed": seed, "tasks": tasks, "tbx": __version__}
    return json.loads(json.dumps(fingerprint))  # equal to what is read back from the file


def attempt_seed(seed: int, uid: str, attempt: int, retry: int) -> int:
    """The seed of one attempt; another one for each retry after a fault."""
    return derive(seed, "attempt", uid, attempt, retry)


@dataclasses.dataclass(frozen=True, slots=True)
class VoidTries:
    """What is kept of the void tries at an attempt that were repeated.

    Attributes:
        usage: tokens of these tries, which were paid for without a result.
        faults: kind and message of each.
    """

    usage: Mapping[str, int]
    faults: tuple[str, ...]


NO_VOIDS = VoidTries({}, ())


def _voids(row: Row) -> VoidTries:
    """The record of a void try and of those before it."""
    tokens = {name: count for name, count in row["usage"].items() if name.endswith("_tokens")}
    before = row.get("void_usage", {})
    usage = {name: tokens.get(name, 0) + before.get(name, 0) for name in {**tokens, **before}}
    return VoidTries(usage, (*row.get("void_faults", ()), f"{row['fault']}: {row['fault_message']}"))


def row_of(episode: Episode, policy_name: str, retry: int, content_hash: str, voids: VoidTries = NO_VOIDS) -> Row:
    """The row of an episode.

    Args:
        episode: record of the attempt.
        policy_name: name of the policy.
        retry: number of times this attempt was void before.
        content_hash: hash of the task (`tbx_envs.sources.task_hash`).
        voids: record of those tries.

    Raises:
        CheckFault: a clean episode's reward is not its report's, or a void one has a reward: it was not made by the
            environment.
    """
    reward = episode.reward
    if episode.fault is not None:
        sound = reward is None
    else:
        sound = episode.report is not None and reward == episode.report.reward and 0.0 <= reward <= 1.0
    if not sound:
        raise CheckFault(
            f"task {episode.uid}: an episode with fault {episode.fault} has reward {episode.reward}; expected its "
            f"report's, in [0, 1], for a clean one, None for a void one. Take rewards from the environment."
        )
    usage = {name: int(number) for name, number in episode.usage.items()}
    task = find_task(episode.uid)
    return {
        "uid": episode.uid,
        "family": task.family,
        "heldout_family": is_heldout_family(task),
        "attempt": episode.attempt,
        "passed": episode.passed,
        "reward": episode.reward,
        "fault": None if episode.fault is None else episode.fault.kind,
        "fault_message": None if episode.fault is None else episode.fault.message,
        "finish_reason": None if episode.reward is None else str(episode.finish_reason),
        "seed": episode.seed,
        "retry": retry,
        "agent_turns": usage.pop("agent_turns", 0),
        "tool_calls": usage.pop("tool_calls", 0),
        "usage": usage,
        "void_usage": dict(voids.usage),
        "void_faults": list(voids.faults),
        "seconds": {part: float(number) for part, number in episode.seconds.items()},
        "content_hash": content_hash,
        "tbx": __version__,
        "policy": policy_name,
    }


def _attempts_of(agent: Agent) -> Callable[[Sequence[Attempt]], Iterable[Episode]]:
    """The agent's `run`; for an agent of tbx 0.1 its `play`, with a DeprecationWarning.

    Raises:
        ConfigError: the object has neither.
    """
    if isinstance(agent, Agent):
        return agent.run
    name, old_method = type(agent).__name__, getattr(agent, "play", None)
    if old_method is None:
        raise ConfigError(f"{name} is not an agent: it has no method run(attempts), which yields one episode for each.")
    warnings.warn(
        f"{name}.play(attempts) is now called run(attempts); the old name works until tbx 0.3.",
        DeprecationWarning,
        stacklevel=3,  # the caller of `run`
    )
    return old_method


def _checked(episodes: Iterable[Episode], attempts: Sequence[Attempt], agent: Agent) -> Iterator[Episode]:
    """The agent's episodes, each checked to belong to an attempt that is still missing."""
    if not isinstance(episodes, Iterable):
        raise PolicyFault(
            f"{type(agent).__name__}.run(attempts) returned {shown(episodes)}. Yield one episode for each attempt, or "
            f"return what play_turns(attempts, ...) gives."
        )
    missing = {(attempt.uid, attempt.index): attempt.seed for attempt in attempts}
    for episode in episodes:
        if missing.pop((episode.uid, episode.attempt), None) != episode.seed:
            raise PolicyFault(
                f"{type(agent).__name__} yielded attempt {episode.attempt} at {episode.uid} with seed "
                f"{episode.seed}, which was not asked for or was yielded before. Yield one episode for each attempt."
            )
        yield episode
    if missing:
        uid, attempt = next(iter(missing))
        raise PolicyFault(
            f"{type(agent).__name__} yielded no episode for {len(missing)} of {len(attempts)} attempts, "
            f"such as attempt {attempt} at {uid}. Yield one for each, including void ones."
        )


def tallies_of(rows: Iterable[Row]) -> list[Tally]:
    """One tally for each task, in the order of their first rows."""
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row["uid"], []).append(row)
    return [
        Tally(
            uid=uid,
            family=of_task[0]["family"],
            passes=sum(row["passed"] is True for row in of_task),
            attempts=sum(row["passed"] is not None for row in of_task),
            voids=sum(row["passed"] is None for row in of_task),
        )
        for uid, of_task in by_task.items()
    ]


def summarize(rows: Sequence[Row], attempts: int, seed: int = 0) -> dict[str, Any]:
    """The measures of an evaluation run: of all tasks, of held-out families together, and of each family.

    Args:
        rows: rows of the evaluation run.
        attempts: number of attempts asked for at each task; the k of pass@k and the n of n/n.
        seed: seed of the intervals' bootstrap.

    Returns:
        `tbx_envs.evaluation.metrics.measures` with `unseen_families` (of the held-out families) and `families` (family
        -> measures), `void_kinds` (kind of fault -> number of void rows) and `retries` (attempts repeated after a
        fault); where a served user has said nothing, `user_silences` and `user_answers`, in how many of its answers;
        if there are any, `set_aside` (uid -> reason) of tasks that cannot be run.
    """
    tallies = tallies_of(rows)
    is_heldout = {row["uid"]: _is_of_heldout_family(row) for row in rows}
    heldout = [tally for tally in tallies if is_heldout[tally.uid]]
    families: dict[str, list[Tally]] = {}
    for tally in tallies:
        families.setdefault(tally.family, []).append(tally)
    kinds = [row["fault"] for row in rows if row["fault"] is not None]
    return {
        **measures(tallies, attempts, seed),
        "void_kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "retries": sum(row["retry"] for row in rows),
        **_silences(rows),
        "tasks_unknown": sum(known is None for known in is_heldout.values()),
        **({"set_aside": reasons} if (reasons := set_aside(rows)) else {}),
        "unseen_families": measures(heldout, attempts, seed),
        "families": {name: measures(family, attempts, seed) for name, family in families.items()},
    }


def _silences(rows: Sequence[Row]) -> dict[str, Any]:
    """`user_silences`, answers in which a served user said nothing, with `user_answers`; empty where there is none."""
    silent = sum(row["usage"].get("user_silences", 0) for row in rows)
    answers = sum(row["usage"].get("user_turns", 0) for row in rows)
    return {"user_silences": silent, "user_answers": answers} if silent else {}


def _is_of_heldout_family(row: Row) -> bool | None:
    """What the row says; of one that does not, what the task says; None where that is not known here."""
    if "heldout_family" in row:
        return bool(row["heldout_family"])
    try:
        return is_heldout_family(find_task(row["uid"]))
    except DomainError:  # of a dataset that is not registered
        return None


def set_aside(rows: Iterable[Row]) -> dict[str, str]:
    """The tasks that cannot be run, and the reason of each."""
    return {row["uid"]: row["fault_message"] for row in rows if row["fault"] == TaskFault.kind}


def refuse_many_voids(rows: Sequence[Row]) -> None:
    """Fail an evaluation run whose measures would rest on too few attempts. Tasks that are set aside do not count.

    Raises:
        PolicyFault: more than `MAX_VOID_SHARE` of the attempts are void.
        DomainError: every task was set aside.
    """
    reasons = set_aside(rows)
    rows = [row for row in rows if row["uid"] not in reasons]
    if reasons and not rows:
        raise DomainError(f"none of {len(reasons)} task(s) can be run. The first: {next(iter(reasons.values()))}")
    void = [row for row in rows if row["passed"] is None]
    if len(void) > MAX_VOID_SHARE * len(rows):
        raise PolicyFault(
            f"{len(void)} of {len(rows)} attempts are void (at most {MAX_VOID_SHARE:.0%} may be); the first "
            f"fault is {void[0]['fault']}: {void[0]['fault_message']} Fix the cause and run the same command "
            f"again: clean rows are kept."
        )
