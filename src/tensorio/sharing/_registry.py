"""Names of what is shared on this host: one small file per name, in a folder of the user's own.

::

    /dev/shm/tensorio-UID/            mode 0700; 0711 once something is published to other users
        NAME.json                     who has it, and what it must be (`tensorio.sharing._manifest`)
        NAME.lock                     held (flock) by whoever publishes or withdraws NAME
        NAME.TOKEN.segment            the bytes of what outlives its publisher

The folder is in memory, as what it names is, and does not outlive it; it does
not depend on the session a process belongs to. ``TENSORIO_REGISTRY`` names
another one: for containers that share a volume, and for tests.

Nothing in it is trusted before it was looked at: the folder and its files must
belong to the user asked for, nobody else may be able to write there, and no
link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Any

from tensorio.errors import PublicationError, UnsupportedError, escaped
from tensorio.sharing._segments import open_file

__all__ = ["Registry", "split_name"]

VARIABLE = "TENSORIO_REGISTRY"
SHARED_MEMORY = "/dev/shm"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MANIFEST_MAX = 1 << 20  # bytes; real ones have under 1 KiB
GRACE = 2.0  # seconds; withdrawing a name holds its lock for a moment
_POLL = 0.005, 0.05  # seconds between looks at a lock: at first, at last

_held: set[int] = set()  # locks of this process; a forked child must not hold them on


def _drop_locks() -> None:
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_locks)


def split_name(name: str) -> tuple[int | None, str]:
    """Split ``USER:NAME`` into the user's id (None: this process's) and the name.

    Raises
    ------
    ValueError
        No name can be like that.
    """
    user, colon, rest = name.rpartition(":")
    if not NAME.fullmatch(rest):
        raise ValueError(f"a name is 1 to 100 letters, digits, '.', '_' and '-', not {escaped(rest)}")
    return (_user_id(user) if colon else None), rest


def _user_id(user: str) -> int:
    if user.isdecimal():
        return int(user)
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ValueError(f"no user called {escaped(user)} on this host") from None


class Registry:
    """The folder of one user's names.

    Parameters
    ----------
    user : int, optional
        Whose; this process's own if not given.
    create : bool
        Make the folder if there is none.

    Attributes
    ----------
    folder : str

    Raises
    ------
    FileNotFoundError
        There is no such folder.
    PublicationError
        The folder is not to be trusted.
    UnsupportedError
        The system has no such folders.
    """

    def __init__(self, user: int | None = None, *, create: bool = False) -> None:
        if os.name != "posix":
            raise UnsupportedError("names need a POSIX system; pass the Publication itself to the other processes")
        self.user = os.geteuid() if user is None else user
        self.folder = _folder_of(self.user)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
        # What others may go through they may not list; a handle to go through is enough.
        way = os.O_RDONLY if self.user == os.geteuid() else getattr(os, "O_PATH", os.O_RDONLY)
        flags = way | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.folder, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise self._distrusted("it is a link or no folder") from None
            raise
        try:
            self._check_folder()
        except BaseException:
            self.close()
            raise

    def _check_folder(self) -> None:
        status = os.fstat(self._fd)
        if status.st_uid != self.user:
            raise self._distrusted(f"it belongs to user {status.st_uid}, expected {self.user}")
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise self._distrusted(f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it")

    def _distrusted(self, why: str) -> PublicationError:
        return PublicationError(f"refused to use the folder of published names: {why}", path=self.folder)

    def close(self) -> None:
        """Let go of the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -------------------------------------------------------------------- names

    def names(self) -> list[str]:
        """Return all names, sorted; those of another user can't be listed, only asked for."""
        found = (entry.removesuffix(".json") for entry in os.listdir(self._fd) if entry.endswith(".json"))
        return sorted(name for name in found if NAME.fullmatch(name))

    def path(self, name: str) -> str:
        """Return the path of a name's manifest, for messages."""
        return os.path.join(self.folder, f"{name}.json")

    def read(self, name: str) -> dict[str, Any] | None:
        """Return what a manifest says; None if there is none.

        Raises
        ------
        PublicationError
            It is not this user's, a link, too large, or no JSON.
        """
        try:
            fd = open_file(f"{name}.json", self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self.damaged(name, "it is a link") from None
            raise
        try:
            text = self._text(name, fd)
        finally:
            os.close(fd)
        import json

        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise self.damaged(name, "it is no JSON") from None
        if not isinstance(values, dict):
            raise self.damaged(name, "it is no JSON object")
        return values

    def _text(self, name: str, fd: int) -> bytes:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self.damaged(name, "it is no regular file")
        if status.st_uid != self.user:
            raise self.damaged(name, f"it belongs to user {status.st_uid}, expected {self.user}")
        if status.st_mode & 0o022:
            raise self.damaged(name, "others may write to it")
        if status.st_size > MANIFEST_MAX:
            raise self.damaged(name, f"it has {status.st_size} bytes")
        return os.read(fd, MANIFEST_MAX)

    def damaged(self, name: str, why: str) -> PublicationError:
        """Return the error that refuses a manifest."""
        return PublicationError(
            f"refused the manifest of the published name {escaped(name)}: {why}; publish with replace=True, or "
            "remove it", path=self.path(name)
        )  # fmt: skip

    def write(self, name: str, manifest: object, mode: int = 0o600) -> None:
        """Make or replace a manifest, at once for whoever looks."""
        import json

        if mode & 0o077:
            os.fchmod(self._fd, 0o711)  # others can reach what they know the name of
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            os.write(fd, json.dumps(manifest).encode())
            os.fchmod(fd, mode & ~0o022)
            os.replace(temporary, f"{name}.json", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._unlink(temporary)
            raise
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a manifest, if there is one."""
        self._unlink(f"{name}.json")

    def _unlink(self, entry: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=self._fd)

    # ----------------------------------------------------------------- segments

    def new_segment(self, name: str) -> str:
        """Return a file name for the bytes of what outlives its publisher."""
        return f"{name}.{secrets.token_hex(8)}.segment"

    def remove_segments(self, name: str, but: str | None = None) -> int:
        """Remove the bytes of a name, also those that a publisher who died left behind; return how many there were."""
        ours = re.compile(re.escape(name) + r"\.[0-9a-f]{16}\.segment")
        found = [entry for entry in os.listdir(self._fd) if ours.fullmatch(entry) and entry != but]
        for entry in found:
            self._unlink(entry)
        return len(found)

    def open_segment(self, entry: str) -> int:
        """Open the bytes of a name, read-only; through no link, and out of no other folder."""
        return open_file(os.path.basename(entry), self._fd)

    # -------------------------------------------------------------------- locks

    @contextlib.contextmanager
    def locked(self, name: str, wait: float | None = 0, grace: float = GRACE) -> Iterator[None]:
        """Be the only process (and thread) that publishes or withdraws a name.

        The kernel drops the lock of a process that dies, so that nobody waits
        for the dead.

        Parameters
        ----------
        wait : float or None
            Seconds to wait for another one; None: as long as it takes.
        grace : float
            Seconds to wait at least.

        Raises
        ------
        PublicationError
            Another process is at it still.
        """
        fd = self._lock(name, None if wait is None else time.monotonic() + max(wait, grace))
        _held.add(fd)
        try:
            yield
        finally:
            if fd in _held:  # not in a child that was forked meanwhile
                self._unlink(f"{name}.lock")
                _held.discard(fd)
                os.close(fd)

    def _lock(self, name: str, deadline: float | None) -> int:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        pause, longest = _POLL
        while True:
            fd = os.open(f"{name}.lock", flags, 0o600, dir_fd=self._fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(name, fd):
                    return fd
            except BlockingIOError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if deadline is not None and time.monotonic() >= deadline:
                raise PublicationError(f"another process is still publishing the name {escaped(name)}; try again later")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _is_current(self, name: str, fd: int) -> bool:
        """Whether the lock is the one that others will look at, and not one that was removed meanwhile."""
        try:
            status = os.stat(f"{name}.lock", dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == os.fstat(fd).st_ino


def _folder_of(user: int) -> str:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return os.path.abspath(chosen)
    if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return f"{SHARED_MEMORY}/tensorio-{user}"
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"tensorio-{user}")
