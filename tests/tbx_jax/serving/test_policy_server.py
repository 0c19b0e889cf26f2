"""`tbx serve-policy` as a command."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tbx_envs.errors import ConfigError
from tbx_jax.serving.policy_server import main


def test_it_says_where_it_serves_and_ends_when_told(tiny_folder):
    code = "import sys; from tbx_jax.serving.policy_server import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, tiny_folder, "slots=1", "--port", "0", "--token-env", "A_TOKEN"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "A_TOKEN": "a-long-word"}
    ) as process:
        memory, line = process.stdout.readline(), process.stdout.readline()
        assert memory.startswith("sampler memory on each device: parameters")
        assert line.startswith("tbx serve-policy: http://127.0.0.1:") and line.endswith("serves policy (token)\n")
        headers = {"Authorization": "Bearer a-long-word"}
        assert httpx.get(f"{line.split()[2]}/models", headers=headers).json()["data"][0]["id"] == "policy"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_other_machines_are_not_served_without_a_token():
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0 is reached from other machines, and there is no token"):
        main(["nano", "--host", "0.0.0.0"])


def test_help_names_settings_and_options(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "conf/sampling/serve.yaml" in shown and "--token-env" in shown
