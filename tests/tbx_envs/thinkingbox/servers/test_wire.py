"""The wire alone, over a pair of sockets, against a peer that is written by hand."""

import asyncio
import json
import socket

import anyio
import mcp_types as types
import pytest
from mcp.shared.message import SessionMessage

from tbx_envs.thinkingbox.servers import wire as wire_module
from tbx_envs.thinkingbox.servers.wire import Wire


def on_a_wire(scenario):
    """Run `scenario(wire, peer)`, a coroutine, and close both ends."""

    async def run():
        ours, peer = socket.socketpair()
        for end in (ours, peer):
            end.setblocking(False)
        wire = Wire(ours)
        try:
            return await scenario(wire, peer)
        finally:
            wire.close()
            wire.close()
            peer.close()

    return asyncio.run(run())


def request(number, **params):
    return SessionMessage(types.JSONRPCRequest(jsonrpc="2.0", id=number, method="do", params=params))


def answer(number):
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": {"of": number}}).encode()


async def received(peer, loop, until=b"\n"):
    data = b""
    while not data.endswith(until):
        data += await loop.sock_recv(peer, 1 << 16)
    return data


def test_lines_arrive_whole_however_they_are_cut():
    async def scenario(wire, peer):
        loop = asyncio.get_running_loop()
        for number in (1, 2, 3):
            await wire.writer.send(request(number))
        data = answer(1) + b"\n" + answer(3) + b"\n" + answer(2) + b"\n"
        got = []
        for cut in range(len(data)):
            await loop.sock_sendall(peer, data[cut : cut + 1])
            if cut == len(data) // 2:
                got.append((await wire.reader.receive()).message.id)
        got += [(await wire.reader.receive()).message.id for _ in range(2)]
        return got, wire.broken

    assert on_a_wire(scenario) == ([1, 3, 2], None)


def test_what_does_not_fit_into_the_socket_is_sent_when_it_does_and_then_the_half_close():
    async def scenario(wire, peer):
        loop = asyncio.get_running_loop()
        for number in (1, 2):
            await wire.writer.send(request(number, text="x" * 1_000_000))
        wire.half_close()
        with pytest.raises(anyio.BrokenResourceError):
            await wire.writer.send(request(3))
        data = b""
        while more := await loop.sock_recv(peer, 1 << 16):
            data += more
        return [(json.loads(line)["id"], len(json.loads(line)["params"]["text"])) for line in data.splitlines()]

    assert on_a_wire(scenario) == [(1, 1_000_000), (2, 1_000_000)]


def test_a_peer_that_is_gone_is_noticed_and_its_last_words_are_heard():
    async def scenario(wire, peer):
        await wire.writer.send(request(1))
        peer.send(answer(1) + b"\nand then")
        peer.close()
        last = (await wire.reader.receive()).message.id
        with pytest.raises(anyio.EndOfStream):
            await wire.reader.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await wire.writer.send(request(2))
        wire.half_close()
        return last, wire.broken

    assert on_a_wire(scenario) == (1, "it wrote 'and then' and closed its stdout")


def test_a_reader_that_waits_is_woken_by_the_end():
    async def scenario(wire, peer):
        waiting = asyncio.ensure_future(anext(wire.reader, "ended"))
        await asyncio.sleep(0)
        peer.shutdown(socket.SHUT_WR)
        return await waiting

    assert on_a_wire(scenario) == "ended"


def test_a_line_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(wire_module, "_LINE_LIMIT_BYTES", 1 << 20)

    async def scenario(wire, peer):
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(loop.sock_sendall(peer, b"x" * (3 << 20)))
        with pytest.raises(anyio.EndOfStream):
            await wire.reader.receive()
        sending.cancel()
        return wire.broken

    assert on_a_wire(scenario) == "it wrote a line of more than 1 MiB to its stdout"


@pytest.mark.parametrize("spelling", ["1", '"1"'])
def test_an_answer_is_known_by_its_number_however_it_is_spelt(spelling):
    async def scenario(wire, peer):
        await wire.writer.send(request(1))
        peer.send(b'{"jsonrpc": "2.0", "id": ' + spelling.encode() + b', "result": {}}\n')
        return (await wire.reader.receive()).message.result

    assert on_a_wire(scenario) == {}
