"""A pre-fork server of the standard library: one socket, so many processes that answer on it.

    SCORER_WEIGHTS=weights.safetensors python serve.py --workers 4 --port 8000

A worker that dies is replaced; SIGTERM and SIGINT end all. For the real thing use gunicorn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

told_to_end: list[bool] = []


class QuietHandler(WSGIRequestHandler):
    """Logs nothing, and waits for no client that has nothing to say: it would keep its worker from all others."""

    timeout = 2  # seconds

    def handle(self) -> None:
        """Answer one request, if it comes."""
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, *_: Any) -> None: ...


def work(listener: socket.socket) -> None:
    """Answer until told to end: the whole life of a worker."""
    from app import application  # here, so that each worker opens the weights by itself

    server = WSGIServer(listener.getsockname()[:2], QuietHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.set_app(application)
    server.timeout = 0.5  # seconds until it looks whether it was told to end
    while not told_to_end:
        server.handle_request()


def start(listener: socket.socket) -> int:
    """Fork a worker; its process id."""
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: told_to_end.append(True))
        work(listener)
        sys.exit()  # in order, which withdraws what it published
    return pid


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description="Serve the example with so many processes.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", arguments.port), backlog=128)
    listener.setblocking(False)  # all are woken for a request, and one gets it: the others must not wait for the next
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
    workers = {start(listener) for _ in range(arguments.workers)}

    def end(*_: Any) -> None:
        told_to_end.append(True)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    while workers:
        pid, _ = os.wait()
        workers.discard(pid)
        if not told_to_end:
            workers.add(start(listener))


if __name__ == "__main__":
    main()
