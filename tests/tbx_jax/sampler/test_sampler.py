"""The sampler against a plain loop that has no cache, no slots and no neighbours."""

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from small_model import CONFIG, HYBRID_SIZES, SAMPLING, VOCABULARY, random_tokens, small_model

from tbx_envs.errors import ActionError, ConfigError
from tbx_jax import models
from tbx_jax.config import MeshConfig, SamplingConfig
from tbx_jax.keys import key_for
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models import attention, parameter_axes, unembed
from tbx_jax.sampler import decoding, dispatch_shapes, slot_cache, swapping
from tbx_jax.sampler.sampler import Sampler

END = frozenset({3, 11})
GREEDY = SAMPLING.model_copy(update={"temperature": 0.0})
TWO_SLOTS = GREEDY.model_copy(update={"slots": 2})
MODEL, PARAMS = small_model()
HYBRID = small_model(**HYBRID_SIZES)
ROOM = SAMPLING.max_episode_tokens
token_logps = jax.jit(models.token_logps, static_argnames=("model",))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Short enough that some prompts take several."""
    monkeypatch.setattr(dispatch_shapes, "CHUNKS", (16,))


@functools.partial(jax.jit, static_argnames="model")
def next_logits(tokens_bt, last, model=MODEL, params=PARAMS):
    return unembed(model, params, models.apply(model, params, tokens_bt)[0][:, last])[0]


def plain_turn(tokens, choose, limit=SAMPLING.max_turn_tokens, model=MODEL, params=PARAMS):
    """A turn written one token at a time, computing the whole episode for each."""
    turn = []
    while len(turn) < limit and len(tokens) + len(turn) < ROOM:
        padded = np.zeros((1, ROOM), np.int32)
        padded[0, : len(tokens) + len(turn)] = [*tokens, *turn]
        logits = next_logits(jnp.array(padded), len(tokens) + len(turn) - 1, model, params)
        turn.append(int(choose(logits, len(turn))))
        if turn[-1] in END:
            return turn, True
    return turn, False


def likeliest(logits, place):
    return logits.argmax()


def drawn(seed, *turn_key):
    key = key_for(seed, "turn", *turn_key)
    return lambda logits, place: jax.random.categorical(jax.random.fold_in(key, place), logits)


def prompt(number):
    """Prompts of lengths from 1 to 39, so that some take one chunk and some take several."""
    return random_tokens(number, 1 + (number * 7) % 39).tolist()


def answer(number, turn):
    return random_tokens(1000 * number + turn, 1 + (number + 5 * turn) % 21).tolist()


def play(sampler, params, numbers, turns=3, in_flight=SAMPLING.slots):
    """Episodes `numbers`, so many of them at the same time; their tokens and turns."""
    queue, tokens, written = list(numbers)[::-1], {}, {number: [] for number in numbers}

    def admit():
        if queue:
            number = queue.pop()
            tokens[number] = prompt(number)
            sampler.begin(number, tokens[number], (number, 0))

    for _ in range(in_flight):
        admit()
    while sampler.busy:
        for turn in sampler.advance(params):
            number = turn.episode
            tokens[number] = tokens[number] + turn.tokens
            written[number].append(turn)
            if len(written[number]) < turns and turn.stopped:
                given = answer(number, len(written[number]))
                tokens[number] = tokens[number] + given
                sampler.extend(number, given, (number, len(written[number])))
            else:
                sampler.free(number)
                admit()
    return tokens, written


def assert_written_as_by_a_plain_loop(tokens, written, model=MODEL, params=PARAMS):
    for number, turns in written.items():
        known = prompt(number)
        for index, turn in enumerate(turns):
            wanted, stopped = plain_turn(known, likeliest, model=model, params=params)
            assert (turn.tokens, turn.stopped) == (wanted, stopped)
            known = [*known, *wanted, *(answer(number, index + 1) if index + 1 < len(turns) else [])]
        assert tokens[number] == known


def words(written):
    return {number: [turn.tokens for turn in turns] for number, turns in written.items()}


def test_greedy_turns_equal_those_of_a_plain_loop_over_three_turns():
    tokens, written = play(Sampler(MODEL, END, GREEDY, 0), PARAMS, range(10))
    assert_written_as_by_a_plain_loop(tokens, written)
    assert max(len(turns) for turns in written.values()) == 3


def test_a_token_is_drawn_with_the_key_of_its_turn_and_place():
    _, written = play(Sampler(MODEL, END, SAMPLING, 7), PARAMS, range(4), turns=1)
    for number in range(4):
        assert written[number][0].tokens == plain_turn(prompt(number), drawn(7, number, 0))[0]


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
    alone = words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, [5], in_flight=1)[1])
    assert together == backwards
    assert alone[5] == together[5]
    assert words(play(Sampler(MODEL, END, SAMPLING, 1), PARAMS, range(12))[1]) != together


def test_more_slots_than_go_together_change_no_token():
    """18 busy slots go in groups of 5, 5, 5 and 3, and the one of 3 is filled up with busy ones."""
    many_slots = SAMPLING.model_copy(update={"slots": 18})
    grouped = words(play(Sampler(MODEL, END, many_slots, 0), PARAMS, range(18), in_flight=18)[1])
    assert grouped == words(play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(18))[1])


def test_sampled_tokens_have_the_probabilities_of_the_model():
    draws = 3000
    sampling = SAMPLING.model_copy(update={"max_turn_tokens": 1})
    sampler, counts, left = Sampler(MODEL, END, sampling, 0), np.zeros(VOCABULARY), draws
    while left:
        for episode in range(min(SAMPLING.slots, left)):
            sampler.begin(episode, prompt(2), (left, episode))
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
        turns |= {turn.episode: turn for turn in sampler.advance(PARAMS)}
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
        assert turns[0].tokens
        for token in turns[0].tokens:
            padded = np.zeros((1, ROOM), np.int32)
            padded[0, : len(known)] = known
            assert token == int(next_logits(jnp.array(padded), len(known) - 1).argmax())
            known = [*known, token]
        known = [*known, 1, 2]
        sampler.extend(0, [1, 2], ("a", index + 1))


PROGRAMS = (decoding.prefill, decoding.decode, decoding.commit, swapping._row, swapping._with_row)


def num_compiled():
    return [program._cache_size() for program in PROGRAMS]


def test_nothing_is_compiled_again_after_the_first_round():
    """Prompts of all lengths, more of them than slots, admitted and swapped_out in another order."""
    play(Sampler(MODEL, END, SAMPLING, 0), PARAMS, range(40), in_flight=10)
    compiled = num_compiled()
    moved = jax.tree.map(lambda leaf: leaf + 0.0, PARAMS)
    for seed in (1, 2):
        play(Sampler(MODEL, END, SAMPLING, seed), moved, range(39, -1, -1), in_flight=13)
    assert num_compiled() == compiled


@pytest.fixture
def in_place(monkeypatch):
    """As for a model that is not small, with so short blocks that most rows reach into several."""
    monkeypatch.setattr(dispatch_shapes, "_SMALL_MODEL", 0)
    monkeypatch.setattr(attention, "_BLOCK", 16)


def test_a_cache_read_in_place_gives_the_tokens_of_a_plain_loop(in_place):
    sampler = Sampler(MODEL, END, GREEDY, 0)
    tokens, written = play(sampler, PARAMS, range(10))
    assert sampler._rows.shapes.in_place
    assert_written_as_by_a_plain_loop(tokens, written)


def test_episodes_that_are_read_in_place_are_parked_and_mixed_as_others_are(in_place):
    tokens, written = play(Sampler(MODEL, END, TWO_SLOTS, 0), PARAMS, range(7), in_flight=5)
    assert_written_as_by_a_plain_loop(tokens, written)


def test_a_hybrid_is_read_in_place_as_well(in_place):
    tokens, written = play(Sampler(HYBRID[0], END, TWO_SLOTS, 0), HYBRID[1], range(5), turns=2, in_flight=4)
    assert_written_as_by_a_plain_loop(tokens, written, *HYBRID)


def test_one_program_reads_all_lengths_in_place(in_place):
    """For each number of rows; what is taken out needs one for each bucket of lengths besides."""
    before = decoding.decode._cache_size()
    sampler = Sampler(MODEL, END, SAMPLING, 0)
    play(sampler, PARAMS, range(12))
    assert decoding.decode._cache_size() - before <= len(sampler._rows.shapes.decode_rows)


def test_long_rows_of_a_small_model_go_in_smaller_groups_and_write_the_same(monkeypatch):
    rows = Sampler(MODEL, END, GREEDY, 0)._rows
    monkeypatch.setattr(dispatch_shapes, "_TAKEN_OUT", 150 * rows._cache.position_bytes)
    sampler = Sampler(MODEL, END, GREEDY, 0)
    sizes = set()
    write = decoding.decode

    def counted(model, params, cache, slot_b, turns, end_ids, **static):
        sizes.add(len(turns.last_b))
        assert len(turns.last_b) * static["attend_length"] <= 150
        return write(model, params, cache, slot_b, turns, end_ids, **static)

    monkeypatch.setattr(slot_cache, "decode", counted)
    tokens, written = play(sampler, PARAMS, range(10))
    assert_written_as_by_a_plain_loop(tokens, written)
    assert max(sizes) == 2 < max(rows.shapes.decode_rows)


@pytest.mark.parametrize("reads", [None, "in_place"])
def test_a_cache_split_over_two_devices_changes_no_token(reads, request):
    if reads is not None:
        request.getfixturevalue(reads)
    rules = {"b": "fsdp", "d": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 2}, rules=rules))
    sampling = SAMPLING.model_copy(update={"slots": 2})
    spread = Sampler(MODEL, END, sampling, 0, mesh=mesh, rules=rules)
    params = shard_tree(PARAMS, parameter_axes(MODEL), mesh, rules)
    wanted = words(play(Sampler(MODEL, END, sampling, 0), PARAMS, range(4), turns=2)[1])
    assert words(play(spread, params, range(4), turns=2)[1]) == wanted
    assert len(spread._rows._cache.values_lbksh.sharding.device_set) == 2


def test_the_cache_does_not_move_between_calls():
    table = Sampler(MODEL, END, SAMPLING, 0)
    before = table._rows._cache.values_lbksh.unsafe_buffer_pointer()
    play(table, PARAMS, range(3), turns=1)
    assert table._rows._cache.values_lbksh.unsafe_buffer_pointer() == before


def test_episodes_used_out_of_order_are_refused():
    table = Sampler(MODEL, END, SAMPLING, 0)
    assert not table.busy and table.advance(PARAMS) == []
    with pytest.raises(ActionError, match=r"there is no episode 0 to extend; call begin\(0, ...\)"):
        table.extend(0, [1], ("a",))
    with pytest.raises(ActionError, match=r"there is no episode 0 to resume; call begin\(0, ...\)"):
        table.resume(0, [1], ("a",))
    with pytest.raises(ActionError, match="episode 0: 0 tokens"):
        table.begin(0, [], ("a",))
    with pytest.raises(ActionError, match=f"episode 0: 2 tokens, from 1 to 13, for a vocabulary of {VOCABULARY}"):
        table.begin(0, [1, 13], ("a",))
    table.begin(0, [1], ("a",))
    for again in (table.begin, table.extend, table.resume):
        with pytest.raises(ActionError, match="episode 0 waits for a turn"):
            again(0, [1], ("a",))
    table.free(0)
    table.free(0)
    assert not table.busy
    table.begin(0, [1], ("a",))


# --- more episodes than slots -------------------------------------------------------------------------------


@pytest.mark.optimized
def test_episodes_that_take_turns_in_one_slot_write_what_each_would_write_alone_to_the_last_bit():
    one_slot = SAMPLING.model_copy(update={"slots": 1})
    crowded = Sampler(MODEL, END, one_slot, 0)
    _, together = play(crowded, PARAMS, range(3), turns=2, in_flight=3)
    for number in range(3):
        alone = play(Sampler(MODEL, END, one_slot, 0), PARAMS, [number], turns=2, in_flight=1)[1][number]
        assert together[number] == alone


def test_an_idle_episode_is_parked_only_when_another_needs_its_slot_and_the_idlest_goes_first():
    table = Sampler(MODEL, END, SAMPLING.model_copy(update={"max_turn_tokens": 1}), 0)
    begin = lambda *numbers: [table.begin(number, prompt(2), (number,)) for number in numbers]  # noqa: E731
    extend = lambda *numbers: [table.extend(number, [1], (number, 1)) for number in numbers]  # noqa: E731
    ended = lambda: [turn.episode for turn in table.advance(PARAMS)]  # noqa: E731
    swapped_out = lambda: [number for number, episode in table._episodes.items() if episode.swapped]  # noqa: E731
    begin(0, 1, 2, 3, 4, 5)
    assert (ended(), swapped_out()) == ([0, 1, 2, 3, 4, 5], [])
    begin(6)
    assert (ended(), swapped_out()) == ([6], [0])
    extend(5, 4, 3, 2, 1, 0)
    assert (ended(), swapped_out(), table.num_swapped_out) == ([0, 1, 2, 3, 4, 5], [6], 1)
    begin(7), extend(6)
    assert (ended(), swapped_out()) == ([6, 7], [0, 1])
    for number in range(8):
        table.free(number)
    assert table.num_swapped_out == 0 and table._slots == [None] * SAMPLING.slots


def test_a_turn_without_room_ends_without_a_slot():
    table = Sampler(MODEL, END, GREEDY.model_copy(update={"slots": 1}), 0)
    table.begin(0, prompt(1), (0,))
    table.begin(1, random_tokens(0, ROOM).tolist(), (1,))
    assert [turn.episode for turn in table.advance(PARAMS)][-1:] == [1]


def test_a_hybrid_model_writes_the_same_with_parked_states_as_a_plain_loop():
    model, params = HYBRID
    sampler = Sampler(model, END, TWO_SLOTS, 0)
    tokens, written = play(sampler, params, range(5), turns=2, in_flight=4)
    assert_written_as_by_a_plain_loop(tokens, written, model, params)


# --- an episode that is given anew --------------------------------------------------------------------------


def resumed(model, params, change):
    """A first turn, then the whole episode changed by `change` and resumed; its tokens, what was reused, the turn."""
    sampler = Sampler(model, END, TWO_SLOTS if model.config.hybrid else GREEDY, 0)
    sampler.begin(7, prompt(3), (0,))
    first = None
    while not first:
        first = sampler.advance(params)
    held = [*prompt(3), *first[0].tokens]
    given = change(held)
    promised, reused = sampler.num_reusable(7, given), sampler.resume(7, given, (1,))
    assert reused == promised
    second = None
    while not second:
        second = sampler.advance(params)
    return held, given, reused, second[0].tokens


CHANGES = {
    "more": lambda held: [*held, 1, 2, 4],
    "the same": lambda held: held,
    "other words later": lambda held: [*held[:-3], (held[-3] + 1) % VOCABULARY, 2],
    "another beginning": lambda held: [(held[0] + 1) % VOCABULARY, *held[1:]],
}


@pytest.mark.parametrize(("change", "kept"), list(zip(CHANGES, (-1, -1, -3, None), strict=True)), ids=CHANGES)
def test_a_resumed_episode_keeps_what_is_the_same_and_goes_on_as_a_fresh_one(change, kept):
    held, given, reused, turn = resumed(MODEL, PARAMS, CHANGES[change])
    assert reused == (0 if kept is None else len(held) + kept)
    assert turn == plain_turn(given, likeliest)[0]


def test_a_hybrid_resumes_from_all_it_holds_or_from_the_start():
    model, params = HYBRID
    for change, all_of_it in zip(CHANGES, (True, True, False, False), strict=True):
        held, given, reused, turn = resumed(model, params, CHANGES[change])
        assert reused == (len(held) - 1 if all_of_it else 0)
        assert turn == plain_turn(given, likeliest, model=model, params=params)[0]


def test_turns_with_temperatures_and_limits_of_their_own_go_together():
    table = Sampler(MODEL, END, SAMPLING, 0)
    table.begin(0, prompt(4), ("a",), temperature=0.0)
    table.begin(1, prompt(4), ("b",), max_turn_tokens=2)
    table.begin(2, prompt(4), ("c",), max_turn_tokens=10**9)
    turns = {}
    while table.busy:
        turns |= {turn.episode: turn for turn in table.advance(PARAMS)}
    assert turns[0].tokens == plain_turn(prompt(4), likeliest)[0]
    for number, name, limit in ((1, "b", 2), (2, "c", SAMPLING.max_turn_tokens)):
        assert turns[number].tokens == plain_turn(prompt(4), drawn(0, name), limit)[0]


# --- types, memory, threads ---------------------------------------------------------------------------------


def test_a_cache_of_another_type_is_kept_in_that_type_and_changes_little():
    sampler = Sampler(MODEL, END, SAMPLING.model_copy(update={"cache_dtype": "bfloat16", "slots": 1}), 0)
    assert sampler._rows._cache.keys_lbkhs.dtype == jnp.bfloat16
    tokens, written = play(sampler, PARAMS, range(3), turns=1)
    gaps = []
    for number, turns in written.items():
        padded = np.zeros((12, ROOM), np.int32)
        padded[0, : len(tokens[number])] = tokens[number]
        logps = np.asarray(token_logps(MODEL, PARAMS, jnp.array(padded), temperature=1.0))[0, len(prompt(number)) :]
        gaps += np.abs(turns[0].logps - logps[: len(turns[0].logps)]).tolist()
    assert 0 < max(gaps) < 0.1


def test_dispatches_side_by_side_write_what_they_write_one_after_the_other():
    side_by_side, in_turn = Sampler(MODEL, END, SAMPLING, 0), Sampler(MODEL, END, SAMPLING, 0)
    side_by_side._rows._threads, in_turn._rows._threads = ThreadPoolExecutor(2), None
    assert play(side_by_side, PARAMS, range(12)) == play(in_turn, PARAMS, range(12))
    side_by_side._rows._threads.shutdown()


def test_memory_is_said_in_the_log_and_is_that_of_the_arrays(caplog):
    with caplog.at_level(logging.INFO, "tbx_jax.sampler.sampler"):
        sampler = Sampler(MODEL, END, SAMPLING, 0)
    plan, rows = sampler.memory, sampler._rows._cache
    assert [record.getMessage() for record in caplog.records] == [str(plan)]
    assert plan.parameters == sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    assert plan.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(rows))


def test_limits_that_the_model_cannot_keep_are_refused():
    with pytest.raises(ConfigError, match=r"sampling.max_episode_tokens is 513, model.max_length is 512"):
        Sampler(MODEL, END, SAMPLING.model_copy(update={"max_episode_tokens": CONFIG.max_length + 1}), 0)
    for ends in (frozenset(), frozenset({VOCABULARY})):
        with pytest.raises(ConfigError, match="must name at least one token"):
            Sampler(MODEL, ends, SAMPLING, 0)


def test_all_configurations_of_sampling_are_hashable():
    assert isinstance(hash(SAMPLING), int) and SamplingConfig(**SAMPLING.model_dump()) == SAMPLING
