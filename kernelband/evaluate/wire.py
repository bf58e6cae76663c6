"""Messages between the trusted side and a sandboxed child, as the trusted side sends and reads them.

Owns: framing (4-byte little-endian length, then UTF-8 JSON of at most 1 MiB), deadlines, and the checks of form on bytes
that a hostile process wrote. Never: uses pickle, accepts descriptors, or looks at what a well-formed reply claims.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 16


def clean(text: str, limit: int) -> str:
    """The last ``limit`` characters, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text[-limit:])


class Malformed(Exception):
    """Bytes that are no message; the text says why."""


class Late(Exception):
    """The deadline has passed."""


def _wait(connection: socket.socket, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(math.ceil(left * 1000)):
        raise Late


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int], deadline: float) -> None:
    """Send one message with descriptors. Raises ValueError when it is over 1 MiB, Late, OSError when no one reads."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the request has {len(body)} bytes, more than {MAX_MESSAGE_BYTES}")
    data = memoryview(struct.pack("<I", len(body)) + body)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    while data:
        _wait(connection, select.POLLOUT, deadline)
        with contextlib.suppress(BlockingIOError):
            data = data[connection.sendmsg([data], rights, socket.MSG_DONTWAIT) :]
            rights = []


def receive(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """One reply, None at the end of the stream. Raises Malformed, Late, OSError.

    Descriptors that came along are dropped by the kernel, as no room is given for them.
    """
    data = bytearray()
    needed = 4
    while len(data) < needed:
        _wait(connection, select.POLLIN, deadline)
        try:
            chunk = connection.recv(needed - len(data), socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        if not chunk:
            return None
        data += chunk
        if needed == 4 and len(data) == 4:
            needed += struct.unpack("<I", data)[0]
            if needed > MAX_MESSAGE_BYTES + 4:
                raise Malformed(f"a message of {needed - 4} bytes was announced")
    return _parse(bytes(data[4:]))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body.decode(), parse_float=_finite, parse_constant=_finite)
        json.dumps(message, ensure_ascii=False).encode()  # refuses half surrogates, which no file could store
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:300]) from None
    if not isinstance(message, dict) or not isinstance(message.get("ok"), bool):
        raise Malformed("the message is no reply")
    if not message["ok"] and not all(isinstance(message.get(k), str) for k in ("kind", "message", "traceback", "stage")):
        raise Malformed("the message is no error reply")
    return message
