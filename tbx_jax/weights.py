"""A policy on disk: one folder with everything that is needed to run it, in the layout of the Hugging Face Hub.

    config.json              the model's configuration, `vocabulary` and `model_type`
    model.safetensors        float32 tensors, one per layer, named and oriented as in published Qwen3 checkpoints
    tokenizer.json, tokenizer_config.json, chat_template.jinja

Loading is strict both ways: a tensor that is missing, unused or of another shape is an error, and one message lists
all of them. Saving writes beside the folder first and renames, so a folder is whole or not there. What was saved is
loaded bit for bit.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import logging
import math
import os
import pathlib
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from tbx_envs.errors import CheckpointError, ConfigError, did_you_mean
from tbx_jax.config import ModelConfig, validated
from tbx_jax.models import Model, Params, abstract

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Policies that come with the package, as folders of `tbx_jax`.
SHIPPED = ("nano",)
MODEL_TYPE = "tbx_decoder"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
# All that a policy's folder may hold; saving replaces a folder only if it has nothing else.
_FILES = {
    _CONFIG,
    _WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
}

# Our parameter -> name in the file, and how many of its axes (without layers) are inputs. A projection is stored as
# (outputs, inputs) with its axes flattened; None is a tensor that is stored as it is.
_NAMES: dict[tuple[str, ...], tuple[str, int | None]] = {
    ("embedding",): ("model.embed_tokens.weight", None),
    ("token_shift",): ("model.token_shift.weight", None),
    ("layers", "attention_norm"): ("model.layers.{}.input_layernorm.weight", None),
    ("layers", "query"): ("model.layers.{}.self_attn.q_proj.weight", 1),
    ("layers", "key"): ("model.layers.{}.self_attn.k_proj.weight", 1),
    ("layers", "value"): ("model.layers.{}.self_attn.v_proj.weight", 1),
    ("layers", "out"): ("model.layers.{}.self_attn.o_proj.weight", 2),
    ("layers", "query_norm"): ("model.layers.{}.self_attn.q_norm.weight", None),
    ("layers", "key_norm"): ("model.layers.{}.self_attn.k_norm.weight", None),
    ("layers", "mlp_norm"): ("model.layers.{}.post_attention_layernorm.weight", None),
    ("layers", "gate"): ("model.layers.{}.mlp.gate_proj.weight", 1),
    ("layers", "up"): ("model.layers.{}.mlp.up_proj.weight", 1),
    ("layers", "down"): ("model.layers.{}.mlp.down_proj.weight", 1),
    ("norm",): ("model.norm.weight", None),
    ("unembedding",): ("lm_head.weight", None),
}


def load_policy(folder_or_name: str | os.PathLike[str]) -> tuple[Model, Params, PreTrainedTokenizerBase]:
    """A policy from a folder, or the shipped one of that name (`nano`).

    Parameters lie on the default device; `tbx_jax.mesh.shard_tree` spreads them over a mesh.

    Raises:
        CheckpointError: no such policy, or files that are missing or do not fit together.
    """
    folder = policy_folder(folder_or_name)
    model, params = load_model(folder)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > model.vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model a vocabulary of {model.vocabulary}; "
            f"they belong to different policies, take both files from one"
        )
    return model, params, tokenizer


def policy_folder(folder_or_name: str | os.PathLike[str]) -> pathlib.Path:
    """The folder of a policy, given as a path or as the name of a shipped one.

    Raises:
        CheckpointError: neither.
    """
    if str(folder_or_name) in SHIPPED:
        return pathlib.Path(str(importlib.resources.files("tbx_jax") / str(folder_or_name)))
    folder = pathlib.Path(folder_or_name)
    if not (folder / _CONFIG).is_file():
        found = "there is a folder without one" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(
            f"policy {str(folder_or_name)!r}: wanted a folder with {_CONFIG}, {found}."
            f"{did_you_mean(str(folder_or_name), SHIPPED)} Give a policy's folder, or a shipped policy: "
            f"{', '.join(SHIPPED)}."
        )
    return folder


def load_model(folder: str | os.PathLike[str]) -> tuple[Model, Params]:
    """Model and parameters of a policy's folder, without its tokenizer.

    Raises:
        CheckpointError: files that are missing or do not fit together.
    """
    folder = pathlib.Path(folder)
    try:
        fields = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        model_type, vocabulary = fields.pop("model_type"), fields.pop("vocabulary")
        if model_type != MODEL_TYPE:
            raise CheckpointError(f"{folder / _CONFIG}: model_type is {model_type!r}, this loads {MODEL_TYPE!r} only")
        model, wanted = abstract(validated(ModelConfig, fields), vocabulary)
        tensors = safetensors.numpy.load_file(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError, ConfigError) as error:
        raise CheckpointError(
            f"{folder}: the policy's files cannot be read: {type(error).__name__}: {error}"
        ) from error
    return model, _params_from(tensors, wanted, folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy's folder, with its chat template.

    Raises:
        CheckpointError: files that are missing or broken.
    """
    transformers = _import_transformers()
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _import_transformers() -> Any:
    """transformers, without its remark that torch is not installed: nothing here wants torch."""
    torch_remark = lambda record: "PyTorch was not found" not in record.getMessage()  # noqa: E731
    logger = logging.getLogger("transformers")
    logger.addFilter(torch_remark)
    try:
        import transformers
    finally:
        logger.removeFilter(torch_remark)
    return transformers


def save_policy(
    folder: str | os.PathLike[str], model: Model, params: Params, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes a policy's folder; a policy that is there is replaced as a whole.

    Raises:
        CheckpointError: parameters that are not those of the model, or a folder that has other files too.
    """
    folder = pathlib.Path(folder)
    others = sorted({path.name for path in folder.iterdir()} - _FILES) if folder.is_dir() else []
    if others:
        raise CheckpointError(
            f"{folder}: not saved, replacing the folder would delete {', '.join(others)}; give a folder for the "
            f"policy alone"
        )
    tensors = model_tensors(model, params)
    fields = {"model_type": MODEL_TYPE, "vocabulary": model.vocabulary, **model.config.model_dump()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        written = scratch / "new"
        written.mkdir()
        (written / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, written / _WEIGHTS)
        tokenizer.save_pretrained(written)
        if folder.exists():
            folder.rename(scratch / "old")
        written.rename(folder)
    finally:
        shutil.rmtree(scratch)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor of the file lives in the parameters.

    Attributes:
        path: of the parameter.
        layer: which part of it; None is all.
        shape: of the tensor in the file.
        natural: shape of that part in the parameter.
    """

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    natural: tuple[int, ...]
    is_projection: bool


def _places(wanted: Params) -> dict[str, _Place]:
    """Name in the file -> place, for every tensor that parameters of these shapes have."""
    places = {}
    for path, shape in _flat(jax.tree.map(np.shape, wanted, is_leaf=lambda leaf: hasattr(leaf, "shape"))).items():
        name, num_inputs = _NAMES[path]
        stacked = path[0] == "layers"
        natural = shape[1:] if stacked else shape
        stored = natural
        if num_inputs is not None:
            stored = (math.prod(natural[num_inputs:]), math.prod(natural[:num_inputs]))
        for layer in range(shape[0]) if stacked else [None]:
            places[name.format(layer)] = _Place(path, layer, stored, natural, num_inputs is not None)
    return places


def _flat(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested dictionaries as one dictionary with paths as keys."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in _flat(branch, (*path, name)).items()}


def model_tensors(model: Model, params: Params) -> dict[str, np.ndarray]:
    """The parameters as the tensors of a file.

    Raises:
        CheckpointError: parameters that are not those of the model.
    """
    wanted = _flat(abstract(model.config, model.vocabulary)[1])
    given = _flat(jax.device_get(params))
    problems = [
        f"{'.'.join(path)}: given {np.shape(given[path]) if path in given else 'nothing'}, "
        f"model wants {wanted[path].shape if path in wanted else 'nothing'}"
        for path in {**wanted, **given}
        if path not in given or path not in wanted or np.shape(given[path]) != wanted[path].shape
    ]
    if problems:
        raise CheckpointError(
            f"the parameters are not the model's: {'; '.join(problems)}. Save a model with its own parameters."
        )
    tensors = {}
    for name, place in _places(params).items():
        part = given[place.path] if place.layer is None else given[place.path][place.layer]
        part = np.asarray(part, np.float32)
        if place.is_projection:
            part = part.reshape(place.shape[::-1]).T
        tensors[name] = np.ascontiguousarray(part)
    return tensors


def _params_from(tensors: dict[str, np.ndarray], wanted: Params, folder: pathlib.Path) -> Params:
    """The tensors of a file as parameters.

    Raises:
        CheckpointError: all tensors that are missing, unused or misshapen, in one message.
    """
    places = _places(wanted)
    missing = [name for name in places if name not in tensors]
    unused = [name for name in tensors if name not in places]
    misfits = [
        f"{name}: file has {tensors[name].dtype} {tensors[name].shape}, model wants float32 {place.shape}"
        for name, place in places.items()
        if name in tensors and (tensors[name].shape != place.shape or tensors[name].dtype != np.float32)
    ]
    if missing or unused or misfits:
        counts = [
            f"{len(misfits)} of {len(places)} tensors do not fit",
            f"{len(missing)} missing: {', '.join(missing)}" if missing else "none is missing",
            f"{len(unused)} unused: {', '.join(unused)}" if unused else "none is unused",
        ]
        raise CheckpointError(
            f"{folder / _WEIGHTS}: {'; '.join([*misfits, *counts])}. "
            f"Take {_CONFIG} and {_WEIGHTS} from the same policy."
        )
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), wanted)
    arrays = _flat(params)
    for name, place in places.items():
        part = tensors[name]
        if place.is_projection:
            part = part.T.reshape(place.natural)
        arrays[place.path][... if place.layer is None else place.layer] = part
    return jax.device_put(params)
