"""Starting and reaching Ray: mistakes are told at once."""

import socket
import time

import pytest

from cluster import local
from kernelband.errors import RunFailed


def test_an_address_where_nothing_listens_is_told_within_seconds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=f"no Ray answers at 127.0.0.1:{port}"), local.session(f"127.0.0.1:{port}"):
        pass
    assert time.monotonic() - begin < 30
