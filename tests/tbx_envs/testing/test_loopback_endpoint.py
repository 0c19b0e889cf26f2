import json
import threading
import urllib.error
import urllib.request

import pytest

from tbx_envs.testing.loopback_endpoint import Answers, LoopbackEndpoint, Says, Silence, in_order


def ask(server, body):
    request = urllib.request.Request(
        f"{server.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-name": "Value"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return json.load(answer)


def test_it_answers_as_the_script_says_and_keeps_what_it_was_asked():
    with LoopbackEndpoint(in_order(Says("Hi", usage=None), Says("", (("f", "{}"),)), Answers(body=[1]))) as server:
        first, second, third, fourth = (ask(server, {"n": n}) for n in range(4))
    assert first["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    ]
    assert "usage" not in first and second["usage"]["prompt_tokens"] == 100
    call = {"id": "sent_1_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert second["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert third == fourth == [1]
    assert [(asked.number, asked.path, asked.body) for asked in server.asked] == [
        (n, "/v1/chat/completions", {"n": n}) for n in range(4)
    ]
    assert server.asked[0].headers["x-name"] == "Value"
    assert server.most_at_once == 1


def test_a_script_that_raises_is_answered_with_500_and_its_words():
    def reply(asked):
        raise ValueError("no such task")

    with LoopbackEndpoint(reply) as server:
        with pytest.raises(urllib.error.HTTPError, match="500") as raised:
            ask(server, {})
        with raised.value as error:
            assert "ValueError: no such task" in json.load(error)["error"]["message"]


def test_closing_ends_silent_connections_and_all_threads():
    before = threading.active_count()
    there = threading.Event()

    def reply(asked):
        there.set()
        return Silence()

    def ask_in_vain():
        with pytest.raises(OSError):
            ask(server, {})

    server = LoopbackEndpoint(reply)
    client = threading.Thread(target=ask_in_vain)
    client.start()
    assert there.wait(timeout=10)
    server.close()
    server.close()
    client.join(timeout=10)
    assert threading.active_count() == before
