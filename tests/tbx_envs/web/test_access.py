from __future__ import annotations

from pathlib import Path

import pytest

from tbx_envs.errors import ConfigError
from tbx_envs.web.access import Access, read_token


def test_without_tokens_every_client_passes_and_none_is_privileged() -> None:
    assert [Access().allows(token) for token in (None, "", "any")] == [(True, False)] * 3


def test_each_token_opens_what_is_its_own() -> None:
    access = Access(privileged_token="harness", agent_token="agent")
    expected = {"harness": (True, True), "agent": (True, False), "other": (False, False), "": (False, False)}
    assert {token: access.allows(token) for token in expected} == expected
    assert access.allows(None) == (False, False)
    assert Access(privileged_token="harness").allows("") == (False, False)


def test_tokens_are_never_shown() -> None:
    assert "secret" not in repr(Access(privileged_token="secret-1", agent_token="secret-2"))


def test_an_agent_s_token_alone_or_twice_the_same_is_rejected() -> None:
    with pytest.raises(ConfigError, match="none for the harness"):
        Access(agent_token="agent")
    with pytest.raises(ConfigError, match="are the same"):
        Access(privileged_token="one", agent_token="one")


def test_a_token_is_read_from_a_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environ = {"TOKEN": " from-variable "}
    assert read_token("privileged", variable=None, file=None, environ=environ) is None
    assert read_token("privileged", variable="TOKEN", file=None, environ=environ) == "from-variable"
    assert read_token("privileged", variable=None, file=file, environ=environ) == "from-file"
    with pytest.raises(ConfigError, match="Name only one"):
        read_token("privileged", variable="TOKEN", file=file, environ=environ)


@pytest.mark.parametrize("token", ["", "  ", "two words", "é", "a\x00b"])
def test_an_unusable_token_is_an_error_that_does_not_show_it(token: str) -> None:
    with pytest.raises(ConfigError, match="the agent token in environment variable TOKEN is") as caught:
        read_token("agent", variable="TOKEN", file=None, environ={"TOKEN": token})
    assert not token.strip() or token not in str(caught.value)


def test_an_unset_variable_or_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty or unset"):
        read_token("privileged", variable="TOKEN", file=None, environ={})
    with pytest.raises(ConfigError, match="cannot be read from file"):
        read_token("privileged", variable=None, file=tmp_path / "none", environ={})
