import dataclasses
import json

import pytest
import scipy

from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.evaluation.pool import BANDS, band_masses, difficulty, load_pool, lock_digest, save_pool, select_pool
from tbx_envs.evaluation.run import task_hash
from tbx_envs.evaluation.task_lists import select_tasks

TRAIN = select_tasks("train")[:5]
POLICY = {"name": "nano", "sha256": "0" * 64}


def tallies(passes, attempts=8):
    return [Tally(uid, uid.split("/")[1], c, attempts) for uid, c in zip(TRAIN, passes, strict=False)]


def pool(passes=(0, 2, 4, 6, 8), **changes):
    options = {"bands": ("hard", "medium", "easy"), "policy": POLICY, "seed": 3, **changes}
    return select_pool(tallies(passes), **options)


@pytest.mark.parametrize("passes", [0, 3, 8])
def test_masses_of_the_bands_are_integrals_of_the_posterior(passes):
    def density(rate):
        return rate ** (passes - 0.5) * (1 - rate) ** (8 - passes - 0.5)

    whole = scipy.integrate.quad(density, 0, 1)[0]
    masses, low = band_masses(8, passes), 0.0
    for band, high in BANDS.items():
        assert masses[band] == pytest.approx(scipy.integrate.quad(density, low, high)[0] / whole, abs=1e-6)
        low = high


def test_difficulty_of_eight_attempts():
    # Worked with the masses above; one pass in eight leaves most mass between 0.08 and 0.40.
    bands = [difficulty(8, passes) for passes in range(9)]
    assert bands == ["too_hard", "hard", "hard", "hard", "medium", "easy", "easy", "easy", "too_easy"]
    assert difficulty(0, 0) == "unknown"


def test_the_pool_keeps_the_bands_and_records_every_candidate():
    made = pool()
    assert made.uids == TRAIN[1:4]
    assert [task.band for task in made.candidates] == ["too_hard", "hard", "medium", "easy", "too_easy"]
    assert made.candidates[1].content_hash == task_hash(TRAIN[1])
    assert made.locks == {"clinic": lock_digest("clinic")}


def test_a_pool_survives_its_file(tmp_path):
    save_pool(pool(), tmp_path / "pool.json")
    loaded = load_pool(tmp_path / "pool.json")
    assert loaded == pool()
    assert json.loads((tmp_path / "pool.json").read_text())["policy"] == POLICY


def test_a_frozen_pool_is_never_overwritten_by_another(tmp_path):
    path = tmp_path / "pool.json"
    save_pool(pool(), path)
    before = path.read_bytes()
    save_pool(pool(), path)
    with pytest.raises(ConfigError, match="holds another pool"):
        save_pool(pool(seed=4), path)
    assert path.read_bytes() == before


def test_a_task_that_changed_since_the_pool_was_frozen_is_noticed(tmp_path):
    made = pool()
    changed = [
        dataclasses.replace(task, content_hash="0" * 64) if task.uid == TRAIN[2] else task for task in made.candidates
    ]
    save_pool(dataclasses.replace(made, candidates=tuple(changed)), tmp_path / "pool.json")
    with pytest.raises(ConfigError, match="1 of 3 tasks are not as they were") as raised:
        load_pool(tmp_path / "pool.json")
    assert f"{TRAIN[2]} has changed" in str(raised.value)


def test_a_change_of_a_task_that_was_not_kept_does_not_matter(tmp_path):
    made = pool()
    changed = (dataclasses.replace(made.candidates[0], content_hash="0" * 64), *made.candidates[1:])
    save_pool(dataclasses.replace(made, candidates=changed), tmp_path / "pool.json")
    assert load_pool(tmp_path / "pool.json").uids == TRAIN[1:4]


def test_tasks_held_out_for_evaluation_are_refused():
    heldout = select_tasks("heldout")[0]
    with pytest.raises(ConfigError, match="1 of 6 tasks are held out"):
        select_pool([*tallies((1, 2, 3, 4, 5)), Tally(heldout, "f", 4, 8)], bands=("hard",), policy=POLICY, seed=0)


def test_an_empty_pool_says_what_there_was():
    with pytest.raises(ConfigError, match=r"none of 5 tasks is in the bands medium; .* are \{'too_hard': 5"):
        pool(passes=(0, 0, 0, 0, 0), bands=("medium",))


def test_a_task_without_a_clean_attempt_is_never_kept():
    made = select_pool(
        [*tallies((4,)), Tally(TRAIN[1], "f", 0, 0, voids=8)], bands=("too_hard", "medium"), policy=POLICY, seed=0
    )
    assert made.uids == TRAIN[:1]
    assert made.candidates[1].band == "unknown"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tasks": [{"uid": "a"}]}'])
def test_what_is_no_pool_file_is_refused(tmp_path, text):
    (tmp_path / "pool.json").write_text(text)
    with pytest.raises(ConfigError, match=r"pool\.json.* a pool.*Make one with `tbx pool`"):
        load_pool(tmp_path / "pool.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.update(trained_on_benchmark="false"), "trained_on_benchmark is 'false', wanted true or"),
        (lambda record: record["tasks"][0].update(kept="false"), "kept 'false'"),
        (lambda record: record["tasks"][0].update(uid=None), "uid None"),
        (lambda record: record["tasks"].append(record["tasks"][0]), "1 tasks are there twice, such as clinic/"),
    ],
)
def test_values_of_another_kind_in_a_pool_are_not_taken_for_true(tmp_path, change, said):
    path = tmp_path / "pool.json"
    save_pool(select_pool(tallies((4,)), bands=("medium",), policy=POLICY, seed=0), path)
    change(record := json.loads(path.read_text()))
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=rf"pool\.json is not a pool file \(.*{said}"):
        load_pool(path)


def test_a_pool_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="Make one with `tbx pool`"):
        load_pool(tmp_path / "pool.json")


def test_the_lock_digest_is_that_of_the_whole_domain():
    assert len(lock_digest("clinic")) == 64
    assert len(load_domain("clinic").lock) == len(load_domain("clinic").uids())
