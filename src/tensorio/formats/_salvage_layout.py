"""Where torch puts each record of a file: nothing is left to choose once sizes, order and alignment are known.

Behind the pickle stand the side records of the release's time, then the
storages, each as a header, its name, padding up to a multiple of the alignment,
the payload and a descriptor. So a storage has its place even if nothing of its
header is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tensorio._core import ZIP_ALIGN, ZIP_ALIGN_MAX
from tensorio.formats._salvage_parts import MASKED, descriptor_size

if TYPE_CHECKING:
    from tensorio.formats._salvage import Damaged
    from tensorio.formats._salvage_parts import Directory, Piece

__all__ = ["BYTEORDER", "FOLDERS", "PICKLE", "Front", "Layout", "Place", "find_layout", "read_front"]

PICKLE = "data.pkl"
FOLDERS = ("data/", "tensors/")  # the second one in 1.4
VERSION, ALIGNMENT, BYTEORDER = ".format_version", ".storage_alignment", "byteorder"
SIDE = (VERSION, ALIGNMENT, BYTEORDER, "version", ".data/serialization_id")
SIDE_MAX = 4096  # bytes between the payload of a side record and its end
TEXT_MAX = 64  # bytes of side records that are kept
LOCAL_SIZE, FB_SIZE, ZIP64_SIZE = 30, 4, 4  # bytes of a local header, and of the heads of two extra fields
# What torch may have been told to align payloads to; 64 if it was not.
ALIGNS = (ZIP_ALIGN, *(1 << i for i in range(16) if 1 << i != ZIP_ALIGN))
SAMPLE = 64  # storages that are looked at for each guess at a layout, as long as they tell guesses apart


class Place(NamedTuple):
    """Where a storage's header and payload begin."""

    key: str
    at: int
    start: int


class Layout(NamedTuple):
    """One way in which torch may have laid out a file.

    Attributes
    ----------
    folder : str
        What the names of storages begin with.
    keys : list of str
        The storages in the order of the file.
    first : int
        Where the header of the first one begins.
    align : int
    """

    folder: str
    keys: list[str]
    first: int
    align: int

    def places(self, sizes: dict[str, int]) -> Iterator[Place]:
        """Yield where each storage is, or was."""
        at = self.first
        for key in self.keys:
            size = sizes[key]
            start = start_of(at, self.folder + key, size, self.align)
            yield Place(key, at, start)
            at = start + size + descriptor_size(at, size)


def start_of(at: int, name: str, size: int, align: int) -> int:
    """Return where the payload of a record begins that has its header at `at`."""
    start = at + LOCAL_SIZE + len(name.encode()) + FB_SIZE
    if size >= MASKED or at >= MASKED:
        start += ZIP64_SIZE + (16 if size >= MASKED else 0) + (8 if at >= MASKED else 0)
    return -(-start // align) * align


class Front(NamedTuple):
    """What stands in front of the storages.

    Attributes
    ----------
    texts : dict of str to bytes
        Contents of the side records.
    first : int or None
        Where the header of the first storage is; None if the way there is damaged.
    aligns : list of int
        Alignments that put all records met where they are.
    """

    texts: dict[str, bytes]
    first: int | None
    aligns: list[int]


def read_front(archive: Damaged, prefix: str, pickle: Piece) -> Front:
    """Go from record to record up to the first storage."""
    texts: dict[str, bytes] = {}
    aligns = [align for align in ALIGNS if pickle.start % align == 0]
    at: int | None = 0
    while at is not None and (header := archive.header(at)) is not None:
        folder, _, name = header.name.partition("/")
        if folder != prefix or not (name in SIDE or name == PICKLE):
            break
        piece = pickle if header.start == pickle.start else archive.whole(header, end=header.start + SIDE_MAX)
        if piece is None:
            break
        aligns = [align for align in aligns if start_of(at, header.name, piece.size, align) == header.start]
        if name in SIDE and piece.whole and piece.size <= TEXT_MAX and not piece.deflated:
            texts[name] = bytes(archive.view[piece.start : piece.start + piece.size])
        at = piece.end
    folders = tuple(f"{prefix}/{name}" for name in FOLDERS)
    told = texts.get(ALIGNMENT, b"")
    if told.isdigit() and 1 <= int(told) <= ZIP_ALIGN_MAX and pickle.start % int(told) == 0:
        aligns = [int(told)]
    found = at is not None and (header := archive.header(at)) is not None and header.name.startswith(folders)
    return Front(texts, at if found else None, aligns)


def find_layout(
    archive: Damaged, prefix: str, sizes: dict[str, int], pickle: Piece, front: Front, directory: Directory | None
) -> list[Layout]:
    """Find the layouts that most of what is left agrees with; none if torch has not laid out the file.

    There is more than one only if nothing that is left tells them apart.
    """
    layouts = list(_guesses(prefix, sizes, pickle, front, directory))
    for count in (SAMPLE, len(sizes)):
        agreeing = [_agreeing(archive, layout, sizes, count) for layout in layouts]
        most = max(agreeing, default=(0, 0))
        if most > (0, 0):
            layouts = [layout for layout, found in zip(layouts, agreeing, strict=True) if found == most]
        elif count >= len(sizes):
            return []
    return layouts


def _guesses(
    prefix: str, sizes: dict[str, int], pickle: Piece, front: Front, directory: Directory | None
) -> Iterator[Layout]:
    orders = [list(sizes)]  # as the pickle mentions them (since 2.7), or by name
    if (by_name := sorted(sizes)) != orders[0]:
        orders.append(by_name)
    folders = [f"{prefix}/{name}" for name in FOLDERS]
    listed = () if directory is None else (e.at for e in directory.entries.values() if e.name.startswith((*folders,)))
    known = [*islice(listed, 1)] if front.first is None else [front.first]
    for align in front.aligns:
        firsts = known if front.first is not None else sorted({*known, *_first_places(prefix, pickle, align)})
        for first in firsts:
            for keys in orders:
                yield from (Layout(folder, keys, first, align) for folder in folders)


def _first_places(prefix: str, pickle: Piece, align: int) -> Iterator[int]:
    """Where the first storage may be: behind the pickle and the side records of a release."""
    if pickle.end is None:
        return
    for byteorder in ([(BYTEORDER, 6)], [(BYTEORDER, 3)], []):
        for records in ([(VERSION, 1), (ALIGNMENT, len(str(align))), *byteorder], byteorder):
            at = pickle.end
            for name, size in records:
                at = start_of(at, f"{prefix}/{name}", size, align) + size + descriptor_size(at, size)
            yield at


def _agreeing(archive: Damaged, layout: Layout, sizes: dict[str, int], count: int) -> tuple[int, int]:
    """How many headers are in their places, less those that are in others'; and how many descriptors without one."""
    named = described = 0
    for place in islice(layout.places(sizes), count):
        if place.at >= archive.nbytes:
            break
        header = archive.header(place.at)
        if header is None:
            described += archive.described(place.start + sizes[place.key], sizes[place.key])
        elif header.name == layout.folder + place.key and header.start == place.start:
            named += 1
        else:
            named -= 1
    return named, described
