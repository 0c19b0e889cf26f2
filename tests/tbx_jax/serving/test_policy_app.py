"""The chat endpoint over loopback, against the sampler used directly."""

import asyncio
import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tbx_envs.chat.template import ChatTemplate
from tbx_envs.errors import ConfigError, PolicyFault
from tbx_envs.messages import Text, Turn
from tbx_envs.web import loopback
from tbx_jax.policies.weights import load_policy
from tbx_jax.sampler.sampler import SampledTurn, Sampler
from tbx_jax.serving.chat_requests import Served
from tbx_jax.serving.conversations import Answer, Conversations
from tbx_jax.serving.policy_app import PolicyService, create_app, max_body_bytes, opened_service, serving_settings

SETTINGS = ("slots=2", "episodes=4", "max_turn_tokens=12", "max_episode_tokens=96", "decode_steps=4")
HELLO = {"role": "user", "content": "Hello"}
WAIT_S = 120


@pytest.fixture(scope="module")
def service(tiny_folder):
    with opened_service(tiny_folder, SETTINGS, seed=5) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with loopback.in_thread(create_app(service)) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def in_process(tiny_folder):
    """Conversation so far -> the greedy answer of a sampler of our own: its raw text, its turn."""
    model, params, tokenizer = load_policy(tiny_folder)
    chat = ChatTemplate(tokenizer)
    sampler = Sampler(model, chat.end_of_turn_ids, serving_settings(SETTINGS), 5)

    def answer(*messages):
        sampler.begin(0, chat.opening(messages), ("any",), temperature=0.0)
        while True:
            for turn in sampler.advance(params):
                return chat.decode(turn.tokens), turn

    return answer


def ask(client, messages=(HELLO,), **body):
    return client.post("/v1/chat/completions", json={"model": "policy", "messages": list(messages), **body})


def choice(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_the_one_model_is_listed_and_the_server_is_healthy(client):
    assert client.get("/health").json() == {"status": "ok", "model": "policy"}
    listed = client.get("/v1/models").json()
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("policy", 96)]


def test_greedy_answers_over_three_turns_are_those_of_the_sampler_in_process(client, in_process):
    said, records = [HELLO], [Text("user", "Hello")]
    cached = []
    for _ in range(3):
        response = ask(client, said, temperature=0, logprobs=True)
        answer, usage = choice(response), response.json()["usage"]
        raw, turn = in_process(*records)
        assert answer["message"] == {"role": "assistant", "content": raw.strip()}
        assert answer["finish_reason"] == ("stop" if turn.stopped else "length")
        assert [entry["token_id"] for entry in answer["logprobs"]["content"]] == turn.tokens
        assert [entry["logprob"] for entry in answer["logprobs"]["content"]] == pytest.approx(turn.logps, abs=1e-5)
        assert usage["completion_tokens"] == len(turn.tokens)
        cached.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
        said += [answer["message"], {"role": "user", "content": "go on"}]
        records += [Turn(text=answer["message"]["content"]), Text("user", "go on")]
    assert cached[0][0] == 0
    assert all(now >= before for (now, _), (_, before) in zip(cached[1:], [(0, 0), *cached[1:]], strict=False))


def test_requests_at_the_same_time_get_what_each_gets_alone(client, in_process):
    async def all_at_once():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=WAIT_S) as many:
            bodies = [
                {"model": "policy", "messages": [{"role": "user", "content": f"{n}"}], "temperature": 0.0}
                for n in range(9)
            ]
            return await asyncio.gather(*(many.post("/v1/chat/completions", json=body) for body in bodies))

    for number, response in enumerate(asyncio.run(all_at_once())):
        assert choice(response)["message"]["content"] == in_process(Text("user", f"{number}"))[0].strip()


def test_a_seed_repeats_an_answer_and_requests_without_one_differ(client):
    texts = [choice(ask(client, temperature=5.0, seed=seed))["message"]["content"] for seed in (1, 1, 2, None, None)]
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_max_tokens_cut_an_answer_off(client):
    response = ask(client, temperature=5.0, seed=1, max_tokens=2)
    assert choice(response)["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 2


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(client):
    whole = choice(ask(client, temperature=5.0, seed=1))["message"]["content"]
    stop = whole[2]
    answer = choice(ask(client, temperature=5.0, seed=1, stop=[stop, "zzz"]))
    assert answer["message"]["content"] == whole[: whole.index(stop)].strip() and answer["finish_reason"] == "stop"


def test_half_of_a_surrogate_pair_anywhere_in_a_conversation_is_served(client):
    """As JSON escapes, which httpx would not write. It is rendered, tokenised, and then too long: no need to sample."""
    half = "\ud800"
    call = {"id": half, "function": {"name": half, "arguments": json.dumps({half: half})}}
    tool = {"type": "function", "function": {"name": half, "description": half, "parameters": {"title": half}}}
    user = {"role": "user", "content": half * 200}
    history = [{"role": "assistant", "content": half, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": half, "content": half}]
    for messages, tools in (([user, *history, user], []), ([user], [tool])):
        body = json.dumps({"model": "policy", "messages": messages, "tools": tools, "stop": half})
        status, error = error_of(client.post("/v1/chat/completions", content=body))
        assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_body_larger_than_what_the_context_can_hold_is_refused_unread(client):
    limit = max_body_bytes(96)
    assert 64 * 96 < limit < 2**20
    for content in (b" " * (limit + 1), iter([b" " * limit, b" "])):  # with its length, and in chunks without
        status, error = error_of(client.post("/v1/chat/completions", content=content))
        assert (status, error["code"]) == (413, "context_length_exceeded")
        assert f"more than {limit} bytes" in error["message"] and "96 tokens" in error["message"]


def test_others_are_answered_while_a_conversation_is_rendered(client, service, monkeypatch):
    began, may_end = threading.Event(), threading.Event()
    opening = service.chat.opening

    def slow(*arguments):
        began.set()
        assert may_end.wait(WAIT_S)
        return opening(*arguments)

    monkeypatch.setattr(service.chat, "opening", slow)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, client, max_tokens=1)
        try:
            assert began.wait(WAIT_S)
            assert client.get("/health").json()["status"] == "ok"
            assert not asked.done()
        finally:
            may_end.set()
        assert choice(asked.result())


def error_of(response):
    return response.status_code, response.json()["error"]


def test_errors_are_openais_objects(client):
    status, error = error_of(ask(client, stream=True))
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "stream")
    status, error = error_of(ask(client, model="other"))
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = error_of(client.post("/v1/chat/completions", content=b"{"))
    assert status == 400 and "not JSON" in error["message"]
    status, error = error_of(client.get("/v1/chat/completions"))
    assert status == 405 and "GET /v1/chat/completions: Method Not Allowed" in error["message"]
    assert error_of(client.get("/v2"))[0] == 404


def test_a_conversation_without_room_for_an_answer_is_refused_as_too_long(client):
    status, error = error_of(ask(client, [{"role": "user", "content": "x" * 96}]))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 96 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/health", "/nowhere"])
def test_what_a_web_page_sends_is_refused_at_every_path(client, path):
    for spoilt in ({"Origin": "http://127.0.0.1:9"}, {"Host": f"evil.example:{client.base_url.port}"}):
        status, error = error_of(client.post(path, headers=spoilt))
        assert (status, error["type"]) == (403, "permission_error")


def test_a_page_of_the_server_itself_may_ask(client):
    host = client.base_url.netloc.decode()
    assert client.get("/v1/models", headers={"Origin": f"http://{host}"}).status_code == 200


def test_a_token_is_asked_for_where_there_is_one(service):
    with loopback.in_thread(create_app(service, token="secret")) as url:
        for value in (None, "Bearer wrong", "Basic secret", "secret"):
            headers = {} if value is None else {"Authorization": value}
            status, error = error_of(httpx.get(f"{url}/v1/models", headers=headers))
            assert (status, error["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


# --- what a tiny policy never writes ------------------------------------------------------------------------


class Prescribed(Conversations):
    """Conversations in which the policy writes what the test says."""

    broken = None

    def __init__(self):
        self.says, self.fault, self.asked = [], None, []

    def ask(self, question):
        answer = Future()
        self.asked.append(answer)
        if self.fault is not None:
            answer.set_exception(self.fault)
        elif self.says is not None:
            tokens = self.says
            answer.set_result(Answer(SampledTurn(0, tokens, [-0.1] * len(tokens), True), 0))
        return answer


@pytest.fixture
def prescribed(service):
    fake = Prescribed()
    other = PolicyService(
        service.tokenizer, service.chat, Served("policy", None, 1.0), service.sampling, fake, service.memory
    )
    with loopback.in_thread(create_app(other)) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client, fake, lambda text: service.chat.encode(text + "<|im_end|>")


def test_calls_are_taken_out_of_what_is_written_and_their_ids_count_on(prescribed):
    client, fake, written = prescribed
    fake.says = written('<think>Hm.</think>Look:<tool_call>{"name": "find", "arguments": {"name": "Ada"}}</tool_call>')
    first = choice(ask(client))
    assert first["finish_reason"] == "tool_calls"
    assert (first["message"]["content"], first["message"]["reasoning_content"]) == ("Look:", "Hm.")
    (call,) = first["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_0", "find")
    assert json.loads(call["function"]["arguments"]) == {"name": "Ada"}
    history = [HELLO, first["message"], {"role": "tool", "tool_call_id": "call_0", "content": "[]"}]
    assert choice(ask(client, history))["message"]["tool_calls"][0]["id"] == "call_1"


def test_a_sampler_that_does_not_answer_is_a_server_error(prescribed):
    client, fake, _ = prescribed
    fake.fault = PolicyFault("the sampler broke: no memory")
    status, error = error_of(ask(client))
    assert (status, error["type"]) == (503, "server_error") and "no memory" in error["message"]
    fake.broken = MemoryError("no memory")
    assert client.get("/health").status_code == 503


def test_a_client_that_goes_away_takes_its_question_back(prescribed):
    client, fake, _ = prescribed
    fake.says = None
    body = json.dumps({"model": "policy", "messages": [HELLO]}).encode()
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while not fake.asked:
            assert client.get("/health").status_code == 200
    while not fake.asked[0].cancelled():
        assert client.get("/health").status_code == 200


# --- settings -----------------------------------------------------------------------------------------------


def test_settings_are_those_of_the_file_and_may_be_changed():
    assert serving_settings(()).slots == 8
    assert serving_settings(("slots=3", "top_k=5")).model_dump().items() >= {"slots": 3, "top_k": 5}.items()
    for wrong, words in (
        (("slots",), "no setting"),
        (("slot=3",), "slot: there is no"),
        (("slots=[",), r"slots=\["),
    ):
        with pytest.raises(ConfigError, match=words):
            serving_settings(wrong)


def test_episodes_are_no_longer_than_the_model_can(tiny_folder):
    with opened_service(tiny_folder, ("slots=1",), name="mine") as service:
        assert (service.sampling.max_episode_tokens, service.served.model) == (1024, "mine")
        assert isinstance(service.conversations, Conversations)
