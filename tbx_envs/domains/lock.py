"""Lock files: the hash of each frozen task when its domain's version was set.

    version 1
    clinic/cancel_visit/000 9b1f...

A task's hash changes with everything that could change an outcome: the task itself, the rules, the texts of the tools
and of the user, the answers to the expected calls and the rows that they leave.
`python -m tbx_envs.testing.domain_contract lock <domain>` writes the file; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from tbx_envs.domains import Domain
from tbx_envs.errors import DomainError

FILE_NAME = "tasks.lock"


def parse_lock(text: str, *, where: str) -> tuple[int, dict[str, str]]:
    """The version and the hashes (uid -> SHA-256) of a lock file; version 0 for an empty one.

    Args:
        text: content of the file.
        where: name of the file, for the message.

    Raises:
        DomainError: a line has neither form.
    """
    version, hashes = 0, {}
    for number, line in enumerate(text.splitlines(), start=1):
        match line.split():
            case ["version", digits] if digits.isdigit() and number == 1:
                version = int(digits)
            case [uid, sha256]:
                hashes[uid] = sha256
            case _:
                raise DomainError(
                    f"{where} line {number}: {line!r} is neither 'version <number>' (first line) nor "
                    f"'<uid> <sha256>'. Run python -m tbx_envs.testing.domain_contract lock <domain>."
                )
    return version, hashes


def read_lock(domain_name: str) -> tuple[int, dict[str, str]]:
    """Version and hashes of a built-in domain's lock file; (0, {}) when the domain has none yet."""
    file = resources.files(f"tbx_envs.domains.{domain_name}") / FILE_NAME
    if not file.is_file():
        return 0, {}
    return parse_lock(file.read_text(encoding="utf-8"), where=f"{domain_name}/{FILE_NAME}")


def lock_text(domain: Domain, hashes: Mapping[str, str]) -> str:
    """The text of a lock file."""
    return "".join([f"version {domain.version}\n", *(f"{uid} {sha256}\n" for uid, sha256 in hashes.items())])
