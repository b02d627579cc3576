"""Servers of other packages in a process of their own, which answer on a free port of this machine."""

import http.client
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STARTING_S = 600


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def started(command: Sequence[str], port: int, output: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a server for a block, once it answers. ``output`` gets what it prints."""
    with output.open("w") as out:
        server = subprocess.Popen(list(command), env=dict(environment), stdout=out, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, server, output)
            yield
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until the server answers. Fail with what it printed if it ends."""
    ends = time.monotonic() + STARTING_S
    while time.monotonic() < ends:
        assert server.poll() is None, output.read_text()[-4000:]
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.25)
    raise TimeoutError(output.read_text()[-4000:])
