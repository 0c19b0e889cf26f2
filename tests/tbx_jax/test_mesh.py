"""Rules that send axis letters to mesh axes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tbx_envs.errors import ConfigError
from tbx_jax.config import MeshConfig
from tbx_jax.mesh import build_mesh, partition_spec, shard_tree
from tbx_jax.shapes import LOGICAL_AXES


def test_an_axis_goes_where_its_letter_is_sent():
    assert partition_spec("d n h", {"b": "data", "d": "fsdp", "n": "tensor"}) == PartitionSpec("fsdp", "tensor", None)
    assert partition_spec("", {"d": "fsdp"}) == PartitionSpec()


def test_an_array_is_split_over_a_mesh_axis_once():
    with pytest.raises(ValueError, match="axes 'f v' put f and v on mesh axis 'tensor'; an array can be split over"):
        partition_spec("f v", {"f": "tensor", "v": "tensor"})


def test_a_letter_outside_the_alphabet_is_refused():
    with pytest.raises(ValueError, match="axes 'd z' use unknown logical axes 'z'; known: p g b t"):
        partition_spec("d z", {})
    with pytest.raises(ValueError, match="write letters apart"):
        partition_spec("dn", {})


def test_letters_are_single_and_lower_case():
    assert all(len(letter) == 1 and letter.islower() for letter in LOGICAL_AXES)


def test_all_problems_of_a_mesh_come_in_one_message():
    config = MeshConfig(axes={"fsdp": 16}, rules={"z": "fsdp", "d": "fsdpp"})
    with pytest.raises(ConfigError) as error:
        build_mesh(config)
    message = str(error.value)
    assert "rule z: unknown logical axis" in message
    assert "rule d: fsdpp: no such mesh axis. Did you mean 'fsdp'?" in message
    assert "axes fsdp=16 need 16 devices, there are 8 (cpu)" in message


def test_a_mesh_smaller_than_the_machine_takes_the_first_devices():
    mesh = build_mesh(MeshConfig(axes={"data": 2, "tensor": 2}, rules={}))
    assert mesh.devices.tolist() == np.array(jax.devices()[:4]).reshape(2, 2).tolist()


def test_arrays_are_placed_by_their_letters():
    rules = {"d": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 4}, rules=rules))
    tree = {"a": np.arange(24.0).reshape(8, 3), "b": np.arange(3.0)}
    placed = shard_tree(tree, {"a": "d h", "b": "h"}, mesh, rules)
    for shard in placed["a"].addressable_shards:
        np.testing.assert_array_equal(shard.data, tree["a"][shard.index])
    assert {shard.data.shape for shard in placed["a"].addressable_shards} == {(2, 3)}
    assert placed["b"].sharding.is_fully_replicated


def test_dimensions_that_do_not_divide_are_all_named():
    rules = {"d": "fsdp", "v": "fsdp"}
    mesh = build_mesh(MeshConfig(axes={"fsdp": 4}, rules=rules))
    tree = {"layers": {"up": np.zeros((2, 6, 5))}, "norm": np.zeros(7), "embedding": np.zeros((8, 8))}
    letters = {"layers": {"up": "l d f"}, "norm": "d", "embedding": "v d"}
    with pytest.raises(ConfigError) as error:
        shard_tree(tree, letters, mesh, rules)
    message = str(error.value)
    assert "layers.up: d is 6, mesh axis fsdp has 4 devices" in message
    assert "norm: d is 7" in message
    assert "embedding: axes 'v d' put v and d on mesh axis 'fsdp'" in message


def test_axes_that_are_not_the_arrays_are_refused():
    mesh = build_mesh(MeshConfig(axes={"fsdp": 2}, rules={}))
    with pytest.raises(ConfigError, match=r"axes 'd f' for an array of shape \(3,\)"):
        shard_tree(np.zeros(3), "d f", mesh, {})
