"""A policy's folder: configuration, weights, tokenizer and chat template."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tbx_jax.models import Model, Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_policy(folder_or_name: str | os.PathLike[str]) -> tuple[Model, Params, PreTrainedTokenizerBase]:
    ...


def save_policy(
    folder: str | os.PathLike[str], model: Model, params: Params, tokenizer: PreTrainedTokenizerBase
) -> None:
    ...
