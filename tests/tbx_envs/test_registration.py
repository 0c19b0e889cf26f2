import json
import os
import subprocess
import sys

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import tbx_envs
from tbx_envs import domains, registration
from tbx_envs.domains import load_domain
from tbx_envs.env import ToolEnv
from tbx_envs.errors import DomainError
from tbx_envs.registration import env_id, frozen_uids, register_uids, uid_of

IMPORT = """
import json, logging, os, sys, time, warnings
warnings.simplefilter("error")
environ, threads, handlers = dict(os.environ), None, list(logging.getLogger().handlers)
import threading
before = threading.active_count()
import tbx_envs
import gymnasium
print(json.dumps({
    "ids": sum(name.startswith("ThinkingBox/") for name in gymnasium.registry),
    "roots": sorted({name.partition(".")[0] for name in sys.modules}),
    "domains": sorted(name for name in sys.modules if name.startswith("tbx_envs.domains.")),
    "environ": environ == dict(os.environ),
    "handlers": handlers == logging.getLogger().handlers,
    "threads": threading.active_count() - before,
}))
"""


def in_a_new_process(program):
    environ = {name: value for name, value in os.environ.items() if name != "TBX_DATASETS"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout


def test_importing_registers_all_ids_and_does_nothing_else():
    seen = json.loads(in_a_new_process(IMPORT))  # nothing else on stdout, or this fails
    assert seen["ids"] == len(frozen_uids("clinic"))
    assert seen["environ"] and seen["handlers"] and seen["threads"] == 0
    assert seen["domains"] == []
    heavy = {"jax", "jaxlib", "flax", "optax", "torch", "transformers", "mcp", "sqlalchemy", "pydantic", "jsonschema"}
    assert not heavy & set(seen["roots"])


def test_every_frozen_task_has_an_id_and_no_other():
    domain = load_domain("clinic")
    assert registration.BUILT_IN == domains.NAMES
    assert set(frozen_uids("clinic")) == set(domain.uids()) == set(domain.lock)
    registered = {name for name in gymnasium.registry if name.startswith("ThinkingBox/clinic.")}
    assert registered == {env_id(uid) for uid in domain.uids()}
    assert all(uid_of(env_id(uid)) == uid for uid in domain.uids())


def test_make_gives_the_environment_itself():
    uid = frozen_uids("clinic")[0]
    env = gymnasium.make(env_id(uid))
    assert isinstance(env, ToolEnv) and env.task.uid == uid and env.spec.id == env_id(uid)
    assert tbx_envs.make(uid).task.uid == tbx_envs.make(env_id(uid)).task.uid == uid
    assert tbx_envs.make(uid, render_mode="ansi").render_mode == "ansi"


def test_an_unknown_id_is_answered_with_near_names():
    family = frozen_uids("clinic")[0].split("/")[1]
    with pytest.raises(gymnasium.error.NameNotFound, match=rf"Did you mean: `clinic\.{family}\.\d+`"):
        gymnasium.make(f"ThinkingBox/clinic.{family}.9999-v0")
    with pytest.raises(gymnasium.error.NamespaceNotFound, match="ThinkingBox"):
        gymnasium.make(f"ThinkinBox/clinic.{family}.000-v0")
    for unknown in (f"clinic/{family}/9999", f"ThinkingBox/clinic.{family}.9999-v0"):
        with pytest.raises(DomainError, match=rf"{unknown}.*Did you mean 'ThinkingBox/clinic\.{family}"):
            tbx_envs.make(unknown)


def test_ids_of_each_family_pass_gymnasiums_check():
    uids = frozen_uids("clinic")[::6]
    assert {uid.split("/")[1] for uid in uids} == set(load_domain("clinic").families)
    for uid in uids:
        env = gymnasium.make(env_id(uid))
        check_env(env, skip_render_check=True)
        env.close()


def test_one_id_passes_gymnasiums_check_of_rendering_too(capsys):
    check_env(gymnasium.make(env_id(frozen_uids("clinic")[0])))
    assert "user: " in capsys.readouterr().out


def test_registering_costs_the_same_for_each_id(monkeypatch):
    """Linear as a whole: an id is one entry, and nothing looks through the others."""
    entries = {}

    class Registry(dict):
        def __setitem__(self, name, spec):
            entries[name] = spec

        def __iter__(self):
            raise AssertionError("the registry was searched")

        values = keys = items = __iter__

    monkeypatch.setattr(registration, "registry", Registry())
    register_uids(tuple(f"clinic/many/{number:04d}" for number in range(5000)))
    assert len(entries) == 5000
