import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
import threading

import httpx
import pytest

from tbx_envs.endpoints import transport
from tbx_envs.endpoints.client import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    ChatEndpoint,
    EndpointConfig,
    stopped_by_interrupts,
)
from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.responses import EndpointCall
from tbx_envs.errors import ConfigError, ContextExceeded, EndpointError, EndpointRefused
from tbx_envs.testing.loopback_endpoint import (
    Answers,
    Cut,
    Drips,
    EchoesKey,
    LoopbackEndpoint,
    Says,
    Silence,
    in_order,
)

HELLO = [{"role": "user", "content": "Hello é \ud83d"}]
KEY = "sk-loopback/0123456789+abc"
SHORT_S = 0.2  # for requests that must run into their time limit


@pytest.fixture
def served():
    """Starts a server with this script and an endpoint to it; everything is closed at the end."""
    opened = []

    def start(reply, **settings):
        server = LoopbackEndpoint(reply)
        waits = []
        config = EndpointConfig(server.base_url, "small", **{"max_retries": 3, **settings})
        endpoint = ChatEndpoint(config, sleep=waits.append)
        opened.extend([server, endpoint])
        return server, endpoint, waits

    yield start
    for one in reversed(opened):
        one.close()


def message(**fields):
    return {"choices": [{"message": {"role": "assistant", **fields}, "finish_reason": "stop"}]}


# --- asking and reading -------------------------------------------------------------------------------------


def test_a_request_has_what_was_configured_and_asked_for_and_nothing_else(served):
    server, endpoint, _ = served(
        lambda asked: Says("Hi"), temperature=0.5, max_tokens=64, extra_body={"top_k": 20, "seed": None}
    )
    tools = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}]
    endpoint.complete(HELLO)
    endpoint.complete(HELLO, temperature=0.0, max_tokens=5, tools=tools, tool_choice="auto", seed=3)
    first, second = server.asked
    assert first.path == "/v1/chat/completions"
    assert first.body == {"model": "small", "messages": HELLO, "temperature": 0.5, "max_tokens": 64, "top_k": 20}
    assert "authorization" not in first.headers
    assert second.body == {
        **first.body,
        "temperature": 0.0,
        "max_tokens": 5,
        "tools": tools,
        "tool_choice": "auto",
    }  # and no seed: extra_body took it out


def test_a_seed_is_sent_when_nothing_takes_it_out(served):
    server, endpoint, _ = served(lambda asked: Says("Hi"))
    endpoint.complete(HELLO, seed=7, tools=[])
    assert server.asked[0].body == {"model": "small", "messages": HELLO, "seed": 7}


def test_what_a_model_wrote_is_read_with_its_calls_reasoning_and_tokens(served):
    _, endpoint, _ = served(lambda asked: Says("Let me look.", (("find", '{"a": 1}'),), reasoning="Hm."))
    completion = endpoint.complete(HELLO)
    assert (completion.text, completion.reasoning, completion.reasoning_field) == (
        "Let me look.",
        "Hm.",
        "reasoning_content",
    )
    assert completion.tool_calls == (EndpointCall("sent_0_0", "find", '{"a": 1}'),)
    assert (completion.finish_reason, completion.truncated) == ("tool_calls", False)
    assert completion.usage == TokenUsage(prompt=100, cached=60, completion=10, reasoning=4)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": "Hi"}, "Hi"),
        ({"content": None}, ""),
        ({}, ""),
        (
            {"content": [{"type": "text", "text": "Good "}, {"type": "image"}, {"type": "text", "text": "day"}]},
            "Good day",
        ),
        ({"content": None, "refusal": "I can't."}, "I can't."),
        ({"content": "half \ud800 of it"}, "half � of it"),
    ],
)
def test_every_form_of_content_becomes_text(served, fields, text):
    _, endpoint, _ = served(lambda asked: Answers(body=message(**fields)))
    assert endpoint.complete(HELLO).text == text


def test_calls_without_id_or_arguments_and_with_arguments_read_already_are_taken(served):
    calls = [
        {"function": {"name": "one", "arguments": None}},
        {"id": None, "function": {"name": "two", "arguments": {"a": [1]}}},
        {"id": "x", "function": {"name": None, "arguments": "{"}},
    ]
    _, endpoint, _ = served(lambda asked: Answers(body=message(content=None, tool_calls=calls)))
    assert endpoint.complete(HELLO).tool_calls == (
        EndpointCall("", "one", ""),
        EndpointCall("", "two", '{"a": [1]}'),
        EndpointCall("x", "", "{"),
    )


def test_the_only_call_of_an_older_server_is_read_as_a_call(served):
    call = {"name": "find", "arguments": '{"a": 1}'}
    _, endpoint, _ = served(lambda asked: Answers(body=message(content=None, function_call=call)))
    assert endpoint.complete(HELLO).tool_calls == (EndpointCall("", "find", '{"a": 1}'),)


def test_the_other_name_of_reasoning_is_known_and_remembered(served):
    _, endpoint, _ = served(lambda asked: Answers(body=message(content="", reasoning_content=None, reasoning="Hm.")))
    completion = endpoint.complete(HELLO)
    assert (completion.reasoning, completion.reasoning_field) == ("Hm.", "reasoning")


def test_a_completion_that_a_token_limit_cut_off_says_so(served):
    _, endpoint, _ = served(lambda asked: Says("Let me", finish_reason="length"))
    assert endpoint.complete(HELLO).truncated


@pytest.mark.parametrize(
    ("usage", "known"),
    [
        (None, TokenUsage()),
        ({"prompt_tokens": 7, "completion_tokens": 2}, TokenUsage(prompt=7, completion=2)),
        ({"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": None}, TokenUsage()),
        ({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}, TokenUsage(prompt=7, cached=3)),
    ],
)
def test_tokens_that_were_not_counted_are_unknown_and_not_zero(served, usage, known):
    _, endpoint, _ = served(lambda asked: Says("Hi", usage=usage))
    assert endpoint.complete(HELLO).usage == known
    assert endpoint.totals.usage == known


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [Answers(status) for status in (429, 500, 502, 503, 504)] + [Cut(), Cut(False)])
def test_what_executed_nothing_is_sent_again_until_it_works(served, failure):
    server, endpoint, waits = served(in_order(failure, failure, Says("Here")))
    assert endpoint.complete(HELLO).text == "Here"
    assert len(server.asked) == 3 and len(waits) == 2
    assert len({json.dumps(asked.body) for asked in server.asked}) == 1
    assert dataclasses.astuple(endpoint.totals)[:3] == (3, 1, 0)


def test_a_server_that_stays_broken_is_given_up_after_the_stated_number_of_tries(served):
    server, endpoint, _ = served(lambda asked: Answers(503, {"error": {"message": "loading the model"}}))
    with pytest.raises(EndpointError, match=r"model 'small' \(sent 4 times\): answered 503 \(loading the model\)"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 4
    assert dataclasses.astuple(endpoint.totals)[:3] == (4, 0, 1)


@pytest.mark.parametrize(
    ("status", "error", "advice"),
    [
        (400, EndpointError, "extra_body"),
        (401, EndpointRefused, "api_key_env"),
        (403, EndpointRefused, "may use this model"),
        (404, EndpointRefused, "ends with /v1"),
        (302, EndpointError, "base_url"),
        (501, EndpointError, "own log"),
    ],
)
def test_what_would_be_answered_the_same_again_is_not_sent_again(served, status, error, advice):
    server, endpoint, waits = served(lambda asked: Answers(status, {"error": "not so"}))
    with pytest.raises(error, match=f"answered {status} \\(not so\\).*{advice}") as raised:
        endpoint.complete(HELLO)
    assert type(raised.value) is error
    assert len(server.asked) == 1 and waits == []


def test_a_port_without_a_listener_is_no_connection_and_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    waits = []
    with (
        ChatEndpoint(EndpointConfig(f"http://127.0.0.1:{port}", "m", max_retries=2), sleep=waits.append) as endpoint,
        pytest.raises(EndpointError, match=r"sent 3 times\): no connection .* Check base_url"),
    ):
        endpoint.complete(HELLO)
    assert len(waits) == 2


@pytest.mark.parametrize("slow", [Silence(), Drips(), Drips(headers=True)])
def test_the_time_limit_is_of_the_whole_request_and_a_slow_one_is_not_paid_for_twice(served, slow):
    server, endpoint, waits = served(lambda asked: slow, timeout_s=SHORT_S)
    with pytest.raises(EndpointError, match=r"no complete answer within 0\.2 s"):
        endpoint.complete(HELLO)
    assert len(server.asked) <= 1 and waits == []


@pytest.mark.parametrize(
    "answer",
    [
        Answers(body="<html>Sign in</html>", headers={"content-type": "text/html"}),
        Answers(body="data: {}\n\ndata: [DONE]", headers={"content-type": "text/event-stream"}),
        Answers(body='{"choices": [{"message": {"content": "Hi"'),
        Answers(body="[]"),
        Answers(body=""),
        Answers(body="[" * 100_000),
        Answers(body={}),
        Answers(body={"choices": []}),
        Answers(body={"choices": None}),
        Answers(body={"choices": [{"message": None}]}),
        Answers(body={"choices": ["Hi"]}),
        Answers(body=message(content=7)),
        Answers(body=message(content=[{"type": "text"}])),
        Answers(body=message(content="", tool_calls=[{"id": "x"}])),
        Answers(body=message(content="", tool_calls=[{"function": {"name": "f", "arguments": 7}}])),
    ],
)
def test_an_answer_that_is_no_completion_is_an_error_that_shows_it(served, answer):
    server, endpoint, _ = served(lambda asked: answer)
    with pytest.raises(EndpointError, match="answered with"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 1


def test_an_answer_that_is_no_http_is_an_error(served):
    server, endpoint, _ = served(lambda asked: Answers(body="no zip", headers={"content-encoding": "gzip"}))
    with pytest.raises(EndpointError, match="not valid HTTP"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 1


def test_an_answer_larger_than_what_is_read_is_an_error_that_says_so(served, monkeypatch):
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 2000)
    server, endpoint, _ = served(lambda asked: Says("a" * 4000))
    with pytest.raises(EndpointError, match="more than 2,000 bytes"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 1


def test_json_of_a_wrong_content_type_is_read_all_the_same(served):
    _, endpoint, _ = served(lambda asked: Answers(body=message(content="Hi"), headers={"content-type": "text/plain"}))
    assert endpoint.complete(HELLO).text == "Hi"


def test_an_error_that_comes_with_status_200_is_one(served):
    server, endpoint, _ = served(
        in_order(Answers(body={"error": {"code": 502, "message": "upstream"}}), Answers(body={"error": "no credit"}))
    )
    with pytest.raises(EndpointError, match="no credit"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 2


def test_words_that_the_server_withheld_are_no_completion(served):
    _, endpoint, _ = served(lambda asked: Says("", finish_reason="content_filter"))
    with pytest.raises(EndpointError, match="content filter"):
        endpoint.complete(HELLO)


def test_a_server_that_broke_off_is_asked_again(served):
    server, endpoint, _ = served(in_order(Says("Hal", finish_reason="error"), Says("Hallo")))
    assert endpoint.complete(HELLO).text == "Hallo"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too long"},
        {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."},
        {"type": "exceed_context_size_error", "message": "the request exceeds the available context size"},
    ],
)
def test_a_conversation_too_long_for_the_model_has_an_error_of_its_own(served, error):
    server, endpoint, _ = served(lambda asked: Answers(400, {"error": error}))
    with pytest.raises(ContextExceeded):
        endpoint.complete(HELLO)
    assert len(server.asked) == 1


def test_a_request_without_a_json_form_is_not_sent(served):
    server, endpoint, _ = served(lambda asked: Says("Hi"))
    for wrong in (float("nan"), object()):
        with pytest.raises(EndpointError, match="no JSON form"):
            endpoint.complete([{"role": "user", "content": wrong}])
    assert server.asked == []


# --- waiting ------------------------------------------------------------------------------------------------


def test_waits_double_up_to_the_longest_are_spread_and_follow_the_seed(served):
    def waits_of(seed):
        server, first, _ = served(lambda asked: Answers(500))
        waits = []
        config = dataclasses.replace(first.config, max_retries=9)
        with ChatEndpoint(config, sleep=waits.append, seed=seed) as endpoint, pytest.raises(EndpointError):
            endpoint.complete(HELLO)
        assert len(server.asked) == 10
        return waits

    waits = waits_of(1)
    whole = [min(FIRST_WAIT_S * 2**n, LONGEST_WAIT_S) for n in range(9)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, whole, strict=True))
    assert whole[-1] == LONGEST_WAIT_S
    assert waits == waits_of(1) != waits_of(2)


def test_waits_are_real_unless_a_test_takes_them_over(monkeypatch):
    monkeypatch.setattr("tbx_envs.endpoints.client.FIRST_WAIT_S", 0.001)
    with (
        LoopbackEndpoint(in_order(Answers(500), Answers(500), Says("Here"))) as server,
        ChatEndpoint(EndpointConfig(server.base_url, "m")) as endpoint,
    ):
        assert endpoint.complete(HELLO).text == "Here"
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "17"}, 17.0),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:40 GMT", "date": "Mon, 30 Nov 2026 10:00:00 GMT"}, 40.0),
    ],
)
def test_retry_after_is_honoured_in_seconds_and_as_a_moment_of_the_servers_clock(served, headers, wait_s):
    _, endpoint, waits = served(in_order(Answers(429, headers=headers), Says("Here")))
    assert endpoint.complete(HELLO).text == "Here"
    assert waits == [wait_s]


@pytest.mark.parametrize("words", ["-5", "soon", "Mon, 30 Nov 2026 10:00:40", "0"])
def test_a_retry_after_that_says_nothing_leaves_the_usual_wait(served, words):
    _, endpoint, waits = served(in_order(Answers(503, headers={"retry-after": words}), Says("Here")))
    endpoint.complete(HELLO)
    assert FIRST_WAIT_S / 2 <= waits[0] <= FIRST_WAIT_S


def test_a_server_that_asks_for_an_hour_is_not_waited_for(served):
    server, endpoint, waits = served(lambda asked: Answers(429, headers={"retry-after": "3600"}))
    with pytest.raises(EndpointError, match="asks to wait 3600 s"):
        endpoint.complete(HELLO)
    assert len(server.asked) == 1 and waits == []


# --- many threads -------------------------------------------------------------------------------------------


def in_threads(number, work):
    threads = [threading.Thread(target=work, args=(n,)) for n in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)


def test_the_limit_of_requests_at_the_same_time_is_reached_and_never_passed(served):
    meeting = threading.Barrier(3)  # broken, and the script raises, unless three are there together

    def reply(asked):
        meeting.wait(timeout=10)
        return Says("Hi")

    server, endpoint, _ = served(reply, concurrency=3, max_retries=0)
    in_threads(12, lambda n: endpoint.complete(HELLO))
    assert server.most_at_once == 3
    totals = endpoint.totals
    assert (totals.requests, totals.completions, totals.failures) == (12, 12, 0)
    assert totals.usage == TokenUsage(prompt=1200, cached=720, completion=120, reasoning=48)


def test_a_request_that_waits_to_be_sent_again_keeps_its_place():
    first_failed, go_on = threading.Event(), threading.Event()

    def sleep(seconds):
        first_failed.set()
        assert go_on.wait(timeout=10)

    def reply(asked):
        return Answers(429) if asked.number == 0 else Says("Hi")

    with (
        LoopbackEndpoint(reply) as server,
        ChatEndpoint(EndpointConfig(server.base_url, "m", concurrency=1), sleep=sleep) as endpoint,
    ):
        threads = [threading.Thread(target=endpoint.complete, args=(HELLO,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert first_failed.wait(timeout=10)
        assert len(server.asked) == 1
        go_on.set()
        for thread in threads:
            thread.join(timeout=10)
        assert len(server.asked) == 3


@pytest.mark.parametrize("where", ["under way", "in the queue", "between tries"])
def test_a_request_that_is_no_longer_wanted_is_cancelled(where):
    stop, there = threading.Event(), threading.Event()
    raised = []

    def reply(asked):
        there.set()
        return Answers(429) if where == "between tries" else Silence()

    with LoopbackEndpoint(reply) as server:
        config = EndpointConfig(server.base_url, "m", concurrency=1, timeout_s=30.0)
        with ChatEndpoint(config) as endpoint:

            def ask(stopped_by):
                try:
                    endpoint.complete(HELLO, stop=stopped_by)
                except EndpointError as error:
                    raised.append(str(error))

            other = threading.Event()
            threads = [threading.Thread(target=ask, args=(other if where == "in the queue" else stop,))]
            threads[0].start()
            assert there.wait(timeout=10)
            if where == "in the queue":
                threads.append(threading.Thread(target=ask, args=(stop,)))
                threads[1].start()
            stop.set()
            threads[-1].join(timeout=10)
            assert not threads[-1].is_alive()
            assert len(server.asked) == 1
            other.set()
            threads[0].join(timeout=10)
    assert raised and all("cancelled" in words for words in raised)


def sending_threads():
    return {thread for thread in threading.enumerate() if thread.name == "tbx-endpoint"}


def test_closing_cancels_requests_in_flight_and_ends_the_thread():
    before = sending_threads()
    there = threading.Event()
    raised = []

    def reply(asked):
        there.set()
        return Silence()

    def ask():
        try:
            endpoint.complete(HELLO)
        except EndpointError as error:
            raised.append(str(error))

    with LoopbackEndpoint(reply) as server:
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "m", timeout_s=30.0))
        thread = threading.Thread(target=ask)
        thread.start()
        assert there.wait(timeout=10)
        endpoint.close()
        thread.join(timeout=10)
        ask()
        endpoint.close()
    assert len(raised) == 2 and all("cancelled" in words for words in raised)
    assert sending_threads() == before


@pytest.mark.parametrize("where", ["under way", "in the queue", "between tries"])
def test_an_endpoint_that_is_stopped_fails_all_its_requests_at_once(where):
    there, raised = threading.Event(), []

    def reply(asked):
        there.set()
        return Answers(429, headers={"retry-after": "60"}) if where == "between tries" else Silence()

    def ask():
        try:
            endpoint.complete(HELLO)
        except EndpointError as error:
            raised.append(str(error))

    with LoopbackEndpoint(reply) as server:
        config = EndpointConfig(server.base_url, "m", concurrency=1, timeout_s=60.0)
        with ChatEndpoint(config) as endpoint:
            threads = [threading.Thread(target=ask) for _ in range(1 + (where == "in the queue"))]
            for thread in threads:
                thread.start()
            assert there.wait(timeout=10)
            endpoint.stop()
            for thread in threads:
                thread.join(timeout=10)
            ask()
            assert len(server.asked) == 1
    assert len(raised) == len(threads) + 1 and all("cancelled" in words for words in raised)


def test_an_interrupt_stops_endpoints_unless_it_is_caught(served):
    _, endpoint, _ = served(lambda asked: Says("Hi"))
    caught = []
    before = signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        with stopped_by_interrupts([endpoint]):
            signal.raise_signal(signal.SIGINT)
            assert caught and endpoint.complete(HELLO).text == "Hi"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with stopped_by_interrupts([endpoint]):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(EndpointError, match="cancelled"):
                endpoint.complete(HELLO)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with stopped_by_interrupts([endpoint]):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_endpoint_that_is_forgotten_ends_its_thread_too():
    before = sending_threads()
    with LoopbackEndpoint(lambda asked: Says("Hi")) as server:
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "m"))
        endpoint.complete(HELLO)
        assert len(sending_threads() - before) == 1
        del endpoint
    assert sending_threads() == before


def test_a_keyboard_interrupt_cancels_the_request(served, monkeypatch):
    _, endpoint, _ = served(lambda asked: Silence(), timeout_s=30.0)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tbx_envs.endpoints.transport.concurrent.futures.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        endpoint.complete(HELLO)
    monkeypatch.undo()
    assert endpoint._slots.acquire(blocking=False)
    endpoint._slots.release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork")  # other tests of this process have threads, JAX its own
def test_a_forked_process_asks_for_itself(served):
    server, endpoint, _ = served(lambda asked: Says("Hi"), timeout_s=20.0)
    endpoint.complete(HELLO)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(endpoint.complete(HELLO).text != "Hi")
            endpoint.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert endpoint.complete(HELLO).text == "Hi"
    assert len(server.asked) == 3


def test_connections_are_used_again(served):
    server, endpoint, _ = served(lambda asked: Says("Hi"))
    for _ in range(5):
        endpoint.complete(HELLO)
        assert len(server._connections) == 1


def test_it_can_be_asked_inside_a_running_event_loop(served):
    _, endpoint, _ = served(lambda asked: Says("Hi"))

    async def ask():
        return endpoint.complete(HELLO).text

    assert asyncio.run(ask()) == "Hi"


# --- settings and the key -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["sk-proj-1234", "", "A KEY", "Bearer 1234", "1234"])
def test_a_key_in_the_place_of_its_variable_is_an_error_that_does_not_repeat_it(given):
    with pytest.raises(ConfigError, match="api_key_env is no name of a variable") as caught:
        ChatEndpoint(EndpointConfig("http://127.0.0.1:9/v1", "any", api_key_env=given))
    assert "1234" not in str(caught.value)


def test_all_settings_that_cannot_work_are_named_at_once(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = EndpointConfig(
        "ftp://host",
        "",
        api_key_env="NO_SUCH_KEY",
        timeout_s=0.0,
        concurrency=0,
        max_retries=-1,
        extra_body={"stream": True, "n": 2, "top_p": float("nan")},
    )
    with pytest.raises(ConfigError) as raised:
        ChatEndpoint(config)
    for words in ("ftp://host", "model is empty", "timeout_s=0.0", "concurrency=0", "max_retries=-1", "n, stream"):
        assert words in str(raised.value)
    assert "extra_body has no JSON form" in str(raised.value) and "NO_SUCH_KEY" in str(raised.value)


@pytest.mark.parametrize(
    ("base_url", "words"),
    [
        (f"https://me:{KEY.replace('/', '')}@host/v1", "a user, a query or a fragment"),
        (f"https://host/v1?key={KEY}", "a user, a query or a fragment"),
        (f"https://host:port{KEY}/v1", "not a URL"),
        ("host/v1", "http://"),
        ("http:///v1", "a host"),
        ("http://host/v1/chat/completions/", "leave /chat/completions out"),
    ],
)
def test_an_address_that_cannot_work_is_rejected_without_repeating_a_secret(base_url, words):
    with pytest.raises(ConfigError, match=words) as raised:
        ChatEndpoint(EndpointConfig(base_url, "m"))
    assert KEY not in str(raised.value) and KEY.replace("/", "") not in str(raised.value)


def test_a_slash_at_the_end_of_the_address_makes_no_difference(served):
    server, endpoint, _ = served(lambda asked: Says("Hi"))
    with ChatEndpoint(dataclasses.replace(endpoint.config, base_url=server.base_url + "/")) as other:
        other.complete(HELLO)
    assert server.asked[0].path == "/v1/chat/completions"


def everything_of(error):
    """All words of an exception and of those behind it."""
    while error is not None:
        yield from (str(error), repr(error))
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "reply",
    [
        EchoesKey(401),
        EchoesKey(400),
        EchoesKey(500),
        Answers(200, f"not json: {KEY}"),
        Answers(200, {"choices": KEY}),
        Answers(200, {"choices": [], "padding": "x" * 295 + KEY}),
        Answers(403, f"no: {json.dumps(KEY)}"),
        Answers(403, {"error": {"message": "", "key": KEY}}),
        Answers(200, "", {"content-type": f"text/{KEY}"}),
        Cut(),
    ],
)
def test_the_key_is_sent_and_is_in_no_message_log_or_record(served, monkeypatch, caplog, reply):
    monkeypatch.setenv("LOOPBACK_KEY", f"  {KEY}\n")
    caplog.set_level(logging.DEBUG)
    server, endpoint, _ = served(lambda asked: reply, api_key_env="LOOPBACK_KEY", max_retries=1)
    with pytest.raises(EndpointError) as raised:
        endpoint.complete(HELLO)
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    written = [*everything_of(raised.value), repr(endpoint), str(endpoint.totals), repr(endpoint.config), caplog.text]
    assert not [words for words in written if KEY in words or KEY.replace("/", "\\/") in words]
    frames = []
    traceback = raised.value.__traceback__
    while traceback is not None:
        if "endpoint" in traceback.tb_frame.f_code.co_filename and "test_" not in traceback.tb_frame.f_code.co_filename:
            frames.append(repr(traceback.tb_frame.f_locals))
        traceback = traceback.tb_next
    assert frames and KEY not in "".join(frames)


def test_a_key_that_a_server_puts_into_a_completion_goes_no_further(served, monkeypatch):
    monkeypatch.setenv("LOOPBACK_KEY", KEY)
    echo = Says(f"Your key is {KEY}", (("f", json.dumps({"key": KEY})),), reasoning=KEY)
    _, endpoint, _ = served(lambda asked: echo, api_key_env="LOOPBACK_KEY")
    completion = endpoint.complete(HELLO)
    assert KEY not in repr(completion)
    assert completion.text == "Your key is [key]"


def test_a_placeholder_for_a_key_is_not_removed_from_what_a_model_writes(served, monkeypatch):
    monkeypatch.setenv("LOOPBACK_KEY", "EMPTY")
    _, endpoint, _ = served(lambda asked: Says("The list is EMPTY."), api_key_env="LOOPBACK_KEY")
    assert endpoint.complete(HELLO).text == "The list is EMPTY."


def test_the_key_is_read_anew_for_each_request(served, monkeypatch):
    monkeypatch.setenv("LOOPBACK_KEY", "first-key")
    server, endpoint, _ = served(lambda asked: Says("Hi"), api_key_env="LOOPBACK_KEY")
    endpoint.complete(HELLO)
    monkeypatch.setenv("LOOPBACK_KEY", "second-key")
    endpoint.complete(HELLO)
    assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer first-key", "Bearer second-key"]
    monkeypatch.delenv("LOOPBACK_KEY")
    with pytest.raises(EndpointError, match="LOOPBACK_KEY holds no key"):
        endpoint.complete(HELLO)


@pytest.mark.parametrize("wrong", ["sk-two\nlines", "sk-with space", "sk-é"])
def test_a_key_that_no_header_can_hold_is_rejected_without_showing_it(served, monkeypatch, wrong):
    monkeypatch.setenv("LOOPBACK_KEY", wrong)
    with pytest.raises(ConfigError, match="LOOPBACK_KEY") as raised:
        served(lambda asked: Says("Hi"), api_key_env="LOOPBACK_KEY")
    assert wrong not in str(raised.value)


def test_a_proxy_of_the_environment_is_never_asked_for_this_machine(served, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    _, endpoint, _ = served(lambda asked: Says("Hi"))
    assert endpoint.complete(HELLO).text == "Hi"


def test_requests_do_not_drown_the_log_of_a_run_and_other_users_of_httpx_keep_theirs(served, caplog):
    caplog.set_level(logging.INFO)
    server, endpoint, _ = served(lambda asked: Says("Hi"))
    endpoint.complete(HELLO)
    assert caplog.text == ""
    with httpx.Client(trust_env=False) as client:
        client.post(f"{server.base_url}/chat/completions", json={})
    assert "HTTP Request" in caplog.text
