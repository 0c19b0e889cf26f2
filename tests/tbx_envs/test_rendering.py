"""What other parties wrote, shown to people."""

from tbx_envs.commands import cli
from tbx_envs.episode import Episode, Fault
from tbx_envs.errors import DomainError
from tbx_envs.evaluation.report import table
from tbx_envs.evaluation.transcripts import episode_text
from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.rendering import transcript_text, visible, visible_line

# Clears the screen, sets the title, answers for the keyboard, goes back over the line; turns writing around.
OBEYED = "\x1b[2J\x1b]0;title\x07\x9b6n\r\x7f\x00\u202eback\u2066"


def test_what_a_terminal_would_obey_is_shown_as_its_escape_and_all_else_as_it_is():
    assert visible("\x1b[2J") == r"\x1b[2J" and visible("\u202e") == r"\u202e"
    plain = "José said:\n\t“ζ, 日本, 🙂, שלום” \\x1b"
    assert visible(plain) == plain
    assert visible_line("a\n\tb\r") == r"a\n\tb\r"


def shown_by_the_command_line(capsys):
    def refuse():
        raise DomainError(f"no task {OBEYED}")

    assert cli._guarded(refuse, "show") == 2
    return capsys.readouterr().err


def test_no_words_of_another_party_reach_a_terminal_as_commands(capsys):
    said = [
        Text("user", OBEYED),
        Turn(OBEYED, (ToolCall("", OBEYED, {OBEYED: OBEYED}), BadCall("", OBEYED, "no JSON")), reasoning=OBEYED),
        ToolResult("", OBEYED, OBEYED, "rejected"),
    ]
    void = Episode(OBEYED, 0, 1, tuple(said), None, None, None, Fault("tool", OBEYED), {}, {})
    for text in (
        transcript_text(said),
        episode_text(void),
        table(("family", "tasks"), [(OBEYED, "1\n2")], left=("family",)),
        shown_by_the_command_line(capsys),
    ):
        assert r"\x1b[2J" in text
        assert [character for character in text if not character.isprintable() and character != "\n"] == []
