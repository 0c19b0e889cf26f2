"""`tbx export`: a policy as a folder that other programs load."""

from __future__ import annotations

from collections.abc import Sequence

from tbx_envs.command_line import ArgumentParser
from tbx_jax.policies.weights import export_policy


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx export", description="Write a policy as a folder that other programs load.")
    parser.add_argument(
        "policy", help="folder or name of a policy, such as smollm2 or org/name of the Hugging Face Hub"
    )
    parser.add_argument("folder", help="folder to write; a policy in it is replaced")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the tensors; unchanged by default")
    parser.add_argument(
        "--chat-template",
        choices=("tools", "compact"),
        help="replaces the policy's own, for models that know ChatML: with tools, or turns only (without rules and "
        "tools: for a small model that is trained on one domain)",
    )
    given = parser.parse_args(arguments)
    print(export_policy(given.policy, given.folder, dtype=given.dtype, chat_template=given.chat_template))
