"""Importing any module of tbx does nothing but define names: checked for each in one fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

# The registry of Gymnasium is the one thing that `import tbx_envs` is there to fill.
PROBE = """
import importlib, json, logging, os, pkgutil, sys, threading, warnings
warnings.simplefilter("ignore")
import tbx_envs, tbx_jax
before = dict(os.environ), list(logging.getLogger().handlers), threading.active_count(), set(os.listdir())
names = []
for package in (tbx_envs, tbx_jax):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.startswith("tbx_envs.thinkingbox.grading.worker."):  # a program of its own
            continue
        importlib.import_module(module.name)
        names.append(module.name)
after = dict(os.environ), list(logging.getLogger().handlers), threading.active_count(), set(os.listdir())
import jax._src.xla_bridge as bridge
report = {
    "modules": len(names),
    "environ": before[0] == after[0],
    "handlers": before[1] == after[1],
    "threads": before[2] == after[2],
    "files": before[3] == after[3],
    "no jax backend": not bridge.backends_are_initialized(),
}
print(json.dumps(report), file=sys.stderr)
"""


def test_importing_every_module_touches_nothing_outside_itself(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path, check=True)
    report = json.loads(done.stderr.strip().splitlines()[-1])
    assert report.pop("modules") > 60
    assert all(report.values()), report
    assert done.stdout == ""
