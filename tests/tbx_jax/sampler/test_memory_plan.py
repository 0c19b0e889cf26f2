"""What a sampler needs, against the arrays that it then makes."""

import jax
import numpy as np
import pytest
from small_model import CONFIG, HYBRID_SIZES, SAMPLING, VOCABULARY, small_model

from tbx_envs.errors import ConfigError
from tbx_jax.config import MeshConfig
from tbx_jax.mesh import build_mesh, shard_tree
from tbx_jax.models import parameter_axes
from tbx_jax.models.cache import cache_axes, empty_cache
from tbx_jax.sampler import memory_plan
from tbx_jax.sampler.memory_plan import device_memory, plan_memory
from tbx_jax.sampler.sampler import Sampler

MODEL, PARAMS = small_model()
RULES = {"b": "fsdp", "d": "fsdp"}


def on_first_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_parameters_and_cache_are_what_one_device_of_a_mesh_holds(dtype):
    mesh = build_mesh(MeshConfig(axes={"fsdp": 2}, rules=RULES))
    sampling = SAMPLING.model_copy(update={"cache_dtype": dtype})
    plan = plan_memory(MODEL, sampling, 120, mesh=mesh, rules=RULES)
    params = shard_tree(PARAMS, parameter_axes(MODEL), mesh, RULES)
    cache = shard_tree(empty_cache(CONFIG, SAMPLING.slots, 120, dtype), cache_axes(CONFIG), mesh, RULES)
    assert plan.parameters == on_first_device(params)
    assert plan.cache == on_first_device(cache)


def test_states_of_a_hybrid_count():
    model, _ = small_model(**HYBRID_SIZES)
    plan = plan_memory(model, SAMPLING, 120, mesh=None, rules={})
    assert plan.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(empty_cache(model.config, SAMPLING.slots, 120)))


def test_too_many_slots_are_refused_with_how_many_would_fit(monkeypatch):
    plan = plan_memory(MODEL, SAMPLING, 224, mesh=None, rules={})
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: plan.total - 1)
    with pytest.raises(ConfigError, match=r"parameters 0.0 MiB, cache 6 slots x 224 tokens .* too much; 5 slots would"):
        Sampler(MODEL, frozenset({1}), SAMPLING, 0)
    Sampler(MODEL, frozenset({1}), SAMPLING.model_copy(update={"slots": 5}), 0)
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: plan.parameters)
    with pytest.raises(ConfigError, match="not even one slot would fit"):
        Sampler(MODEL, frozenset({1}), SAMPLING, 0)


def test_a_device_that_does_not_say_what_it_has_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: None)
    plan = plan_memory(MODEL, SAMPLING.model_copy(update={"slots": 10**9}), 224, mesh=None, rules={})
    plan.refuse_too_much()
    assert plan.slots_that_fit is None
    assert str(plan).endswith("GiB") and " of " not in str(plan)


class Device:
    def __init__(self, platform, stats):
        self.platform, self.memory_stats = platform, lambda: stats


def test_a_device_has_what_it_reports_and_a_cpu_the_memory_of_the_machine():
    assert device_memory(Device("gpu", {"bytes_limit": 123, "bytes_in_use": 5})) == 123
    assert device_memory(Device("gpu", None)) is None
    assert device_memory(Device("cpu", None)) > 2**28


def test_logits_of_every_slot_are_counted():
    one, two = (
        plan_memory(MODEL, SAMPLING.model_copy(update={"slots": slots}), 224, mesh=None, rules={}) for slots in (1, 2)
    )
    assert two.working - one.working == 2 * np.dtype(np.float32).itemsize * VOCABULARY
