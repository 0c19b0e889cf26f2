"""A policy as a web application with OpenAI's chat completions API.

    GET  /health                 200 while it works
    GET  /v1/models              the policy's name
    POST /v1/chat/completions    messages, tools; no streaming

Any client of this API can use a checkpoint, our own `policy=endpoint` included. Prompts are rendered with the policy's
own chat template, and its output is parsed as in training, into text, tool calls and reasoning.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.resources
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tbx_envs.chat.exact_tokens import exactly_decoded
from tbx_envs.chat.interpretation import interpret, schemas_of
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.errors import ConfigError, PolicyFault
from tbx_envs.web.access import LocalRequests, same_token
from tbx_envs.web.bodies import BodyTooLarge, read_body
from tbx_jax.config import SamplingConfig, validated
from tbx_jax.policies.hub_policy import is_hub_name
from tbx_jax.policies.tokenizers import token_bytes
from tbx_jax.policies.weights import Precision, load_policy
from tbx_jax.sampler.memory_plan import MemoryPlan
from tbx_jax.sampler.sampler import Sampler
from tbx_jax.serving.chat_requests import (
    ChatRequest,
    RequestError,
    Served,
    completion,
    read_request,
    token_logprobs,
    up_to_stop,
)
from tbx_jax.serving.conversations import Answer, Conversations, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a conversation of so many tokens can take as JSON. Tokens of text are four bytes long on the average; those of
# indentation and of rules ("=====") up to a few dozen; and JSON may write a byte of text as six (`\u00e9`).
BYTES_PER_TOKEN = 64
_BODY_BYTES = 2**16  # the request around the conversation

T = TypeVar("T")


def max_body_bytes(max_episode_tokens: int) -> int:
    """How large the body of a request may be, by the tokens of a conversation."""
    return _BODY_BYTES + BYTES_PER_TOKEN * max_episode_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyService:
    """A loaded policy, and the objects that answer requests with it.

    Attributes:
        tokenizer: tokenizer of the policy.
        chat: chat template of the tokenizer.
        served: settings that requests must agree with.
        sampling: limits.
        conversations: conversations in progress.
        memory: memory plan of the sampler.
        texts: the thread in which texts are rendered, tokenised and read.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTemplate
    served: Served
    sampling: SamplingConfig
    conversations: Conversations
    memory: MemoryPlan
    texts: Executor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(1, "tbx-texts"))


@contextlib.contextmanager
def opened_service(
    policy: str,
    settings: Sequence[str] = (),
    *,
    seed: int = 0,
    name: str | None = None,
    compute_dtype: Precision | None = None,
    splits_control_text: bool = True,
) -> Iterator[PolicyService]:
    """A loaded policy, ready to answer.

    Args:
        policy: folder or name of the policy.
        settings: `key=value` overrides of `conf/sampling/serve.yaml`.
        seed: seed of the sampler.
        name: name of the model in requests; None is the name of the policy or its folder.
        compute_dtype: type of the computation; None is the type in the policy's configuration.
        splits_control_text: whether control strings in what clients say stay words (`ChatTemplate`).

    Raises:
        ConfigError: settings that are invalid, or do not fit the policy.
        CheckpointError: no such policy, or its files are inconsistent.
    """
    sampling = serving_settings(settings)
    model, params, tokenizer = load_policy(policy, dtype=compute_dtype, param_dtype=None)
    longest = min(sampling.max_episode_tokens, model.config.max_length)
    sampling = sampling.model_copy(update={"max_episode_tokens": longest})
    chat = ChatTemplate(tokenizer, splits_control_text=splits_control_text)
    sampler = Sampler(model, chat.end_of_turn_ids, sampling, seed, params=params)
    own_name = policy if is_hub_name(policy) else Path(policy).resolve().name
    served = Served(name or own_name, sampling.top_k, sampling.top_p)
    with Conversations(sampler, params, most=sampling.episodes_in_flight) as conversations:
        service = PolicyService(tokenizer, chat, served, sampling, conversations, sampler.memory)
        try:
            yield service
        finally:
            service.texts.shutdown(cancel_futures=True)


def serving_settings(settings: Sequence[str]) -> SamplingConfig:
    """`conf/sampling/serve.yaml` with `key=value` overrides.

    Raises:
        ConfigError: an invalid setting.
    """
    wrong = [setting for setting in settings if "=" not in setting]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: no setting. Write key=value, such as slots=16.")
    text = importlib.resources.files("tbx_conf").joinpath("sampling", "serve.yaml").read_text("utf-8")
    try:
        changes = OmegaConf.from_dotlist(list(settings))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{' '.join(settings)}: cannot be read: {error}") from error
    merged = OmegaConf.merge(OmegaConf.create(text), changes)
    assert isinstance(merged, DictConfig)  # both are mappings
    return validated(SamplingConfig, merged)


def create_app(service: PolicyService, *, token: str | None = None, any_host: bool = False) -> Starlette:
    """The ASGI application.

    Args:
        service: the policy to serve.
        token: bearer token required by every request but `/health`; None requires none.
        any_host: True to answer under any host name, for a server that other machines reach with a token.
    """

    async def health(request: Request) -> JSONResponse:
        broken = service.conversations.broken
        status = {"status": "ok", "model": service.served.model} if broken is None else {"status": f"broken: {broken}"}
        return JSONResponse(status, 200 if broken is None else 503)

    async def models(request: Request) -> JSONResponse:
        limit = service.sampling.max_episode_tokens
        model = {"id": service.served.model, "object": "model", "created": 0, "owned_by": "tbx", "max_model_len": limit}
        return JSONResponse({"object": "list", "data": [model]})

    def guarded(answer: Callable[[Request], Awaitable[JSONResponse]]) -> Callable[[Request], Awaitable[JSONResponse]]:
        @functools.wraps(answer)
        async def checked(request: Request) -> JSONResponse:
            _authorize(request, token)
            return await answer(request)

        return checked

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", guarded(models)),
            Route("/v1/chat/completions", guarded(_Completions(service).answer), methods=["POST"]),
        ],
        middleware=[Middleware(LocalRequests, refused=_foreign, any_host=any_host)],
        exception_handlers={RequestError: _error_response, HTTPException: _no_route},
    )


def _foreign(reason: str) -> JSONResponse:
    return JSONResponse(RequestError(reason, kind="permission_error").body, 403)


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)  # registered for this class
    return JSONResponse(error.body, error.status)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # registered for this class
    words = f"{request.method} {request.url.path}: {error.detail}. There is POST /v1/chat/completions."
    return JSONResponse(RequestError(words).body, error.status_code)


def _authorize(request: Request, token: str | None) -> None:
    """Checks the bearer token.

    Raises:
        RequestError: the request is not allowed.
    """
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if token is not None and not (kind.lower() == "bearer" and same_token(value.strip(), token)):
        raise RequestError(
            "no valid key: send the server's token as `Authorization: Bearer ...`",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


class _Completions:
    """The handler of chat completions."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service
        self._numbers = itertools.count()

    async def answer(self, request: Request) -> JSONResponse:
        content = await self._body(request)
        number = next(self._numbers)
        asked, tokens = await self._apart(lambda: self._prompt(content))
        try:
            answer = await _unless_gone(request, self._service.conversations.ask(self._question(asked, tokens, number)))
        except PolicyFault as fault:
            raise RequestError(str(fault), status=503, kind="server_error") from fault
        return JSONResponse(await self._apart(lambda: self._read(asked, answer, len(tokens), number)))

    async def _body(self, request: Request) -> bytes:
        try:
            return await read_body(request, max_body_bytes(self._service.sampling.max_episode_tokens))
        except BodyTooLarge as error:
            raise RequestError(
                f"{error}, more than {self._service.sampling.max_episode_tokens} tokens of context can hold. Make the "
                f"conversation shorter.",
                status=413,
                code="context_length_exceeded",
            ) from error

    async def _apart(self, work: Callable[[], T]) -> T:
        """The result of work on texts, which must not keep other clients, /health and signals waiting. One thread does
        all of it, so that the tokenizer is used by one request at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._service.texts, work)

    def _prompt(self, content: bytes) -> tuple[ChatRequest, list[int]]:
        asked = read_request(content, self._service.served)
        try:
            tokens = self._service.chat.opening(asked.messages, asked.tools)
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from error
        limit = self._service.sampling.max_episode_tokens
        if len(tokens) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, and the messages have {len(tokens)}: no room "
                f"for an answer. Make them shorter.",
                param="messages",
                code="context_length_exceeded",
            )
        return asked, tokens

    def _question(self, asked: ChatRequest, tokens: Sequence[int], number: int) -> Question:
        """The same seed and conversation give the same answer. A request without a seed gets its own randomness."""
        chat = self._service.chat
        return Question(
            tokens,
            ("request", number) if asked.seed is None else ("seed", asked.seed),
            asked.temperature,
            asked.max_tokens,
            (lambda written: up_to_stop(chat.decode(written), asked.stop) is not None) if asked.stop else None,
        )

    def _read(self, asked: ChatRequest, answer: Answer, prompt_tokens: int, number: int) -> dict[str, Any]:
        chat, turn = self._service.chat, answer.turn
        text = chat.decode(turn.tokens)
        stopped_text = up_to_stop(text, asked.stop)
        read = interpret(
            text if stopped_text is None else stopped_text,
            chat.chat_format,
            first_call=asked.first_call,
            truncated=not turn.stopped and stopped_text is None,
            schemas=schemas_of(asked.tools),
        )
        return completion(
            read,
            request_id=f"chatcmpl-{number}",
            model=self._service.served.model,
            created=int(time.time()),
            prompt_tokens=prompt_tokens,
            cached_tokens=answer.cached_tokens,
            completion_tokens=len(turn.tokens),
            logprobs=token_logprobs(turn.tokens, turn.logps, self._text_of, self._bytes_of) if asked.logprobs else None,
        )

    def _text_of(self, tokens: Sequence[int]) -> str:
        return exactly_decoded(self._service.tokenizer, tokens)

    def _bytes_of(self, token: int) -> bytes | None:
        return token_bytes(self._service.tokenizer, token)


async def _unless_gone(request: Request, answer: Future[Answer]) -> Answer:
    """The answer; cancelled when the client disconnects first.

    Raises:
        PolicyFault: the sampler broke or was closed.
        RequestError: the client has disconnected.
    """
    written = asyncio.wrap_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    either: set[asyncio.Future[Answer] | asyncio.Future[None]] = {written, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if written.done():
            return written.result()
        raise RequestError("the client has gone", status=499)
    finally:
        written.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
