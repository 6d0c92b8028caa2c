"""How ``tensorio inspect`` draws what `tensorio.cli._survey` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tensorio.cli._outline import Line, lines, outline
from tensorio.cli._survey import LEVELS_MAX, Entry, Partial, Share, Survey, file_nbytes
from tensorio.cli._text import Cell, Sheet, elements, percent, shape_text, shown, size, some
from tensorio.tensors import CONJ, NEG, PARAMETER, REQUIRES_GRAD
from tensorio.tree import name_of

if TYPE_CHECKING:
    from tensorio.checkpoint._checkpoint import Checkpoint
    from tensorio.tensors import TensorInfo

__all__ = ["flag_names", "flat", "heading", "sections", "tree"]

COLUMNS = "<<<>><"
HEADINGS = ("dtype", "shape", "bytes", "offset", "")
BAR = 12  # columns of a full bar
METADATA_MAX = 120  # characters of a note
NAMES_MAX = 4  # names listed of those that share bytes
PARTLY_MAX = 5  # records listed that tensors reach in part

_FLAGS = ((REQUIRES_GRAD, "requires_grad"), (PARAMETER, "parameter"), (CONJ, "conj"), (NEG, "neg"))

# The lines of a tree: a level that goes on, one that has ended, a branch, the last branch.
_RAILS = ("\u2502  ", "   ", "\u251c\u2500 ", "\u2514\u2500 ")
_ASCII_RAILS = ("|  ", "   ", "|- ", "`- ")
_BLOCKS, _ASCII_BLOCKS = "\u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588", "       #"  # eighths of a column


def flag_names(flags: int) -> list[str]:
    """Return the names of a tensor's flag bits."""
    return [name for bit, name in _FLAGS if flags & bit]


def heading(checkpoint: Checkpoint, facts: Survey, path: str) -> Sheet:
    """Return the file's name, what it is, and how it would be loaded, in three lines."""
    sheet = Sheet("<")
    sheet.add(Cell(shown(path), "bold"))
    total = facts.total
    files = f" in {len(checkpoint.files)} files" if len(checkpoint.files) > 1 else ""
    what = f"{checkpoint.format}, {size(file_nbytes(checkpoint))}{files}: {some(total.tensors, 'tensor')}"
    if total.tensors:
        what += f" of {elements(total.numel)} elements, {size(total.nbytes)}"
    sheet.add(Cell(what))
    sheet.add(Cell(checkpoint.loading, "dim"))
    sheet.add("")
    return sheet


# ------------------------------------------------------------------ tensors, one by one


def flat(facts: Survey, most: int | None) -> Sheet:
    """Return a row per tensor, in saved order."""
    sheet = _tensor_sheet("tensor")
    notes = _Notes(_sharing_notes(facts), facts.stored.unpacked)
    for entry in islice(facts.tensors, most):
        assert entry.tensor is not None
        sheet.add(Cell(shown(entry.tensor.fqn) or "''"), *_tensor_cells(entry.tensor, notes))
    if most is not None and facts.total.tensors > most:
        sheet.add(Cell(f"... and {some(facts.total.tensors - most, 'more tensor')}; --limit 0 shows all", "dim"))
    return sheet


def tree(facts: Survey, most: int | None, *, fold: bool, ascii_only: bool) -> Sheet:
    """Return the saved object as a tree, tensors and other values at its leaves."""
    sheet = _tensor_sheet("tensor")
    notes = _Notes(_sharing_notes(facts), facts.stored.unpacked)
    rails = _ASCII_RAILS if ascii_only else _RAILS
    below = lines(outline(facts.entries, set(notes.sharing)), fold=fold)
    for line in islice(below, most):
        guide = "".join(rails[not goes_on] for goes_on in line.rails[:-1])
        if line.rails:
            guide += rails[2 if line.rails[-1] else 3]
        sheet.add(*_line_cells(line, guide, notes))
    rest = sum(1 for _ in below)
    if rest:
        sheet.add(Cell(f"... and {some(rest, 'more row')}; --limit 0 shows all", "dim"))
    if facts.left_out:
        sheet.add(Cell(f"... and {some(facts.left_out, 'other value')} too many to show", "dim"))
    return sheet


class _Notes(NamedTuple):
    """What to say of some tensors: by name, and by storage."""

    sharing: dict[str, str]
    unpacked: frozenset[int]


def _tensor_sheet(first: str) -> Sheet:
    sheet = Sheet(COLUMNS)
    sheet.add(*(Cell(text, "dim") for text in (first, *HEADINGS)))
    return sheet


def _line_cells(line: Line, guide: str, notes: _Notes) -> tuple[Cell, ...]:
    entry = line.node.entry
    times = f"x{line.times}" if line.times > 1 else ""
    if entry is None:
        total = Cell(size(line.nbytes), "dim")
        return Cell(line.label, "bold", guide), Cell(), Cell(), total, Cell(), Cell(times, "cyan")
    if entry.tensor is not None:
        return Cell(line.label, "", guide), *_tensor_cells(entry.tensor, notes, times)
    style = "yellow" if entry.kind == "refused" else "magenta"
    return Cell(line.label, "", guide), Cell(entry.text + (f" {times}" if times else ""), style)


def _tensor_cells(info: TensorInfo, notes: _Notes, times: str = "") -> tuple[Cell, ...]:
    extent = info.chunks[0].extent
    remarks = [times] if times else []
    if info.fqn in notes.sharing:
        remarks.append(notes.sharing[info.fqn])
    if not info.contiguous:
        remarks.append("strided" if len(info.chunks) == 1 else f"{len(info.chunks)} chunks")
    remarks += [name for bit, name in _FLAGS[2:] if info.flags & bit]
    unpacked = extent.storage in notes.unpacked
    if unpacked:
        remarks.append("unpacked on use")
    return (
        Cell(info.dtype, "cyan"),
        Cell(shape_text(info.shape)),
        Cell(size(info.nbytes), "green"),
        Cell("-" if unpacked else str(extent.offset), "dim"),
        Cell(", ".join(remarks), "yellow"),
    )


def _sharing_notes(facts: Survey) -> dict[str, str]:
    """What to say about each tensor that shares bytes with another."""
    notes = {fqn: "overlaps" for group in facts.overlapping for fqn in group}
    for group in facts.tied:
        notes[group[0]] = "tied"
        notes.update((fqn, f"= {shown(group[0], 60)}") for fqn in group[1:])
    return notes


# ----------------------------------------------------------------------------- sections


def sections(
    checkpoint: Checkpoint, facts: Survey, depth: int, most: int | None, *, flat: bool, ascii_only: bool
) -> Iterator[Sheet]:
    """Yield what is said below the tensors, as far as there is something to say."""
    if facts.total.tensors:
        yield _shares("by dtype", facts.by_dtype, facts.total, most, ascii_only)
        modules = facts.by_module(depth)
        if len(modules) > 1:
            named = {shown(name) or "(top level)": share for name, share in modules.items()}
            yield _shares("by module", named, facts.total, most, ascii_only)
    yield _stored(facts)
    if facts.tied or facts.overlapping:
        yield _sharing(facts, most)
    if checkpoint.metadata:
        rows = ((shown(key), shown(value, METADATA_MAX)) for key, value in checkpoint.metadata.items())
        yield _pairs("metadata", rows, len(checkpoint.metadata), most)
    if flat and facts.values:
        values = (entry for entry in facts.entries if entry.tensor is None and entry.kind != "refused")
        yield _pairs("other values", map(_value_row, values), facts.values, most)
    if facts.refused:
        yield _refused(facts, most)


def _value_row(entry: Entry) -> tuple[str, str]:
    return shown(name_of(entry.path[:LEVELS_MAX])) or "(the object itself)", entry.text


def _titled(title: str, columns: str) -> Sheet:
    sheet = Sheet(columns)
    sheet.add(Cell(title, "bold"))
    return sheet


def _shares(title: str, shares: dict[str, Share], total: Share, most: int | None, ascii_only: bool) -> Sheet:
    sheet = Sheet("<>>>><")
    sheet.add(Cell(title, "bold"), *(Cell(text, "dim") for text in ("tensors", "elements", "bytes", "", "")))
    for name, share in islice(shares.items(), most):
        sheet.add(
            Cell(f"  {name}"), f"{share.tensors:,}", elements(share.numel), Cell(size(share.nbytes), "green"),
            percent(share.nbytes, total.nbytes), Cell(_bar(share.nbytes, total.nbytes, ascii_only), "cyan"),
        )  # fmt: skip
    _add_rest(sheet, len(shares), most)
    return sheet


def _bar(part: int, whole: int, ascii_only: bool) -> str:
    eighths = round(part * BAR * 8 / whole) if whole else 0
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    bar = blocks[7] * (eighths // 8) + (blocks[eighths % 8 - 1] if eighths % 8 else "")
    return bar.rstrip() or ("." if part and ascii_only else blocks[0] if part else "")


def _add_rest(sheet: Sheet, count: int, most: int | None) -> None:
    if most is not None and count > most:
        sheet.add(Cell(f"  ... and {count - most:,} more; --limit 0 shows all", "dim"))


def _stored(facts: Survey) -> Sheet:
    """What is stored, and what of it no tensor reaches."""
    stored = facts.stored
    sheet = _titled("stored", "<>>>")
    lost = stored.nbytes - stored.reached
    remark = ", all of it reached by tensors" if stored.records and not lost else ""
    sheet.add(f"  {size(stored.nbytes)} in {some(stored.records, 'record')}{remark}")
    if lost:
        remark = (
            f"({percent(lost, stored.nbytes)}) of it is reached by no tensor; save(..., compact=True) leaves it out"
        )
        sheet.add(Cell(f"  {size(lost)} {remark}", "yellow"))
        _add_partly(sheet, stored.partly)
    if stored.others:
        remark = f"{some(stored.others, 'other record')} (structure, no tensors)"
        sheet.add(Cell(f"  {size(stored.others_nbytes)} in {remark}", "dim"))
    if stored.skipped:
        remark = f"{some(len(stored.skipped), 'member')} that hold no tensors"
        sheet.add(Cell(f"  {remark}: {_names(stored.skipped)}", "dim"))
    return sheet


def _add_partly(sheet: Sheet, partly: list[Partial]) -> None:
    for part in partly[:PARTLY_MAX]:
        reach = Cell(f"{size(part.reached)} of {size(part.nbytes)}", "green")
        sheet.add(f"    {shown(part.record)}", reach, _names(part.fqns) or "no tensor")
    if len(partly) > PARTLY_MAX:
        sheet.add(Cell(f"    ... and {len(partly) - PARTLY_MAX:,} more such records (--json has all)", "dim"))


def _sharing(facts: Survey, most: int | None) -> Sheet:
    sheet = _titled("shared bytes", "<<<")
    groups = [("tied", " = ", group) for group in facts.tied]
    groups += [("overlapping", ", ", group) for group in facts.overlapping]
    for word, between, group in groups[:most]:
        sheet.add(Cell(f"  {word}", "yellow"), Cell(_names(group, between)))
    _add_rest(sheet, len(groups), most)
    return sheet


def _names(fqns: Sequence[str], between: str = ", ") -> str:
    text = between.join(shown(fqn) or "(the object itself)" for fqn in fqns[:NAMES_MAX])
    return text if len(fqns) <= NAMES_MAX else f"{text} and {len(fqns) - NAMES_MAX:,} more"


def _pairs(title: str, rows: Iterable[tuple[str, str]], count: int, most: int | None) -> Sheet:
    sheet = _titled(title, "<<<")
    for name, value in islice(rows, most):
        sheet.add(Cell(f"  {name}"), Cell(value, "magenta"))
    _add_rest(sheet, count, len(sheet.rows) - 1 if most is None else most)
    return sheet


def _refused(facts: Survey, most: int | None) -> Sheet:
    sheet = _titled("refused: objects of these classes are kept as data, nothing of them was run", "<<<")
    for name, count in islice(facts.refused.most_common(), most):
        sheet.add(Cell(f"  {shown(name, 120)}", "yellow"), Cell(f"x{count:,}" if count > 1 else ""))
    _add_rest(sheet, len(facts.refused), most)
    return sheet
