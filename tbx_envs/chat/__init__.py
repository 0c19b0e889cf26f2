"""Text becomes turns and tokens: call formats, chat templates, the append-only ledger.

A reader makes a `Turn` of what a policy wrote (`interpretation.interpret`). Its contract, for every format:

1. It never raises, whatever the text.
2. Its work is linear in the length of the text: no character is visited more than a bounded number of times.
3. It executes only what has exactly one reading. Where markup stands in a value, or a call in the middle of a sentence,
   neither reading is executed.
4. What was meant as a call and is none becomes a `BadCall`, which says what is wrong in words for the model. Calls that
   are only nearly in the format and have one reading are read, and counted (`Turn.num_lenient`).
5. What a model's own template wrote is read back to the same calls. `qwen3_coder` has no escapes: there it holds for
   values in which no line begins or ends with a tag of the format (`function_block` has the exact rule).
6. A turn has at most `parts.MAX_CALLS` calls. Of more, none is executed: one `BadCall` says so.

`tests/tbx_envs/chat/test_readers_contract.py` holds every registered format to it.
"""
