"""The `qwen3_coder` format:

    <tool_call>
    <function=find_patient>
    <parameter=name>
    Ada
    </parameter>
    </function>
    </tool_call>

Values carry no types: `tbx_envs.chat.typed_values` gives them the types of the tool's schema. Several calls in a turn
are executed in order; words around them are kept as text. How strictly it is read:

- A value is on lines of its own, as templates write it, and ends at the first `</parameter>` at the start of a line
  that is followed by `<parameter=...>` or `</function>`. A value written on the line of its opening tag ends at the
  first `</parameter>` that is followed by one of these. The format has no escapes: a value in which a tag of the format
  could be its end, or the beginning of something else, has two readings and is not read, nor is anything behind it
  (`tbx_envs.chat.function_block` has the rule).
- A complete block whose `</tool_call>` is missing is accepted at the end of the turn and before another call.
- A call that is only nearly in the format is read if it has one reading (`tbx_envs.chat.turn_reader`), and counted.
- Everything else is a `BadCall`: no function block, no name, a value that does not end, other text between parameters
  or after the block, the same parameter twice (it is unknown which one is meant).
- An unreadable call extends to the closing tag that matches, or to the end where that is unknown; a call quoted inside
  it is not executed.

The model reads the text of a problem: changing it changes the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.chat.reasoning import split_reasoning
from tbx_envs.chat.turn_reader import CALL_START, TurnReader
from tbx_envs.messages import Turn


def parse(raw: str, ids: Iterator[str], schemas: Mapping[str, Mapping[str, Any]]) -> Turn:
    """The turn in `raw`; `ids` supplies the ids of the calls.

    Args:
        schemas: tool -> JSON schema of its arguments; values of other tools stay text.

    Raises:
        TooManyCalls: there are more calls than a turn may have (`tbx_envs.chat.interpretation` answers that).
    """
    reasoning, visible, joints = split_reasoning(raw, CALL_START, TurnReader(raw, schemas, "block").outline)
    return TurnReader(visible, schemas, "block", joints).read().turn(ids, reasoning)
