"""Lines of ranks that share a terminal."""

import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_line_is_one_write_also_without_a_buffer_or_ranks_write_into_each_others_lines(stream):
    """torchrun starts ranks with ``-u``; a socket of packets keeps writes apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = {"stdout" if stream == "out" else "stderr": theirs}
    code = f"from dit_train import console; console.{stream}('one'); console.{stream}('two\\nlines')"
    with ours, theirs:
        ours.settimeout(60)
        subprocess.run([sys.executable, "-u", "-c", code], check=True, **place)
        assert [ours.recv(100), ours.recv(100)] == [b"one\n", b"two\nlines\n"]
