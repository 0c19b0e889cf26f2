"""A program for `test_train.py`: trains in children of this process, some of which kill themselves on the way.

    python killed_runs.py POLICY FOLDER

`FOLDER` gets a run that SIGKILL ended at each of `MOMENTS` in turn and that was started again after each. Children are
forked from a process that has imported everything and has not touched a device, so a start costs what training costs.
"""

import os
import pathlib
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import tiny_policy

from tbx_envs.testing.parity_slots import ParitySlots
from tbx_jax import compilation, metrics_log, train


def before(owner, name, count):
    """Die as `owner.name` is called for the `count`-th time."""
    original, calls = getattr(owner, name), [0]

    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def half_a_line(count):
    """Die after writing half of a line of metrics."""
    original, calls = metrics_log.MetricsLog.write, [0]

    def dying(self, row):
        calls[0] += 1
        if calls[0] < count:
            return original(self, row)
        with self._path.open("a") as file:
            file.write('{"step": ')
        return os.kill(os.getpid(), signal.SIGKILL)

    metrics_log.MetricsLog.write = dying


# What kills each child; steps are counted from where the child starts. Checkpoints are at steps 2, 4 and 6.
MOMENTS = {
    "in the first rollout": lambda: before(ParitySlots, "advance", 1),
    "as the first checkpoint gets its name": lambda: before(os, "rename", 1),
    "one step after a checkpoint": lambda: before(train, "batch_of", 4),
    "in the middle of a line of metrics": lambda: half_a_line(2),
    "before the policy is written": lambda: before(train, "save_policy", 1),
}


def train_in_child(policy, output, prepare=lambda: None):
    """The child's exit status: 0, or 9 when it was killed."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    prepare()
    compilation.enable_compilation_cache(output.parent / "compiled")
    train.train(tiny_policy.train_config(policy, output), tiny_policy.PARITY_TASKS, ParitySlots(32))
    os._exit(0)


def main(policy, folder):
    for moment, prepare in MOMENTS.items():
        print(f"{train_in_child(policy, folder, prepare)}: {moment}", flush=True)
    print(f"{train_in_child(policy, folder)}: to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
