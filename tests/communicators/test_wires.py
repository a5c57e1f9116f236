"""Wires between the ranks of nodes: whoever has no key of theirs gets nowhere, and does no harm."""

from __future__ import annotations

import contextlib

import zmq

from synk.communicators._wires import Wires


def shout(address: str, key: bytes | None, head: bytes = b"stranger") -> zmq.Socket[bytes]:
    """Return a socket that has sent to an inlet, in the clear or with a key."""
    socket = zmq.Context().socket(zmq.PUSH)
    if key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key
    socket.sndtimeo = 2000  # the inlet may close a stranger's connection before all is sent
    socket.connect(address)
    with contextlib.suppress(zmq.Again):
        for _ in range(100):
            socket.send_multipart([head, b"y" * 100])
    return socket


def test_what_an_uninvited_client_sends_gets_nowhere() -> None:
    """It knows the address, which anybody on the machine can read, and has no key or another one."""
    wires = Wires()
    strangers = [shout(wires.address, None), shout(wires.address, zmq.curve_keypair()[0])]
    guests = [shout(wires.address, wires.key, b"guest") for _ in range(2)]
    poll = zmq.Poller()
    poll.register(wires.fd, zmq.POLLIN)
    found: list[bytes] = []
    while len(found) < 200:  # all that the guests send; the strangers have begun before them
        poll.poll(100)
        while (head := wires.receive()) is not None:
            found.append(head)
            wires.drop()
    assert set(found) == {b"guest"}
    for socket in (*strangers, *guests):
        socket.context.destroy(0)
    wires.close()
