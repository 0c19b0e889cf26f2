"""`tbx serve-policy`: a policy as an OpenAI-compatible chat endpoint (`tbx_jax.serving.policy_app`)."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tbx_envs.command_line import SETTING, ArgumentParser, port
from tbx_envs.errors import ConfigError
from tbx_envs.web import addresses

_DESCRIPTION = """
Serve a policy through OpenAI's chat completions: POST /v1/chat/completions, GET /v1/models, GET /health.

The policy is `nano`, a policy's folder, or org/name of the Hugging Face Hub. Settings override those of
`conf/sampling/serve.yaml`, for example slots=16 max_episode_tokens=2048. On loopback no token is needed; elsewhere
give a variable or a file with one.
"""


def main(arguments: Sequence[str]) -> int:
    """Serves until it is stopped (SIGINT, SIGTERM).

    Raises:
        ConfigError: the server cannot start with these arguments.
        CheckpointError: no such policy.
    """
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = _token(given)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # otherwise it logs that torch is missing

    # Imported here: `tbx serve-policy --help` need not wait for JAX.
    from tbx_envs.web import loopback
    from tbx_jax.compilation import enable_compilation_cache
    from tbx_jax.serving.policy_app import create_app, opened_service

    enable_compilation_cache()
    listener = loopback.bind(given.host, given.port)
    with opened_service(
        given.policy,
        given.settings,
        seed=given.seed,
        name=given.name,
        compute_dtype=given.compute_dtype,
        splits_control_text=given.control_text == "words",
    ) as service:
        print(service.memory, flush=True)
        line = (
            f"tbx serve-policy: {loopback.url_of(listener)}/v1 serves {service.served.model} "
            f"({'no token' if token is None else 'token'})"
        )
        app = create_app(service, token=token, any_host=not addresses.is_loopback(given.host))
        loopback.until_stopped(app, listener, lambda: print(line, flush=True))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "tbx serve-policy", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("policy", help="nano, a policy's folder, or org/name of the Hugging Face Hub")
    add("settings", nargs="*", metavar=SETTING, help="overrides of conf/sampling/serve.yaml")
    add("--name", help="name of the model in requests (default: the policy's)")
    add("--compute-dtype", choices=("float32", "bfloat16"), help="type of the computation (default: the policy's)")
    add("--seed", type=int, default=0, help="seed of requests without one (%(default)s)")
    add(
        "--control-text",
        choices=("words", "tokens"),
        default="words",
        help="what <|im_end|> in a client's text is to the policy: words, or a token as on other servers (%(default)s)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=port, default=8001, help="0 takes a free one (%(default)s)")
    add("--token-env", metavar="NAME", help="environment variable that holds the bearer token")
    add("--token-file", type=Path, metavar="PATH", help="file with the bearer token")
    return parser


def _token(given: argparse.Namespace) -> str | None:
    from tbx_envs.web.access import read_token

    token = read_token("bearer", variable=given.token_env, file=given.token_file)
    if token is None and not addresses.is_loopback(given.host):
        raise ConfigError(
            f"--host {given.host} is reached from other machines, and there is no token: any client could use the "
            f"policy. Give one with --token-env or --token-file, or listen on 127.0.0.1."
        )
    return token
