"""Claims about bits and close figures, in code that XLA compiles as users have it.

The suite itself compiles quickly (`tests/conftest.py`), and how code is optimized decides in which order numbers are
added.
"""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ONLY_PLUGIN = ("--disable-plugin-autoload", "-p", "jaxtyping._pytest_plugin")


def test_what_is_marked_optimized_holds_in_optimized_code():
    # Only the files that have such tests: importing one builds its models.
    files = [path for path in HERE.rglob("test_*.py") if "@pytest.mark." + "optimized\n" in path.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "optimized", "-p", "no:cacheprovider", *ONLY_PLUGIN, *files],
        cwd=HERE.parents[1],
        env={**os.environ, "TBX_TEST_XLA": "full", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"^(\d+) passed, \d+ deselected in ", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and passed and int(passed[1]) >= len(files) > 0, done.stdout + done.stderr
