"""Prints the lowest version that setup.cfg allows of each library, as constraints for pip: `make test-lowest`.

    python tests/lowest_versions.py EXTRA... > lowest.txt && pip install --constraint lowest.txt '.[EXTRA]'

pip, and not another resolver: an installation in which the lowest versions do not go together should fail here.
"""

from __future__ import annotations

import configparser
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]+\])?(?P<bounds>[^;#]*)")


def lowest(extras: Sequence[str]) -> dict[str, str]:
    """Library -> lowest version, of the installation with these extras; without one that has no lower bound."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    of_extras = parser["options.extras_require"]
    text = "\n".join([parser["options"]["install_requires"], *(of_extras[extra] for extra in extras)])
    return dict(_bounds(text))


def _bounds(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        requirement = _REQUIREMENT.match(line.strip())
        bound = requirement and re.search(r"[>=]=\s*([\w.]+)", requirement["bounds"])
        if requirement and bound:
            yield requirement["name"].lower(), bound[1]


if __name__ == "__main__":
    for name, version in sorted(lowest(sys.argv[1:]).items()):
        print(f"{name}=={version}")
