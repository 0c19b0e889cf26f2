"""A program for `test_cli.py`: runs `tbx` in children of a process that has imported what its commands need.

Each line of JSON on standard input is a run: `arguments`, the folder `cwd` to run in, and the files `stdout` and
`stderr`. Its exit status is written as a line. A child has Hydra's global state for itself, and starts at once.
"""

import json
import os
import sys
import traceback

import tbx_envs.commands.evaluate
import tbx_envs.commands.hydra_programs
import tbx_envs.evaluation.report  # noqa: F401
from tbx_envs.agents import idle, oracle, scripted  # noqa: F401
from tbx_envs.commands import cli


def run(arguments, cwd, stdout, stderr):
    """The exit status of `tbx` with these arguments."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        os.chdir(cwd)
        for path, number in ((stdout, 1), (stderr, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)
