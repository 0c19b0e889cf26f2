"""A policy on disk: one folder with everything needed to run it, in the layout of the Hugging Face Hub.

    config.json              of a published type (llama, qwen2, qwen3, qwen3_5), or our own `tbx_decoder`
    model.safetensors        a tensor for each layer, named and oriented as in published checkpoints; large ones have
                             numbered parts and an index
    generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja, ...
    tbx_checksums.json       of a folder that tbx wrote: SHA-256 of its other files

Loading is strict: a tensor that is missing, unused or of another shape is an error, and one message lists all of them.
What tbx wrote is loaded only as it was written: its files are compared with their checksums. Other folders have none.
Tensors are read from the file directly into the placement of the mesh rules, so the weights are in memory once. Saving
writes a temporary folder and renames it, so a folder is complete or absent. A saved policy loads bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tbx_envs.chat.chatml import CHAT_TEMPLATES
from tbx_envs.errors import CheckpointError, ConfigError, did_you_mean
from tbx_envs.files import CHECKSUMS, damage, read_object, storing, write_checksums, write_json
from tbx_envs.thinkingbox.dataset.guard import MARK_FILE, mark_policy
from tbx_jax.config import ModelConfig, validated
from tbx_jax.mesh import shardings_of
from tbx_jax.models import Model, Params, abstract, parameter_axes
from tbx_jax.models.hub_config import COMPOSITE_TYPE, hub_type, read_config, write_config
from tbx_jax.models.hub_tensors import COMPOSITE_PREFIX, PREFIX, TIED, Place, flat, nested, places_of
from tbx_jax.policies import smollm2
from tbx_jax.policies.hub_policy import hub_folder, is_hub_name
from tbx_jax.policies.tensor_files import Tensor, TensorFiles, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Precision = Literal["float32", "bfloat16"]

# Policies that come with the package, as folders of `tbx_jax`.
SHIPPED = ("nano",)
# Policies by name: the shipped ones, and one from another package.
NAMED = (*SHIPPED, smollm2.NAME)
MODEL_TYPE = "tbx_decoder"
# Keys that the first folders of our own type do not have, with their defaults.
_LATER_KEYS = {"rope_scaling": None, "qkv_bias": False, "hybrid": None}
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
# Other files that a policy's folder may have, copied unchanged from folder to folder.
_COMPANIONS = frozenset(
    f"""{_GENERATION} tokenizer.json tokenizer_config.json chat_template.jinja special_tokens_map.json added_tokens.json
    vocab.json merges.txt tokenizer.model chat_template.json preprocessor_config.json video_preprocessor_config.json
    processor_config.json""".split()
) | {MARK_FILE}
# Tensors of published hybrids that are not part of the language model: image encoder, draft head. They are not read,
# and are copied when a policy is saved with `like`.
_CARRIED = ("model.visual.", "mtp.")


def load_policy(
    folder_or_name: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, str] | None = None,
    dtype: Precision | None = None,
    param_dtype: Precision | None = "float32",
) -> tuple[Model, Params, PreTrainedTokenizerBase]:
    """A policy from a folder, or by name (`nano`, `smollm2`, `org/name` of the Hugging Face Hub).

    Args:
        folder_or_name: folder or name of the policy.
        mesh, rules: placement of the parameters; None is the default device.
        dtype: type of the computation; None is the type in the policy's configuration.
        param_dtype: type of the parameters in memory; None is as stored, which is enough for sampling.

    Raises:
        CheckpointError: no such policy, files that are missing or inconsistent, or a model that is not implemented.
        ConfigError: parameters that the mesh does not divide.
    """
    model, params = load_model(folder_or_name, mesh=mesh, rules=rules, dtype=dtype, param_dtype=param_dtype)
    tokenizer = load_tokenizer(folder_or_name)
    if len(tokenizer) > model.vocabulary:
        raise CheckpointError(
            f"{folder_or_name}: the tokenizer has {len(tokenizer)} tokens, the model a vocabulary of "
            f"{model.vocabulary}; they belong to different policies, take both from one policy"
        )
    return model, params, tokenizer


def policy_folder(folder_or_name: str | os.PathLike[str]) -> pathlib.Path:
    """The folder of a policy, given as a path or by name; `smollm2` is a single file.

    Raises:
        CheckpointError: no such policy, or one of the Hub that cannot be downloaded.
    """
    if str(folder_or_name) in SHIPPED:
        return pathlib.Path(str(importlib.resources.files("tbx_jax.policies") / str(folder_or_name)))
    if str(folder_or_name) == smollm2.NAME:
        return smollm2.gguf_path()
    from_hub = is_hub_name(folder_or_name)
    folder = hub_folder(os.fspath(folder_or_name)) if from_hub else pathlib.Path(folder_or_name)
    if not (folder / _CONFIG).is_file():
        found = "there is a folder without one" if folder.is_dir() else "there is no such folder"
        found = "the repository has none" if from_hub else found
        raise CheckpointError(
            f"policy {str(folder_or_name)!r}: expected a folder with {_CONFIG}, {found}."
            f"{did_you_mean(str(folder_or_name), NAMED)} Give a policy's folder, or a policy by name: "
            f"{', '.join(NAMED)}, or org/name of the Hugging Face Hub."
        )
    return folder


def load_model(
    folder_or_name: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, str] | None = None,
    dtype: Precision | None = None,
    param_dtype: Precision | None = "float32",
) -> tuple[Model, Params]:
    """Model and parameters of a policy, without its tokenizer; arguments and errors as `load_policy`."""
    folder = policy_folder(folder_or_name)
    source: TensorSource
    if folder.is_file():
        gguf = smollm2.read(folder)
        fields, source = gguf.fields, gguf.tensors
    else:
        _refuse_damage(folder, lambda name: name == _CONFIG or _WEIGHTS.fullmatch(name) is not None)
        fields, source = _read_json(folder / _CONFIG), TensorFiles(folder)
    model, wanted = _model_of(folder, fields, dtype)
    _refuse_other_depth(folder, source, model.config)
    places = places_of(model.config, wanted, _prefix(fields))
    _refuse_misfits(folder, source, places, model.config)
    shardings = None
    if mesh is not None:
        shardings = flat(shardings_of(wanted, parameter_axes(model), mesh, rules or {}))
    return model, _read_params(source, places, wanted, shardings, param_dtype)


def _model_of(folder: pathlib.Path, fields: dict[str, Any], dtype: Precision | None) -> tuple[Model, Params]:
    """The model of a `config.json`, and the shapes of its parameters."""
    try:
        if fields.get("model_type") == MODEL_TYPE:
            own = {key: value for key, value in fields.items() if key not in ("model_type", "vocabulary")}
            own |= {"dtype": dtype} if dtype else {}
            config, vocabulary = validated(ModelConfig, _LATER_KEYS | own), fields["vocabulary"]
        else:
            config, vocabulary = read_config(fields, dtype)
        return abstract(config, vocabulary)
    except (ValueError, KeyError, TypeError, ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{folder / _CONFIG}: {_explained(error)}") from error


def _explained(error: Exception) -> str:
    """The message of one of our own errors; any other error with its type."""
    return str(error) if isinstance(error, (ConfigError, CheckpointError)) else f"{type(error).__name__}: {error}"


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    to_do = "Restore it from where the policy came from."
    return read_object(path, "a file of a policy", to_do=to_do, error=CheckpointError)


def _refuse_damage(folder: pathlib.Path, concerns: Callable[[str], bool]) -> None:
    """Compares the files that `concerns` with their checksums, if the folder has checksums.

    Raises:
        CheckpointError: some are not as they were written; one message lists all of them.
    """
    wrong = damage(folder, concerns)
    if wrong:
        raise CheckpointError(
            f"{folder}: not as it was saved: {'; '.join(wrong)}. Restore the folder from a copy. If it was changed on "
            f"purpose, remove {CHECKSUMS} from it."
        )


def _refuse_other_depth(folder: pathlib.Path, source: TensorSource, config: ModelConfig) -> None:
    """Compares the number of layers with the weight files, before anything is made for each layer."""
    numbers = {found[1] for name in source if (found := _LAYER.search(name))}
    if config.num_layers > len(numbers):
        raise CheckpointError(
            f"{folder / _CONFIG}: the model has {config.num_layers} layers, the weights beside it have "
            f"{len(numbers)}. Take {_CONFIG} and weights from the same policy."
        )


def _prefix(fields: Mapping[str, Any]) -> str:
    return COMPOSITE_PREFIX if fields.get("model_type") == COMPOSITE_TYPE else PREFIX


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by the names of published checkpoints."""

    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> np.ndarray: ...
    def described(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Type and shape, without reading the tensor."""

    def forget(self) -> None:
        """Releases the memory of tensors read so far."""


def _refuse_misfits(
    folder: pathlib.Path, source: TensorSource, places: Mapping[str, Place], config: ModelConfig
) -> None:
    """Raises CheckpointError for all tensors that are missing, unused or misshapen, in one message."""
    missing = [name for name in places if name not in source]
    unused = [name for name in source if name not in places and not _is_carried(name, config)]
    if TIED in unused and _is_tied_copy(source, places):
        unused.remove(TIED)
    misfits = []
    for name, place in places.items():
        if name in source:
            dtype, shape = source.described(name)
            if shape != place.stored_shape or not jnp.issubdtype(dtype, jnp.floating):
                misfits.append(f"{name}: file has {dtype} {shape}, model wants {place.stored_shape}")
    if missing or unused or misfits:
        counts = [
            f"{len(misfits)} of {len(places)} tensors do not fit",
            f"{len(missing)} missing: {', '.join(missing)}" if missing else "none missing",
            f"{len(unused)} unused: {', '.join(unused)}" if unused else "none unused",
        ]
        raise CheckpointError(
            f"{folder}: {'; '.join([*misfits, *counts])}. Take {_CONFIG} and weights from the same policy."
        )


def _is_carried(name: str, config: ModelConfig) -> bool:
    return config.hybrid is not None and name.startswith(_CARRIED)


def _is_tied_copy(source: TensorSource, places: Mapping[str, Place]) -> bool:
    """True when the checkpoint of a tied model stores its embedding twice, as some published ones do."""
    embedding = next(name for name, place in places.items() if place.path == ("embedding",))
    if embedding not in source or source.described(TIED) != source.described(embedding):
        return False
    same = np.array_equal(_bits(source[TIED]), _bits(source[embedding]))
    source.forget()
    return same


def _bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _read_params(
    source: TensorSource,
    places: Mapping[str, Place],
    wanted: Params,
    shardings: Mapping[tuple[str, ...], jax.sharding.Sharding] | None,
    param_dtype: Precision | None,
) -> Params:
    """The parameters, read one at a time and each shard separately."""
    by_path: dict[tuple[str, ...], dict[tuple[int, ...], tuple[str, Place]]] = {}
    for name, place in places.items():
        by_path.setdefault(place.path, {})[place.index] = name, place
    params: dict[tuple[str, ...], jax.Array] = {}
    for path, leaf in flat(wanted).items():
        parts = by_path[path]
        stored = (source.described(name)[0] for name, _ in parts.values())
        dtype = jnp.dtype(param_dtype) if param_dtype else jnp.result_type(*stored)
        read = functools.partial(_read_part, source, parts, leaf.shape, dtype)
        if shardings is None:
            params[path] = jax.device_put(read(tuple(slice(None) for _ in leaf.shape)))
        else:
            params[path] = jax.make_array_from_callback(leaf.shape, shardings[path], read)
        params[path].block_until_ready()
        source.forget()
    return nested(params)


def _read_part(
    source: TensorSource,
    parts: Mapping[tuple[int, ...], tuple[str, Place]],
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """The part of a parameter at `index`, from the tensors of its layers."""
    assert index is not None  # None is for arrays that other processes hold, and there is one process
    ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
    array = np.empty([len(part) for part in ranges], dtype)
    for layer, (name, place) in parts.items():
        if all(at in part for at, part in zip(layer, ranges, strict=False)):
            at = tuple(at - part.start for at, part in zip(layer, ranges, strict=False))
            array[at] = place.to_natural(source[name])[index[len(layer) :]]
    return array


def load_tokenizer(folder_or_name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy, with its chat template.

    Raises:
        CheckpointError: no such policy, or files that are missing or broken.
    """
    folder = policy_folder(folder_or_name)
    transformers = _import_transformers()
    if folder.is_file():
        return smollm2.build_tokenizer(smollm2.read(folder), transformers)
    _refuse_damage(folder, lambda name: name != _CONFIG and not _WEIGHTS.fullmatch(name))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(os.fspath(folder), local_files_only=True)
    except Exception as error:  # tokenizers raises a bare Exception, transformers whatever a wrong value leads to
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}. Restore its files from where "
            f"the policy came from."
        ) from error


def _import_transformers() -> Any:
    """transformers, without its log message that torch is not installed: nothing here needs torch."""
    torch_remark = lambda record: "PyTorch was not found" not in record.getMessage()  # noqa: E731
    logger = logging.getLogger("transformers")
    logger.addFilter(torch_remark)
    try:
        import transformers
    finally:
        logger.removeFilter(torch_remark)
    return transformers


def export_policy(
    policy: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: Precision | None,
    chat_template: Literal["tools", "compact"] | None = None,
) -> pathlib.Path:
    """Writes a policy as a folder that other programs can load: `tbx export`.

    Configuration, tokenizer and the other files of the policy's folder are copied unchanged.

    Args:
        policy: folder or name of the policy.
        folder: folder to write; an existing policy is replaced.
        dtype: type of the tensors; None copies them byte for byte.
        chat_template: template of `tbx_envs.chat.chatml` that replaces the policy's own; None keeps it.

    Raises:
        CheckpointError: a policy of our own type, which no other program can run; or as `load_policy`, `save_policy`.
    """
    model, params, tokenizer = load_policy(policy, param_dtype=None)
    if hub_type(model.config) is None:
        raise CheckpointError(
            f"policy {str(policy)!r} has parts that no published model type has (token shift), so other programs "
            f"cannot run it. Export policies of type llama, qwen2, qwen3 or qwen3_5."
        )
    if chat_template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[chat_template]
    save_policy(folder, model, params, tokenizer, like=policy, dtype=dtype)
    return pathlib.Path(folder)


def save_policy(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: Precision | None = "float32",
    marked: bool = False,
) -> None:
    """Writes a policy's folder; an existing policy is replaced as a whole.

    Args:
        folder: folder to write.
        model, params, tokenizer: parts of the policy.
        like: policy that it was trained from. Everything that this package does not read is copied from it: keys of
            `config.json`, files of tokenizer and generation, tensors of an image encoder. Only the chat template is the
            tokenizer's.
        dtype: type of the tensors; None is the type of each tensor in `like`, float32 without `like`.
        marked: True when the policy was trained on tasks of the benchmark (`tbx_envs.thinkingbox.dataset.guard`).

    Raises:
        CheckpointError: parameters that do not fit the model, a model other than that of `like`, or a folder with other
            files.
        StorageError: it cannot be written.
    """
    folder = pathlib.Path(folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(name for name in names - _COMPANIONS - {_CONFIG, CHECKSUMS} if not _WEIGHTS.fullmatch(name))
    if others:
        raise CheckpointError(
            f"{folder}: not saved, since replacing the folder would delete {', '.join(others)}; give a folder for the "
            f"policy alone"
        )
    origin = policy_folder(like) if like is not None else None
    origin = origin if origin is not None and origin.is_dir() else None
    fields = _config_to_write(model, origin, dtype)
    tensors = _tensors_to_write(model, params, _prefix(fields), origin, dtype)
    with storing(folder, "a policy that was there is as it was"), _scratch_beside(folder) as scratch:
        written = scratch / "new"
        written.mkdir()
        write_json(written / _CONFIG, fields)
        write_tensors(written, tensors)
        if origin is None:
            _write_companions(written, model, tokenizer)
        else:
            for name in sorted(_COMPANIONS & {path.name for path in origin.iterdir()}):
                shutil.copyfile(origin / name, written / name)
            _keep_template(written, origin, tokenizer)
        if marked:
            mark_policy(written)
        write_checksums(written)
        if folder.exists():
            folder.rename(scratch / "old")
        try:
            written.rename(folder)
        except OSError:
            (scratch / "old").rename(folder)
            raise


@contextlib.contextmanager
def _scratch_beside(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder for what is half written, on the same disk, removed at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def _config_to_write(model: Model, origin: pathlib.Path | None, dtype: Precision | None) -> dict[str, Any]:
    """`config.json`: that of the origin with the type of the computation, or a new one."""
    if origin is not None and (fields := _read_json(origin / _CONFIG)).get("model_type") != MODEL_TYPE:
        if (there := _model_of(origin, fields, model.config.dtype)[0]) != model:
            raise CheckpointError(
                f"the model is {model.config} with a vocabulary of {model.vocabulary}, that of {origin} is "
                f"{there.config} with {there.vocabulary}; name the policy that the model came from, or none."
            )
        return fields if dtype is None else _with_dtype(fields, _named_dtype(model, dtype))
    if hub_type(model.config) is not None:
        return write_config(model.config, model.vocabulary, _named_dtype(model, dtype))
    return {"model_type": MODEL_TYPE, "vocabulary": model.vocabulary, **model.config.model_dump()}


def _named_dtype(model: Model, dtype: Precision | None) -> str:
    """The type in `config.json`: bfloat16 for tensors in bfloat16, else the model's compute type."""
    return "bfloat16" if dtype == "bfloat16" else model.config.dtype


def _with_dtype(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields with this type, also in the language model's part of a composite."""
    changed = {key: _with_dtype(value, dtype) if key == "text_config" else value for key, value in fields.items()}
    keys = {"dtype", "torch_dtype"} & set(changed)
    if not keys and "text_config" not in changed:
        keys = {"dtype", "torch_dtype"}
    return changed | dict.fromkeys(keys, dtype)


def _tensors_to_write(
    model: Model, params: Params, prefix: str, origin: pathlib.Path | None, dtype: Precision | None
) -> list[Tensor]:
    """All tensors of the folder; their arrays are fetched when they are written."""
    _refuse_foreign(model, params)
    arrays = flat(params)
    before = TensorFiles(origin) if origin is not None else None

    def dtype_of(name: str) -> np.dtype:
        if dtype is None and before is not None:
            return before.described(name)[0]
        return jnp.dtype(dtype or "float32")

    def tensor(name: str, place: Place) -> Tensor:
        return Tensor(
            name,
            place.stored_shape,
            dtype_of(name),
            lambda: place.to_stored(np.asarray(arrays[place.path][place.index] if place.index else arrays[place.path])),
        )

    places = places_of(model.config, params, prefix)
    tensors = [tensor(name, place) for name, place in places.items()]
    if before is not None:
        if TIED in before and TIED not in places:
            tensors.append(tensor(TIED, next(place for place in places.values() if place.path == ("embedding",))))
        tensors += [
            Tensor(name, shape, stored, functools.partial(before.__getitem__, name))
            for name in before
            if _is_carried(name, model.config)
            for stored, shape in [before.described(name)]
        ]
    return tensors


def _refuse_foreign(model: Model, params: Params) -> None:
    wanted, given = flat(abstract(model.config, model.vocabulary)[1]), flat(params)
    problems = [
        f"{'.'.join(path)}: given {np.shape(given[path]) if path in given else 'nothing'}, "
        f"model wants {wanted[path].shape if path in wanted else 'nothing'}"
        for path in {**wanted, **given}
        if path not in given or path not in wanted or np.shape(given[path]) != wanted[path].shape
    ]
    if problems:
        raise CheckpointError(
            f"the parameters do not fit the model: {'; '.join(problems)}. Save a model with its own parameters."
        )


def model_tensors(model: Model, params: Params) -> dict[str, np.ndarray]:
    """The parameters as the float32 tensors of a file.

    Raises:
        CheckpointError: parameters that do not fit the model.
    """
    tensors: Sequence[Tensor] = _tensors_to_write(model, params, PREFIX, None, "float32")
    return {tensor.name: np.ascontiguousarray(tensor.array(), tensor.dtype) for tensor in tensors}


def _write_companions(folder: pathlib.Path, model: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer's files; for published types also the files that inference servers read."""
    tokenizer.save_pretrained(folder)
    if hub_type(model.config) is None:
        return
    settings = _read_json(folder / "tokenizer_config.json")
    # The class name that transformers 4 knows as well.
    write_json(folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / _GENERATION, {key: value for key, value in ids.items() if value is not None})


def _keep_template(folder: pathlib.Path, origin: pathlib.Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's chat template into the copied files, if they have another."""
    if tokenizer.chat_template == load_tokenizer(origin).chat_template:
        return
    (folder / "chat_template.json").unlink(missing_ok=True)  # other programs might read it instead
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    settings = _read_json(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        write_json(folder / "tokenizer_config.json", settings)
