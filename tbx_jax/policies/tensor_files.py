"""Safetensors files: memory-mapped for reading, written one tensor at a time; neither copies all weights.

Only accessed tensors are read, and `TensorFiles.forget` releases their pages. A folder has one `model.safetensors`, or
numbered parts with an index.

Format: https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from huggingface_hub import split_state_dict_into_shards_factory

from tbx_envs.errors import CheckpointError
from tbx_envs.files import parsed_json, read_object, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Hub convention: parts of at most 5 GB.
PART_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: name in the file.
        shape: shape of the array.
        dtype: type in the file; the array is cast.
        array: function that makes the array when it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    array: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class TensorFiles:
    """The tensors of a folder, as views of its files.

    Args:
        folder: folder with one file, or with parts and their index.

    Raises:
        CheckpointError: files that are missing or broken, or an index with other tensors than its files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._maps: list[mmap.mmap] = []
        index = folder / INDEX
        listed = _weight_map(index) if index.is_file() and not (folder / SINGLE).is_file() else None
        for name in [SINGLE] if listed is None else sorted(set(listed.values())):
            self._add(folder / name)
        if listed is not None and set(listed) != set(self._arrays):
            odd = sorted(set(listed) ^ set(self._arrays))
            raise CheckpointError(f"{index}: {len(odd)} tensors are only in it or only in its files: {', '.join(odd)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> np.ndarray:
        """A read-only view of the memory-mapped file."""
        return self._arrays[name]

    def described(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Type and shape, without reading the tensor."""
        return self._arrays[name].dtype, self._arrays[name].shape

    def forget(self) -> None:
        """Releases the memory of tensors read so far; they are read again at their next access."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _add(self, path: pathlib.Path) -> None:
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass  # checks the header against the file's length
            with open(path, "rb") as file:
                header = parsed_json(file.read(int.from_bytes(file.read(8), "little")))
                start = file.tell()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        header.pop("__metadata__", None)
        unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
        if unknown:
            raise CheckpointError(f"{path}: tensors of type {', '.join(unknown)}; known: {', '.join(DTYPES)}")
        self._maps.append(mapped)
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            dtype = DTYPES[entry["dtype"]]
            whole = np.frombuffer(mapped, dtype, (end - begin) // dtype.itemsize, begin)
            self._arrays[name] = whole.reshape(entry["shape"])


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """Tensor -> name of its file, which is beside the index."""
    to_do = "Restore it from where the policy came from."
    listed = read_object(index, "an index of weights", to_do=to_do, error=CheckpointError).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: its weight_map is {listed!r}, wanted tensors and their files. {to_do}")
    for tensor, name in listed.items():
        # Anything else could name a file outside of the folder.
        if not isinstance(name, str) or pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {tensor} is in {name!r}, wanted the name of a .safetensors file beside it. {to_do}"
            )
    return listed


def write_tensors(folder: pathlib.Path, tensors: Sequence[Tensor]) -> None:
    """Writes one file, or parts of up to `PART_BYTES` and their index."""
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=PART_BYTES,
    )
    for file_name, names in split.filename_to_tensors.items():
        _write_part(folder / file_name, [by_name[name] for name in names])
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def _write_part(path: pathlib.Path, tensors: Iterable[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    # Widest types first, so that every tensor is aligned to its own width.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    offset = 0
    for tensor in ordered:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered:
            array = np.ascontiguousarray(tensor.array(), dtype=tensor.dtype)
            assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
            file.write(array.view(np.uint8).data if array.ndim else array.tobytes())
        file.flush()
        os.fsync(file.fileno())
