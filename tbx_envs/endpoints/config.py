"""The record of a served model and the settings of requests to it, in configurations and in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from tbx_envs.endpoints.costs import Prices


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A server that speaks OpenAI's chat completions.

    Attributes:
        base_url: address to which `/chat/completions` is appended, such as `http://127.0.0.1:8000/v1`.
        model: name of the model on the server.
        api_key_env: environment variable that holds the key; None sends no key.
        temperature, max_tokens: defaults of a completion; None leaves them to the server.
        timeout_s: time limit of one request, from the first byte sent to the last byte read.
        concurrency: maximum number of requests of all threads that are in flight or waiting for a retry.
        max_retries: maximum number of retries of a request.
        extra_body: additional fields of every request; they override other fields, and None removes a field
            (`{"seed": None}` for a server that rejects seeds).
        prices: prices of tokens; None when unknown.
    """

    # Unknown keys of a configuration are errors.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    base_url: str
    model: str
    api_key_env: str | None = None
    # The bounds are for configurations, where each key gets its own message; `ChatEndpoint` checks them too.
    temperature: Annotated[float, Ge(0.0)] | None = None
    max_tokens: Annotated[int, Ge(1)] | None = None
    timeout_s: Annotated[float, Gt(0.0)] = 300.0
    concurrency: Annotated[int, Ge(1)] = 8
    max_retries: Annotated[int, Ge(0)] = 5
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prices: Prices | None = None
