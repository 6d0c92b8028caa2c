"""What of `Checkpoint` moves bytes: copies of tensors, reading ahead of use, passing by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from tensorio.checkpoint._prefetch import Prefetch
from tensorio.errors import TensorMismatchError

if TYPE_CHECKING:
    import numpy as np

    from tensorio.checkpoint._checkpoint import Checkpoint

    Array = np.ndarray[Any, Any]
    Progress = Callable[[int, int], object]

__all__ = ["Moving"]


class Moving(Mapping[str, "Array"]):
    """A part of `tensorio.Checkpoint`."""

    _prefetches: list[Prefetch]

    @property
    def _checkpoint(self) -> Checkpoint:
        return cast("Checkpoint", self)

    def read(self, fqn: str, index: Any = (), out: Array | None = None) -> Array:
        """Return a copy of one tensor or of a part of it.

        Parameters
        ----------
        fqn : str
        index : int, slice, tuple, ...
            Anything NumPy takes; only the bytes it selects are touched.
        out : ndarray, optional
            Written to and returned; must have the shape and dtype of the result.

        Raises
        ------
        TensorMismatchError
            `out` does not fit.
        """
        import numpy as np

        part = self[fqn][index]
        if out is None:
            return np.array(part)
        if out.shape != np.shape(part) or out.dtype != part.dtype:
            raise TensorMismatchError(
                f"out= does not fit: expected {np.shape(part)} {part.dtype}, found {out.shape} {out.dtype}", record=fqn
            )
        out[...] = part
        return out

    def read_into(
        self, out: Mapping[str, Any], *, progress: Progress | None = None, threads: int | None = None
    ) -> None:
        """Read tensors straight into buffers of the caller's, in parallel.

        Parameters
        ----------
        out : mapping of str to ndarray or writable buffer
            Where each tensor goes: an array of its shape and dtype, of any strides; or a contiguous buffer of as many
            bytes as the tensor has in C order.
        progress : callable, optional
            Called as ``progress(done, total)`` in bytes, by several threads, but one at a time.
        threads : int, optional
            As many as there are cores if not given.

        Raises
        ------
        TensorMismatchError
            Something in `out` does not fit; nothing was written to.
        TensorNotFoundError
            A name is not there; likewise.
        FormatError
            The file changed since it was opened; what was written is not to be used.

        Notes
        -----
        From files, contiguous bytes go by ``pread`` into contiguous targets, with no copy between: large tensors in
        pieces of 8 MiB, small neighbours in one call. Python's lock is released throughout.
        """
        from tensorio.checkpoint._into import read_into

        read_into(self._checkpoint, out, progress, threads)

    def prefetch(
        self,
        fqns: Iterable[str] | None = None,
        *,
        window: int | None = None,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Prefetch:
        """Bring tensors into memory ahead of use, in the background.

        Parameters
        ----------
        fqns : iterable of str, optional
            In the order of first use; all tensors in the order of the table if not given.
        window : int, optional
            Bytes that may be ahead of the consumer, at most a quarter of the memory that the system and the process'
            control group have left; that quarter if not given.
        wait : bool
            Return when all is in memory or the window is full.
        progress : callable, optional
            Called as ``progress(done, total)`` in bytes, by a background thread.

        Returns
        -------
        Prefetch
            To wait for, to advance, to cancel; `close` cancels it.

        Raises
        ------
        TensorNotFoundError
            A name is not there.

        Notes
        -----
        Pages of mapped files are populated in steps of 32 MiB; on disks where page faults are dear, they are read by
        large reads into the page cache. Asking for ``checkpoint[fqn]`` tells that what is before it in the order was
        used, and moves the window.
        """
        ahead = Prefetch(self._checkpoint, self if fqns is None else fqns, window, progress)
        self._prefetches = [p for p in self._prefetches if not p.ended] + [ahead]
        if wait:
            ahead.wait()
        return ahead

    def stream(
        self, fqns: Iterable[str] | None = None, *, window: int | None = None, evict: bool = False
    ) -> Iterator[tuple[str, Array]]:
        """Yield names and arrays in the order of the file, for a reader that needs each once.

        Parameters
        ----------
        fqns : iterable of str, optional
            All tensors if not given.
        window : int, optional
            Bytes to read ahead of the reader; 128 MiB if not given, see `prefetch`.
        evict : bool
            Also drop what was read from the page cache, so that a file larger than memory drives nothing else out.

        Yields
        ------
        (str, ndarray)
            A view; valid for as long as it is kept, but pages behind the reader are let go: looking at an earlier
            tensor again reads it again, from the page cache or the disk.

        Notes
        -----
        What is resident stays within the window, 32 MiB behind the reader, and the tensor at hand.
        """
        from tensorio.checkpoint._passing import in_passing

        return in_passing(self._checkpoint, fqns, window, evict)
