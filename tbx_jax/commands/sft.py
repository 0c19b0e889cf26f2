"""`tbx sft`: supervised fine-tuning (SFT) on demonstrations; makes the policy that ships with tbx.

In four steps: the scripted agent of each family attempts new tasks and breaks rules with a given probability; a
tokenizer is trained on the messages; a small decoder is trained on the agent's turns; the policy's folder is written.
The result succeeds often but not reliably; GRPO improves on that.

Demonstrations are of all families, with those held out from GRPO (a model of this size knows only what it was shown),
but never of a frozen task: their numbers start at `FIRST_FRESH`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from tbx_envs.agents import Attempt
from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.chat.chatml import CHAT_TEMPLATES
from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.domains import Domain, load_domain
from tbx_envs.episode import Episode
from tbx_envs.errors import ConfigError, DomainError, did_you_mean
from tbx_envs.evaluation.report import Bar
from tbx_envs.files import write_json
from tbx_envs.messages import Message, ToolCall, Turn
from tbx_envs.seeding import derive, rng
from tbx_jax.batching import Batch, build_batch, length_buckets
from tbx_jax.config import SftConfig
from tbx_jax.keys import key_for
from tbx_jax.learner import Learner, LearnerState, build_learner
from tbx_jax.mesh import build_mesh
from tbx_jax.models import Model, Params, build
from tbx_jax.policies.tokenizers import train_tokenizer
from tbx_jax.policies.weights import load_policy, save_policy
from tbx_jax.trajectory import Trajectory, trajectory_of

FIRST_FRESH = 100_000  # frozen tasks have numbers of three digits
DEMONSTRATIONS_PER_TASK = 2  # making a world costs more than a second demonstration in it
MEASURED_SHARE = 0.02  # share of the demonstrations to measure the loss on, not trained on


def _say(words: str) -> None:
    print(words, flush=True)  # a log is read while the run goes on


def run(config: SftConfig) -> dict[str, Any]:
    """Writes the policy folder `output_dir/policy`; returns the summary, which is also in `sft.json`."""
    started = time.monotonic()
    output = Path(config.output_dir)
    domain = load_domain(config.domain)
    episodes = list(demonstrations(domain, config.demonstrations, config.error_rate, config.seed, config.families))
    passed = float(np.mean([episode.passed for episode in episodes]))
    _say(f"{len(episodes)} demonstrations, {passed:.1%} of them pass their check")
    model, params, tokenizer = _initial_policy(config, episodes)
    chat = ChatTemplate(tokenizer)
    trajectories = [demonstrated(chat, episode) for episode in episodes]
    lengths = np.array([len(trajectory) for trajectory in trajectories])
    share = sum(trajectory.num_trained_tokens for trajectory in trajectories) / lengths.sum()
    _say(
        f"{len(tokenizer)} tokens in the vocabulary; {lengths.mean():.0f} in an episode "
        f"(longest {lengths.max()}), {share:.0%} of them the agent's"
    )
    state, learner, figures = _train(config, trajectories, model, params)
    save_policy(output / "policy", learner.model, state.params, tokenizer, like=config.policy)
    summary = {
        "demonstrations": len(episodes),
        "demonstrations_passed": passed,
        "vocabulary": len(tokenizer),
        "mean_tokens": float(lengths.mean()),
        "longest_tokens": int(lengths.max()),
        "agent_share": float(share),
        "minutes": (time.monotonic() - started) / 60,
        **figures,
    }
    write_json(output / "sft.json", summary)
    _say(f"policy written to {output / 'policy'} in {summary['minutes']:.1f} minutes")
    return summary


def _initial_policy(config: SftConfig, episodes: Sequence[Episode]) -> tuple[Model, Params, PreTrainedTokenizerBase]:
    """The policy to train: a new model with a new tokenizer, or an existing policy."""
    if config.policy is None:
        new_tokenizer = train_tokenizer(_texts(episodes), vocabulary=config.vocabulary)
        return *build(config.model, len(new_tokenizer), key_for(config.seed, "parameters")), new_tokenizer
    model, params, tokenizer = load_policy(
        config.policy, mesh=build_mesh(config.mesh), rules=config.mesh.rules, dtype=config.compute_dtype
    )
    if config.chat_template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[config.chat_template]
    return model, params, tokenizer


def demonstrations(
    domain: Domain, number: int, error_rate: float, seed: int, families: Sequence[str] | None = None
) -> Iterator[Episode]:
    """`number` episodes of the scripted agent on new tasks, round-robin over the families.

    Raises:
        ConfigError: the domain has no such family.
        DomainError: a demonstration was void, which is a defect of the domain.
    """
    unknown = [name for name in families or () if name not in domain.families]
    if unknown:
        near = did_you_mean(unknown[0], domain.families)
        raise ConfigError(
            f"domain {domain.name} has no family '{unknown[0]}'.{near} It has: {', '.join(domain.families)}."
        )
    families = list(domain.families) if families is None else list(families)
    attempts = []
    for index in range(number):
        family = families[index % len(families)]
        place, attempt = divmod(index // len(families), DEMONSTRATIONS_PER_TASK)
        uid = f"{domain.name}/{family}/{FIRST_FRESH + place}"
        attempts.append(Attempt(uid, attempt, derive(seed, "demonstration", uid, attempt)))
    # Attempts at the same task are adjacent, so that its world is made once.
    attempts.sort(key=lambda attempt: attempt.uid)
    with Bar("demonstrations", number) as bar:
        for episode in ScriptedAgent(error_rate=error_rate).run(attempts):
            if episode.fault:
                raise DomainError(f"demonstration of {episode.uid} is void: {episode.fault.message}. Fix the domain.")
            bar.step()
            yield episode


def demonstrated(chat: ChatTemplate, episode: Episode) -> Trajectory:
    """The tokens of a demonstration, exactly as in a rollout; its turns are trained on."""
    ledger = TokenLedger()
    unread: list[Message] = []
    for message in episode.transcript:
        if isinstance(message, Turn):
            ledger.give(chat.continuation(unread) if len(ledger) else chat.opening(unread, ()))
            ids = chat.policy_turn(message)
            ledger.write(ids, [0.0] * len(ids))
            unread = []
        else:
            unread.append(message)
    return trajectory_of(
        ledger, uid=episode.uid, attempt=episode.attempt, reward=episode.reward or 0.0, truncated=False
    )


def _texts(episodes: Iterable[Episode]) -> Iterator[str]:
    """The texts of all messages but the system's, as a chat template renders them."""
    for episode in episodes:
        for message in episode.transcript:
            match message:
                case Turn(text=text, calls=calls):
                    yield text
                    for call in calls:
                        assert isinstance(call, ToolCall), call  # a scripted agent's calls are well-formed
                        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
                        yield f'{{"name": "{call.name}", "arguments": {arguments}}}'
                case _ if getattr(message, "role", "tool") != "system":
                    yield message.text


def _train(
    config: SftConfig, trajectories: Sequence[Trajectory], model: Model, params: Params
) -> tuple[LearnerState, Learner, dict[str, float | int]]:
    order = rng(config.seed, "held back").sample(range(len(trajectories)), len(trajectories))
    num_measured = max(1, int(MEASURED_SHARE * len(order)))
    measured = [trajectories[i] for i in order[:num_measured]]
    trained = [trajectories[i] for i in order[num_measured:]]
    longest = max(map(len, trajectories))
    if longest > model.config.max_length:
        raise ConfigError(
            f"a demonstration has {longest} tokens and the model's max_length is {model.config.max_length}. Choose a "
            f"shorter chat_template, other families, or a model with a longer max_length."
        )
    buckets = length_buckets(model.config.max_length)
    steps = [
        batch
        for epoch in range(config.epochs)
        for batch in _batches(trained, config.batch_tokens, buckets, derive(config.seed, "epoch", epoch))
    ]
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    _say(f"{num_parameters:,} parameters, {len(steps)} steps of about {config.batch_tokens} tokens")
    learner = build_learner(model, optim=config.optim, mesh=config.mesh, num_steps=len(steps))
    state, started, seen, loss = learner.init(params), time.monotonic(), 0, float("nan")
    said_every = max(1, min(100, len(steps) // 20))
    with Bar("training", len(steps)) as bar:
        for step, batch in enumerate(steps):
            state, metrics = learner.sft_update(state, batch)
            seen += batch.num_tokens
            loss = metrics["loss"] if step == 0 else 0.95 * loss + 0.05 * metrics["loss"]
            rate = seen / (time.monotonic() - started)
            bar.step(f"training: loss {loss:.4f}, {rate:,.0f} tokens/s")
            if step % said_every == 0:
                bar.say(f"step {step}: loss {loss:.4f}, {rate:,.0f} tokens/s")
    batches = list(_batches(measured, config.batch_tokens, buckets, 0))
    heldback = sum(learner.sft_loss(state, batch) * batch.num_trained for batch in batches)
    heldback /= sum(batch.num_trained for batch in batches)
    _say(f"loss on held-out demonstrations: {heldback:.4f} nats per token")
    return (
        state,
        learner,
        {"parameters": num_parameters, "steps": len(steps), "train_loss": loss, "heldback_loss": heldback},
    )


def _batches(
    trajectories: Sequence[Trajectory], batch_tokens: int, buckets: Sequence[int], seed: int
) -> Iterator[Batch]:
    """Batches of one length bucket each, in shuffled order; each holds about `batch_tokens` padded tokens."""
    shuffled = rng(seed, "order").sample(list(trajectories), len(trajectories))
    waiting: dict[int, list[Trajectory]] = {bucket: [] for bucket in buckets}
    full: list[list[Trajectory]] = []
    for trajectory in shuffled:
        bucket = next(bucket for bucket in buckets if bucket >= len(trajectory))
        waiting[bucket].append(trajectory)
        if len(waiting[bucket]) == max(1, batch_tokens // bucket):
            full.append(waiting[bucket])
            waiting[bucket] = []
    full += [rest for rest in waiting.values() if rest]
    for rows in rng(seed, "batches").sample(full, len(full)):
        bucket = next(bucket for bucket in buckets if bucket >= max(map(len, rows)))
        yield build_batch(rows, [0.0] * len(rows), micro_batch=max(1, batch_tokens // bucket), buckets=buckets)
