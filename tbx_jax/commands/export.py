"""`tbx export`: a policy as a folder that other programs load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tbx_jax.policies.weights import export_policy


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("tbx export", description="Write a policy as a folder that other programs load.")
    parser.add_argument("policy", help="a policy's folder, or a name: smollm2, org/name of the Hugging Face Hub")
    parser.add_argument("folder", help="to write; a policy that is there is replaced")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the tensors; as they are by default")
    parser.add_argument(
        "--chat-template",
        choices=("tools", "compact"),
        help="in place of the policy's own, for models that were taught ChatML: with tools, or turns alone (no rules, "
        "no tools: for a small model that is trained on one domain)",
    )
    given = parser.parse_args(arguments)
    print(export_policy(given.policy, given.folder, dtype=given.dtype, chat_template=given.chat_template))
