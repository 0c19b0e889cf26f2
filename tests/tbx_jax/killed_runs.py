"""A program for `test_train.py`: trains in children of this process, some of which kill themselves on the way.

    python killed_runs.py FOLDER

`FOLDER/unbroken` is a run that nothing happened to, `FOLDER/killed` one that SIGKILL ended at each of `MOMENTS` in
turn and that was started again after each. Children are forked from a process that has imported everything and has
not touched a device, so a start costs what training costs.
"""

import os
import pathlib
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import tiny_policy

from tbx_envs.testing.parity_slots import ParitySlots
from tbx_jax import compilation, metrics_log, train

STEPS = 7


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


# What kills each child; steps are counted from where the child starts. Checkpoints are at steps 2, 4, 6 and 7.
MOMENTS = {
    "in the first rollout": lambda: before(ParitySlots, "advance", 1),
    "as the first checkpoint gets its name": lambda: before(os, "rename", 1),
    "one step after a checkpoint": lambda: before(train, "batch_of", 4),
    "in the middle of a line of metrics": lambda: half_a_line(2),
    "in a rollout": lambda: before(ParitySlots, "advance", 4),
    "before the policy is written": lambda: before(train, "save_policy", 1),
}


def train_in_child(policy, output, prepare=lambda: None):
    """The child's exit status: 0, or 9 when it was killed."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    prepare()
    sampling = tiny_policy.SAMPLING.model_copy(update={"slots": 16})
    algo = tiny_policy.ALGO.model_copy(update={"groups_rolled": 2, "groups_per_update": 2})
    config = tiny_policy.train_config(policy, output, steps=STEPS, sampling=sampling, algo=algo)
    compilation.enable_compilation_cache(output.parent / "compiled")
    train.train(config, tiny_policy.PARITY_TASKS, ParitySlots(16))
    os._exit(0)


def main(folder):
    policy = folder / "policy"
    pid = os.fork()
    if not pid:
        tiny_policy.save_tiny(policy)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert train_in_child(policy, folder / "unbroken") == 0
    for moment, prepare in MOMENTS.items():
        status = train_in_child(policy, folder / "killed", prepare)
        print(f"{status}: {moment}", flush=True)
    print(f"{train_in_child(policy, folder / 'killed')}: to the end", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
