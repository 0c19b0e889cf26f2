"""Ctrl-C while a served model is silent, in programs of their own."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from tbx_envs.testing.loopback_endpoint import LoopbackEndpoint, Silence

BIKESHOP = pathlib.Path(__file__).parents[1] / "data" / "bikeshop"
# Interrupts count, whatever this process inherited, as in a terminal.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tbx_envs.commands.cli import main
sys.exit(main())
"""
RUNS = {
    "agent": ["policy=endpoint", "tasks=clinic/*/000"],
    "user": ["policy=scripted", "tasks=clinic/*/000"],
    "judge": ["policy=oracle", "tasks=rentals_main.py:test_friendly_answer", "attempts=4"],
}


@pytest.mark.parametrize("role, concurrency", [("agent", 3), ("user", 3), ("judge", 1)])
def test_an_interrupt_ends_a_run_whose_served_model_is_silent(role, concurrency, tmp_path):
    asked = threading.Semaphore(0)

    def reply(request):
        asked.release()
        return Silence()

    with LoopbackEndpoint(reply) as server:
        endpoint = [f"{role}=endpoint", f"{role}.endpoint.base_url={server.base_url}", f"{role}.endpoint.model=m"]
        options = [f"environment.concurrency={concurrency}", f"{role}.endpoint.timeout_s=300", "output_dir=out"]
        run = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "evaluate", *RUNS[role], *endpoint, *options],
            cwd=tmp_path,
            env={**os.environ, "TBX_DATASETS": str(BIKESHOP)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            for _ in range(concurrency):
                assert asked.acquire(timeout=60)
            run.send_signal(signal.SIGINT)
            _, told = run.communicate(timeout=30)  # a tenth of what the silent request may take
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 130 and told.rstrip().endswith("resumes from here."), told
