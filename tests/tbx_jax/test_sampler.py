"""The sampler against a plain loop that has no cache, no slots and no neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from small_model import CONFIG, SAMPLING, VOCABULARY, random_tokens, small_model

from tbx_envs.errors import ActionError, ConfigError
from tbx_jax import models, sampler
from tbx_jax.config import MeshConfig, SamplingConfig
from tbx_jax.keys import key_for
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models import parameter_letters, unembed
from tbx_jax.sampler import Sampler

END = frozenset({3, 11})
GREEDY = SAMPLING.model_copy(update={"temperature": 0.0})
MODEL, PARAMS = small_model()
ROOM = SAMPLING.max_episode_tokens
token_logps = jax.jit(models.token_logps, static_argnames=("model",))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Short enough that some prompts take several."""
    monkeypatch.setattr(sampler, "_CHUNKS", (8, 16))


@jax.jit
def next_logits(tokens_bt, last):
    return unembed(MODEL, PARAMS, models.apply(MODEL, PARAMS, tokens_bt)[0][:, last])[0]


def plain_turn(tokens, choose):
    """A turn written one token at a time, computing the whole episode for each."""
    turn = []
    while len(turn) < SAMPLING.max_turn_tokens and len(tokens) + len(turn) < ROOM:
        padded = np.zeros((1, ROOM), np.int32)
        padded[0, : len(tokens) + len(turn)] = [*tokens, *turn]
        turn.append(int(choose(next_logits(jnp.array(padded), len(tokens) + len(turn) - 1), len(turn))))
        if turn[-1] in END:
            return turn, True
    return turn, False


def prompt(number):
    """Prompts of lengths from 1 to 39, so that some take one chunk and some take several."""
    return random_tokens(number, 1 + (number * 7) % 39).tolist()


def answer(number, turn):
    return random_tokens(1000 * number + turn, 1 + (number + 5 * turn) % 21).tolist()


def play(sampler, params, numbers, turns=3, slots=None):
    """Episodes `numbers` through the slots of `sampler`, as many at a time as there are; their tokens and turns."""
    queue, at, tokens, written = list(numbers)[::-1], {}, {}, {number: [] for number in numbers}

    def admit(slot):
        if queue:
            number = at[slot] = queue.pop()
            tokens[number] = prompt(number)
            sampler.begin(slot, tokens[number], (number, 0))

    for slot in slots if slots is not None else range(SAMPLING.slots):
        admit(slot)
    while sampler.busy:
        for turn in sampler.advance(params):
            number = at[turn.slot]
            tokens[number] = tokens[number] + turn.tokens
            written[number].append(turn)
            if len(written[number]) < turns and turn.stopped:
                given = answer(number, len(written[number]))
                tokens[number] = tokens[number] + given
                sampler.extend(turn.slot, given, (number, len(written[number])))
            else:
                sampler.free(turn.slot)
                admit(turn.slot)
    return tokens, written


def words(written):
    return {number: [turn.tokens for turn in turns] for number, turns in written.items()}


def test_greedy_turns_equal_those_of_a_plain_loop_over_three_turns():
    tokens, written = play(Sampler(MODEL, END, GREEDY, 0), PARAMS, range(10))
    for number in range(10):
        known = prompt(number)
        for index, turn in enumerate(written[number]):
            wanted, stopped = plain_turn(known, lambda logits, _: logits.argmax())
            assert (turn.tokens, turn.stopped) == (wanted, stopped)
            known = [*known, *wanted]
            if index + 1 < len(written[number]):
                known = [*known, *answer(number, index + 1)]
        assert tokens[number] == known
    assert max(len(turns) for turns in written.values()) == 3


def test_a_token_is_drawn_with_the_key_of_its_turn_and_place():
    _, written = play(Sampler(MODEL, END, SAMPLING, 7), PARAMS, range(4), turns=1)
    for number in range(4):
        key = key_for(7, "turn", number, 0)
        draw = lambda logits, place, key=key: jax.random.categorical(jax.random.fold_in(key, place), logits)  # noqa: E731
        assert written[number][0].tokens == plain_turn(prompt(number), draw)[0]


def test_recorded_logps_are_those_that_the_learner_computes():
    sampling = SAMPLING.model_copy(update={"temperature": 0.8})
    tokens, written = play(Sampler(MODEL, END, sampling, 0), PARAMS, range(12))
    padded = np.zeros((12, ROOM), np.int32)
    for number in range(12):
        padded[number, : len(tokens[number])] = tokens[number]
    logps = np.asarray(token_logps(MODEL, PARAMS, jnp.array(padded), temperature=0.8))
    for number, turns in written.items():
        start = len(prompt(number))
        for index, turn in enumerate(turns):
            if index:
                start += len(answer(number, index))
            place = slice(start, start := start + len(turn.tokens))
            assert tokens[number][place] == turn.tokens
            np.testing.assert_allclose(turn.logps, logps[number, place], atol=1e-5)


def test_an_episode_depends_neither_on_its_slot_nor_on_its_neighbours():
    together = words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(12))[1])
    backwards = words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(11, -1, -1))[1])
    alone = words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, [5], slots=[4])[1])
    assert together == backwards
    assert alone[5] == together[5]
    assert words(play(Sampler(MODEL, END, SAMPLING, 1), PARAMS, range(12))[1]) != together


def test_more_slots_than_go_together_change_no_token():
    """18 busy slots go in groups of 5, 5, 5 and 3, and the last is filled up with busy ones."""
    many_slots = SAMPLING.model_copy(update={"slots": 18})
    grouped = words(play(Sampler(MODEL, END, many_slots, 0), PARAMS, range(18), slots=range(18))[1])
    assert grouped == words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(18))[1])


def test_sampled_tokens_have_the_probabilities_of_the_model():
    draws = 3000
    sampling = SAMPLING.model_copy(update={"max_turn_tokens": 1})
    sampler, counts, left = Sampler(MODEL, END, sampling, 0), np.zeros(VOCABULARY), draws
    while left:
        for slot in range(min(SAMPLING.slots, left)):
            sampler.begin(slot, prompt(2), (left, slot))
        turns = sampler.advance(PARAMS)
        counts += np.bincount([turn.tokens[0] for turn in turns], minlength=VOCABULARY)
        left -= len(turns)
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(prompt(2))] = prompt(2)
    wanted = np.asarray(jax.nn.softmax(next_logits(jnp.array(padded), len(prompt(2)) - 1)), np.float64)
    likely = wanted * draws > 5
    observed, expected = (
        np.append(counts[likely], counts[~likely].sum()),
        np.append(wanted[likely], wanted[~likely].sum()),
    )
    expected = expected * draws / expected.sum()
    keep = expected > 0
    assert scipy.stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_limits_cut_a_turn_off_and_say_so():
    sampling = SAMPLING.model_copy(update={"max_turn_tokens": 5, "max_episode_tokens": 20})
    sampler = Sampler(MODEL, END, sampling, 0)
    given = {0: 3, 1: 17, 2: 20, 3: 25}
    for slot, length in given.items():
        sampler.begin(slot, random_tokens(slot, length).tolist(), (slot,))
    turns = {}
    while sampler.busy:
        turns |= {turn.slot: turn for turn in sampler.advance(PARAMS)}
    assert turns[0].stopped or len(turns[0].tokens) == 5
    assert turns[1].stopped or len(turns[1].tokens) == 3
    for slot in (2, 3):
        assert (turns[slot].tokens, turns[slot].logps, turns[slot].stopped) == ([], [], False)


def test_an_episode_goes_on_after_a_turn_that_was_cut_off():
    sampling = GREEDY.model_copy(update={"max_turn_tokens": 2})
    sampler = Sampler(MODEL, frozenset({12, 5}), sampling, 0)
    known = prompt(1)
    sampler.begin(0, known, ("a", 0))
    for index in range(3):
        turns = []
        while not turns:
            turns = sampler.advance(PARAMS)
        for token in turns[0].tokens:
            padded = np.zeros((1, ROOM), np.int32)
            padded[0, : len(known)] = known
            assert token == int(next_logits(jnp.array(padded), len(known) - 1).argmax())
            known = [*known, token]
        known = [*known, 1, 2]
        sampler.extend(0, [1, 2], ("a", index + 1))


def test_nothing_is_compiled_again_after_the_first_round(monkeypatch):
    table = Sampler(MODEL, END, SAMPLING, 0)
    play(table, PARAMS, range(12))
    compiled = sampler._prefill._cache_size(), sampler._decode._cache_size()
    play(table, PARAMS, range(12))
    play(Sampler(MODEL, END, SAMPLING, 0), jax.tree.map(lambda leaf: leaf + 0.0, PARAMS), range(12))
    assert compiled == (sampler._prefill._cache_size(), sampler._decode._cache_size())


def test_one_compiled_shape_serves_each_bucket_of_lengths():
    lengths = [sampler._length_bucket(longest) for longest in range(2000)]
    assert all(bucket >= longest for longest, bucket in enumerate(lengths))
    assert sorted(set(lengths)) == [0, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


def test_a_cache_split_over_two_devices_changes_no_token():
    rules = {"b": "fsdp", "d": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 2}, rules=rules))
    spread = Sampler(MODEL, END, SAMPLING, 0, mesh=mesh, rules=rules)
    params = shard_tree(PARAMS, parameter_letters(MODEL), mesh, rules)
    wanted = words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(4), turns=2)[1])
    assert words(play(spread, params, range(4), turns=2)[1]) == wanted
    assert len(spread._cache.values_lbksh.sharding.device_set) == 2


def test_the_cache_does_not_move_between_calls():
    table = Sampler(MODEL, END, SAMPLING, 0)
    before = table._cache.values_lbksh.unsafe_buffer_pointer()
    play(table, PARAMS, range(3), turns=1)
    assert table._cache.values_lbksh.unsafe_buffer_pointer() == before


def test_slots_used_out_of_order_are_refused():
    table = Sampler(MODEL, END, SAMPLING, 0)
    assert not table.busy and table.advance(PARAMS) == []
    with pytest.raises(ActionError, match=r"slot 0 has no episode to extend; call begin\(0, ...\)"):
        table.extend(0, [1], ("a",))
    with pytest.raises(ActionError, match="slot 6: there are 6; use 0 to 5"):
        table.begin(6, [1], ("a",))
    with pytest.raises(ActionError, match="slot 0: 0 tokens"):
        table.begin(0, [], ("a",))
    with pytest.raises(ActionError, match=f"slot 0: 2 tokens, from 1 to 13, for a vocabulary of {VOCABULARY}"):
        table.begin(0, [1, 13], ("a",))
    table.begin(0, [1], ("a",))
    for again in (table.begin, table.extend):
        with pytest.raises(ActionError, match="slot 0 waits for a turn"):
            again(0, [1], ("a",))
    table.free(0)
    assert not table.busy
    table.begin(0, [1], ("a",))


def test_limits_that_the_model_cannot_keep_are_refused():
    with pytest.raises(ConfigError, match=r"sampling.max_episode_tokens is 513, model.max_length is 512"):
        Sampler(MODEL, END, SAMPLING.model_copy(update={"max_episode_tokens": CONFIG.max_length + 1}), 0)
    for ends in (frozenset(), frozenset({VOCABULARY})):
        with pytest.raises(ConfigError, match="must name at least one token"):
            Sampler(MODEL, ends, SAMPLING, 0)


def test_all_configurations_of_sampling_are_hashable():
    assert isinstance(hash(SAMPLING), int) and SamplingConfig(**SAMPLING.model_dump()) == SAMPLING
