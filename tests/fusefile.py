"""A filesystem of one file, over the kernel's FUSE protocol: a disk where every request has its price.

``python fusefile.py FILE MOUNTPOINT LOG SECONDS [BAD]`` serves FILE as ``MOUNTPOINT/FILE's name``, read-only, each
read after a wait of so many seconds, and writes offset and size of each to LOG, until the mount is taken away. Reads
with byte BAD in them fail with EIO. The numbers are those of ``include/uapi/linux/fuse.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

REQUEST, ANSWER = 40, 16  # bytes of the two headers
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = (
    1, 2, 3, 14, 15, 18, 25, 26, 36, 38, 42,
)  # fmt: skip
ASYNC_READ, MAX_PAGES = 1, 1 << 22
PAGES = 256  # of a read at most
THREADS = 16
ROOT_NODE, FILE_NODE = 1, 2
FOREVER = 1 << 30  # seconds that the kernel may trust an answer


def number(size: int, *values: int) -> bytes:
    return b"".join(value.to_bytes(size, "little", signed=value < 0) for value in values)


class Server:
    """Answers requests of the kernel."""

    def __init__(self, fd: int, path: Path, log: Path, wait: float, bad: int = -1) -> None:
        self.fd, self.path, self.wait, self.bad = fd, path, wait, bad
        self.file = os.open(path, os.O_RDONLY)
        self.log = log.open("a", buffering=1)

    def attributes(self, node: int) -> bytes:
        size = os.fstat(self.file).st_size if node == FILE_NODE else 0
        mode = 0o100644 if node == FILE_NODE else 0o040755
        return number(8, node, size, -(-size // 512), 1, 1, 1) + number(4, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, code: int, node: int, body: bytes) -> bytes | int | None:
        """Bytes, or an errno, or None if there is to be no answer."""
        if code == INIT:
            readahead = body[8:12]
            return (number(4, 7, 31) + readahead + number(4, ASYNC_READ | MAX_PAGES) + number(2, 32, 24)
                    + number(4, PAGES * 4096, 1) + number(2, PAGES, 0) + bytes(32))  # fmt: skip
        if code == LOOKUP:
            if body.rstrip(b"\0") != os.fsencode(self.path.name):
                return errno.ENOENT
            return number(8, FILE_NODE, 0, FOREVER, FOREVER) + number(4, 0, 0) + self.attributes(FILE_NODE)
        if code == GETATTR:
            return number(8, FOREVER) + number(4, 0, 0) + self.attributes(node)
        if code == OPEN:
            return bytes(16)
        if code == READ:
            offset, size = int.from_bytes(body[8:16], "little"), int.from_bytes(body[16:20], "little")
            self.log.write(f"{offset} {size}\n")
            time.sleep(self.wait)
            if offset <= self.bad < offset + size:
                return errno.EIO
            return os.pread(self.file, size, offset)
        if code in (RELEASE, FLUSH, DESTROY):
            return b""
        return None if code in (FORGET, BATCH_FORGET, INTERRUPT) else errno.ENOSYS

    def run(self) -> None:
        while True:
            try:
                request = os.read(self.fd, (PAGES * 4096) + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # unmounted
            code, unique = int.from_bytes(request[4:8], "little"), request[8:16]
            found = self.answer(code, int.from_bytes(request[16:24], "little"), request[REQUEST:])
            if found is not None:
                error, data = (-found, b"") if isinstance(found, int) else (0, found)
                os.write(self.fd, number(4, ANSWER + len(data), error) + unique + data)


def serve(path: Path, mountpoint: Path, log: Path, wait: float, bad: int) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
    libc = ctypes.CDLL(None, use_errno=True)
    nosuid_nodev = 2 | 4
    if libc.mount(b"onefile", os.fsencode(mountpoint), b"fuse.onefile", nosuid_nodev, options.encode()):
        sys.exit(f"can't mount: {os.strerror(ctypes.get_errno())}")
    server = Server(fd, path, log, wait, bad)
    threads = [threading.Thread(target=server.run, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def served(path: Path, folder: Path, wait: float, bad: int = -1) -> Iterator[tuple[Path, Path] | None]:
    """Serve a file by a process of its own: where it is then, and the log of reads; None if that can't be done here."""
    mountpoint, log = folder / "mount", folder / "log"
    mountpoint.mkdir()
    log.touch()
    command = [sys.executable, __file__, str(path), str(mountpoint), str(log), str(wait), str(bad)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield (mountpoint / path.name, log) if process.stdout.readline() == "ready\n" else None
    finally:
        lazily = 2
        ctypes.CDLL(None).umount2(os.fsencode(mountpoint), lazily)
        process.kill()
        process.communicate()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), int((*sys.argv, "-1")[5]))
