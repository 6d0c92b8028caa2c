"""A WSGI application that answers from weights which all workers share.

    SCORER_WEIGHTS=weights.safetensors gunicorn -w 4 app:application
    SCORER_WEIGHTS=weights.safetensors python serve.py --workers 4

``/?text=...`` scores a text; ``/memory`` shows what all workers have in memory (``/memory?json``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any
from urllib.parse import parse_qs

import memory
import numpy as np
from scorer import Array, score

import tensorio

WEIGHTS = os.environ.get("SCORER_WEIGHTS", "weights.safetensors")
COPY = os.environ.get("SCORER_COPY") == "1"  # for comparison: every worker has its own


@cache
def weights() -> tuple[Mapping[str, Array], int]:
    """Return this worker's weights, and the inode of the memory that they are in (0: this worker's own).

    The first worker to ask publishes them: a file that can be mapped as it is gets a name and
    nothing else, anything else is laid out in memory, once. The others use what is there.
    """
    if COPY:
        return dict(np.load(WEIGHTS)), 0
    name = "scorer-" + hashlib.sha256(os.path.abspath(WEIGHTS).encode()).hexdigest()[:16]
    publication = tensorio.publish(WEIGHTS, name, exist_ok=True)
    return publication.open(), os.fstat(publication.fileno()).st_ino


def warm_up() -> None:
    """Read all weights once, so that no request waits for the disk."""
    for array in weights()[0].values():
        array.reshape(-1).view(np.uint8)[::4096].max()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer one request."""
    query = environ.get("QUERY_STRING", "")
    if environ["PATH_INFO"] == "/memory":
        rows = memory.of_workers(weights()[1])
        body, kind = (json.dumps(rows), "application/json") if query == "json" else (memory.table(rows), "text/plain")
    elif environ["PATH_INFO"] == "/":
        text = parse_qs(query).get("text", [""])[0]
        answer = {"score": score(weights()[0], text), "text": text, "worker": os.getpid()}
        body, kind = json.dumps(answer), "application/json"
    else:
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are / and /memory\n"]
    start_response("200 OK", [("Content-Type", kind)])
    return [body.encode()]


warm_up()  # in each worker; with gunicorn --preload once, before it forks
