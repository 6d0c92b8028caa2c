"""The public functions of sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tensorio import allowing
from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.checkpoint._options import reading_options
from tensorio.sharing._attach import Published, attach_to, published_names, unpublish_name
from tensorio.sharing._publication import Publication

__all__ = ["attach", "publish", "published", "unpublish"]

Progress = Callable[[int, int], object]


def publish(
    source: Any,
    name: str | None = None,
    *,
    format: str | None = None,
    huge_pages: bool = False,
    dequantize: bool = False,
    mode: int = 0o600,
    persistent: bool = False,
    replace: bool = False,
    exist_ok: bool = False,
    timeout: float | None = None,
    unknown: str = "error",
    allow: Iterable[type] = (),
    key: Any = None,
    progress: Progress | None = None,
) -> Publication:
    """Put tensors where every process of this host can map them, once.

    A file whose bytes can be mapped as they are is not copied: it is only given
    a name. All else (packed, unaligned or foreign-endian tensors, remote files,
    objects in memory) is laid out once, in a memory segment that nobody can
    change or shrink any more.

    Parameters
    ----------
    source : str, os.PathLike, Checkpoint, buffer, file object or object
        A checkpoint, or an address for fsspec (see `open`); or NumPy arrays and
        torch tensors in nested dicts and lists, as for `save`.
    name : str, optional
        What `attach` finds it by: up to 100 letters, digits, ``.``, ``_``, ``-``.
        Without one it is shared by passing the `Publication` itself.
    format : str, optional
        Of `source`; see `open`.
    huge_pages : bool
        Lay it out in huge pages, those set aside by the administrator or else
        those that the kernel makes; ``.pages`` says which were had.
    dequantize : bool
        Share quantized tensors as the float32 tensors that they stand for.
    mode : int
        Who may attach to a persistent name, as a file's mode: ``0o640`` the
        group, ``0o644`` everybody, as ``attach("user:name")``.
    persistent : bool
        Keep it until `unpublish`, or until the machine is started anew; in a
        file in memory, which can't be sealed. Otherwise it lives as long as this
        process.
    replace : bool
        Take a name that is in use. Who is attached keeps what it has; who
        attaches from now on gets the new one.
    exist_ok : bool
        Use what is published under that name, if anything is; wait for it if
        another process is publishing it just now. The name then lives as long
        as any of these processes.
    timeout : float, optional
        Seconds to wait for another process that is publishing the name; as
        long as it takes if not given.
    unknown, allow
        See `open`; `attach` reads with the same `unknown`.
    key
        See `open`; for a `source` that is not opened yet. What is published is
        not encrypted: it is memory, which `mode` says who may attach to.
    progress : callable, optional
        Called as ``progress(done, total)`` in bytes that are laid out.

    Returns
    -------
    Publication
        A name is kept until it is closed or this process ends, even if nobody
        keeps the object.

    Raises
    ------
    NameTakenError
        The name is in use; the message names the process. With ``exist_ok=True``: in use by what goes with its
        process, and it is to be persistent.
    PublicationError
        Another process is publishing it still; or the folder of names is not
        to be trusted.
    OSError
        ENOMEM: it needs more memory than this machine or container has left.
    ValueError
        Arguments that contradict each other.
    See `open` and `save`.

    Notes
    -----
    Costs what `open` costs for a file that is mapped as it is; otherwise one
    copy, piece by piece: no memory beyond the segment but for packed and
    quantized tensors, of which one at a time is unpacked. The segment is
    charged to this process's control group.
    """
    from tensorio.sharing._publish import How, publish_source  # what writes needs NumPy

    options = reading_options(False, unknown, allow, False, key=key)
    how = How(format, huge_pages, dequantize, mode, persistent, replace, exist_ok, timeout, options, progress)
    return publish_source(source, name, how)


def attach(
    name: str | int | Publication,
    *,
    writable: bool = False,
    unknown: str | None = None,
    allow: Iterable[type] = (),
    timeout: float | None = None,
) -> Checkpoint:
    """Map what another process published.

    Parameters
    ----------
    name : str, Publication or int
        The name it was published under; ``"user:name"`` for one of another user.
        Or a descriptor that was received over a socket.
    writable : bool
        Whether arrays may be written to. Nobody else sees what is written.
    unknown : str, optional
        See `open`; as it was published if not given.
    allow : iterable of type
        See `open`.
    timeout : float, optional
        Seconds to wait for the name to appear; not at all if not given.

    Returns
    -------
    Checkpoint
        Its arrays are views of the pages that all attached processes share;
        copies: no. They stay valid when the publisher ends. Pickled, it
        attaches again.

    Raises
    ------
    NotPublishedError
        There is no such name, or its owner has ended (and the name is removed).
    PublicationError
        It can't be reached (another user, another container), or what is there
        is not what was published.

    Notes
    -----
    Costs what `open` costs.
    """
    if unknown not in (None, "error", "opaque"):
        raise ValueError(f"unknown= is 'error' or 'opaque', not {unknown!r}")
    return attach_to(name, writable=writable, unknown=unknown, allow=(*allowing.current(), *allow), timeout=timeout)


def published() -> list[Published]:
    """List the names that this user has published, with those whose owner has ended.

    Returns
    -------
    list of Published
        Sorted by name.

    Raises
    ------
    PublicationError
        The folder of names, or something in it, is not to be trusted.

    Notes
    -----
    Reads a file of some hundred bytes for each name, and looks through the
    processes of this user for readers.
    """
    return published_names()


def unpublish(name: str) -> None:
    """Withdraw a name, whoever published it; what is persistent is removed.

    Parameters
    ----------
    name : str
        As it was published.

    Raises
    ------
    NotPublishedError
        There is no such name.
    PublicationError
        The folder of names is not to be trusted.

    Notes
    -----
    Who is attached stays attached. The memory goes when nobody holds or maps it.
    """
    unpublish_name(name)
