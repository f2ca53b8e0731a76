"""The short cut from messages to a connection."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from frontend.http import BoundedHttpProtocol


async def closed_transport() -> asyncio.Transport:
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    theirs.close()
    transport.abort()
    await asyncio.sleep(0.01)
    assert transport.is_closing()
    return transport


def test_a_connection_that_is_gone_takes_no_more_text_and_harms_nobody() -> None:
    """A message may bring text for a client that has just left: every other stream goes through the same call."""

    async def write_after_close() -> None:
        connection = BoundedHttpProtocol.__new__(BoundedHttpProtocol)
        connection.transport = await closed_transport()
        connection.write_chunk(b"text")
        connection.cut()

    uvloop.run(write_after_close())
