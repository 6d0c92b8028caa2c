"""Steps at an address that fsspec knows: object stores have no rename, so the note is put last, and makes the step.

A step is there if its ``step.json`` is, and is whole. Its files are put before
that, and it is the first thing that goes. A checkpoint is written to a local
folder and put; to be read, it is fetched to one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Iterator

from tensorio.errors import FormatError, TruncatedError, UnsupportedError
from tensorio.manager._local import name_of_step, step_of_name
from tensorio.manager._note import NOTE, PINNED, StepInfo, check_files, decode
from tensorio.writing.temporaries import made_folder

__all__ = ["RemoteSteps"]


class RemoteSteps:
    """The steps below an address. One writer at a time: there is no lock."""

    sha256 = True  # what object stores are asked about

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UnsupportedError(
                "checkpoints at an address need fsspec: pip install 'tensorio[remote]'", path=url
            ) from None
        self.place = url
        self._fs, self._root = url_to_fs(url)

    def path(self, step: int) -> str:
        """Return the address of a step."""
        return posixpath.join(self.place, name_of_step(step))

    def _at(self, step: int, name: str = "") -> str:
        return posixpath.join(self._root, name_of_step(step), name).rstrip("/")

    def prepare_writing(self) -> None:
        """Make the folder, where there is such a thing."""
        self._fs.makedirs(self._root, exist_ok=True)

    def close(self) -> None:
        """Nothing is held."""

    # --------------------------------------------------------------- reading

    def numbers(self) -> list[int]:
        """Return the steps whose note is there and whole, in order."""
        there = []
        for step in self._numbered():
            with contextlib.suppress(FormatError, FileNotFoundError):
                self.info(step)
                there.append(step)
        return there

    def _numbered(self) -> list[int]:
        """Steps of which there is something."""
        self._fs.invalidate_cache()
        try:
            names = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        steps = (step_of_name(posixpath.basename(name.rstrip("/"))) for name in names)
        return sorted(step for step in steps if step is not None)

    def info(self, step: int) -> StepInfo:
        """Return what a step's note says."""
        return decode(self._fs.cat_file(self._at(step, NOTE)), posixpath.join(self.path(step), NOTE))

    def pinned(self, step: int) -> bool:
        """Tell whether a step stays, whatever the rules say."""
        return bool(self._fs.exists(self._at(step, PINNED)))

    def check(self, step: int, *, deep: bool) -> None:
        """Raise unless a step is whole; with `deep`, its files are fetched."""
        if deep:
            with self.fetched(step) as folder:
                check_files(folder, self.info(step), deep=True)
            return
        for file in self.info(step).files:
            nbytes = self._fs.info(self._at(step, file.name))["size"]
            if nbytes != file.nbytes:
                path = posixpath.join(self.path(step), file.name)
                raise TruncatedError(f"expected {file.nbytes} bytes, found {nbytes}", path=path)

    @contextlib.contextmanager
    def fetched(self, step: int) -> Iterator[str]:
        """Yield a local folder with the files of a step; it is removed at the end, what is mapped of it stays."""
        import tempfile

        with tempfile.TemporaryDirectory(prefix="tensorio-") as folder:
            for file in self.info(step).files:
                path = os.path.join(folder, file.name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                self._fs.get_file(self._at(step, file.name), path)
            yield folder

    # --------------------------------------------------------------- writing

    @contextlib.contextmanager
    def staged(self, step: int, *, overwrite: bool) -> Iterator[str]:
        """Yield an empty local folder whose files are put at the end, the note last."""
        import tempfile

        with made_folder(tempfile.gettempdir(), name_of_step(step), 0o700) as folder:
            yield folder
            self._clear(step)  # of an older save that did not come to its end, or is to be replaced
            try:
                self._put(folder, step)
            except BaseException:
                with contextlib.suppress(Exception):  # whatever the filesystem raises, the first error counts
                    self._clear(step)
                raise

    def _put(self, folder: str, step: int) -> None:
        names = [
            os.path.relpath(os.path.join(place, name), folder).replace(os.sep, "/")
            for place, _, files in os.walk(folder)
            for name in files
        ]
        for name in sorted(names, key=lambda name: (name == NOTE, name)):
            target = self._at(step, name)
            self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
            local = os.path.join(folder, name)
            self._fs.put_file(local, target)
            put, nbytes = self._fs.info(target)["size"], os.path.getsize(local)
            if put != nbytes:
                raise OSError(errno.EIO, f"{nbytes} bytes were put, {put} are there", target)

    def _clear(self, step: int) -> None:
        """Remove what there is of a step, the note first: without it, the rest is no step."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(step, NOTE))
        if self._fs.exists(self._at(step)):
            self._fs.rm(self._at(step), recursive=True)

    def pin(self, step: int, pinned: bool) -> None:
        """Let a step stay, or not any longer."""
        if pinned:
            self._fs.pipe_file(self._at(step, PINNED), b"")
            return
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(step, PINNED))

    def remove(self, step: int) -> None:
        """Take a step away."""
        self._clear(step)

    def put_aside(self, step: int) -> str:
        """Not offered: there is no rename."""
        raise UnsupportedError("steps at an address can't be moved aside, only removed", path=self.path(step))

    def settle(self) -> None:
        """Nothing is to be synced."""
