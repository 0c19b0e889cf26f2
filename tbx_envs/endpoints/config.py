"""Where a model is served and how it is asked: the one record of it, in configurations and in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tbx_envs.endpoints.costs import Prices


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A server that speaks OpenAI's chat completions.

    Attributes:
        base_url: what `/chat/completions` is appended to, such as `http://127.0.0.1:8000/v1`.
        model: the model's name on that server.
        api_key_env: environment variable that holds the key; None sends none.
        temperature: sampling temperature of completions that do not say otherwise; None leaves it to the server.
        max_tokens: most tokens of a completion that does not say otherwise; None leaves it to the server.
        timeout_s: time limit of one request, from the first byte sent to the last one read, however slowly it comes.
        concurrency: most requests of all threads that are on their way or waiting to be sent again.
        max_retries: most times that a request is sent again.
        extra_body: further fields of every request; they win over what is sent otherwise, and None removes a field
            (`{"seed": None}` for a server that refuses seeds).
        prices: prices of tokens; None when they are unknown.
    """

    # A configuration with a key that is not here is refused.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    base_url: str
    model: str
    api_key_env: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout_s: float = 300.0
    concurrency: int = 8
    max_retries: int = 5
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prices: Prices | None = None
