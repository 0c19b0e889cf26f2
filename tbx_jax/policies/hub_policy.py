"""Policies of the Hugging Face Hub by name: `policy=Qwen/Qwen3-0.6B`, or `org/name@revision`.

`huggingface_hub` downloads the files that a policy consists of into the cache that all programs of the Hub share, and
its variables hold: `HF_HOME` (where the cache is), `HF_HUB_OFFLINE=1` (take what is there, ask nothing), `HF_TOKEN`
(for private and gated repositories), `HF_ENDPOINT` (a mirror). A process keeps to the commit that it met first, so
that a branch that moves in between cannot mix two policies.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re

from tbx_envs.errors import CheckpointError

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>.+))?")
# Configuration, tokenizer, chat template and weights. No folders: other formats and precisions live there.
_FILES = ["*.json", "*.jinja", "*.safetensors", "merges.txt", "tokenizer.model"]
_OTHER_FILES = ["*/*", "consolidated*.safetensors"]  # the latter: all weights once more, in their author's own format


def is_hub_name(policy: str | os.PathLike[str]) -> bool:
    """True for `org/name` and `org/name@revision`, unless that is a path with something at it."""
    return _NAME.fullmatch(os.fspath(policy)) is not None and not os.path.exists(policy)


@functools.cache
def hub_folder(policy: str) -> pathlib.Path:
    """The folder of a repository's files in the Hub's cache, downloaded where they are missing.

    Raises:
        CheckpointError: no such repository or revision, one that needs permission, or files that are neither in the
            cache nor to be had.
    """
    # Imported here: agents without a model of ours need not wait for it.
    from huggingface_hub import constants, errors, snapshot_download

    named = _NAME.fullmatch(policy)
    assert named is not None, f"{policy} is not a name of the Hub: ask is_hub_name first"
    repository, revision = named["repository"], named["revision"]
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES)
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"policy {policy!r}: the repository is gated. Ask for access at {constants.ENDPOINT}/{repository}, then "
            f"log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"policy {policy!r}: there is no such folder, and {constants.ENDPOINT} has no such repository. Give a "
            f"policy's folder or a repository's name; if it is private, log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"policy {policy!r}: {repository} has no revision {revision!r}. Give a branch, a tag or a full commit hash."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        asked = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise CheckpointError(
            f"policy {policy!r}: there is no such folder, the Hub's cache ({constants.HF_HUB_CACHE}) does not have all "
            f"of the repository's files, and {asked}. Download them first where the Hub can be reached (`hf download "
            f"{repository}`), or give a policy's folder."
        ) from error
    # HTTPError is that of the HTTP client, and which one that is depends on the version of huggingface_hub.
    except (errors.HTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"policy {policy!r}: cannot be downloaded: {type(error).__name__}: {error}") from error
    return pathlib.Path(folder)


def hub_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a policy in a folder of the cache, where other programs may have put more of the repository."""
    from huggingface_hub.utils import filter_repo_objects

    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [folder / name for name in filter_repo_objects(names, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES)]
