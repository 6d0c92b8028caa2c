"""``tensorio_tp.json``: how the files beside it were cut, so that they can be put together again."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tensorio.dtypes import BY_NAME
from tensorio.errors import HeaderError, LimitError, UnsupportedError, error_context, escaped
from tensorio.formats._strict_json import parse
from tensorio.storage.opening import open_storage
from tensorio.tp import Rule

__all__ = ["MANIFEST", "RANKS_MAX", "Manifest", "Part", "is_plain_name", "read_manifest"]

MANIFEST = "tensorio_tp.json"
FORMAT, VERSION = "tensorio_tp", 1
RANKS_MAX = 1024  # ranks in a group; the largest in use have some dozens
DIMS_MAX = 64  # of an array, in NumPy 2
NUMBER_MAX = 1 << 62
_LONE = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, which no file takes
_RULE_FIELDS = ("action", "dim", "sections", "heads", "pad_to")


@dataclass(frozen=True)
class Part:
    """One tensor: what it was, and what became of it.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
        Of the whole tensor.
    rule : Rule
    """

    dtype: str
    shape: tuple[int, ...]
    rule: Rule


@dataclass(frozen=True)
class Manifest:
    """What the file says.

    Attributes
    ----------
    tp : int
        Number of ranks.
    source : str
        Name of the file that was cut.
    rules : str
        Digest of the rules, see `Rules.digest`.
    metadata : dict of str to str or None
        The source's notes.
    files : tuple of tuple of str
        Names of each rank's files.
    tensors : dict of str to Part
        In the source's order.
    skipped : tuple of str
        Names of tensors that no file has.
    """

    tp: int
    source: str
    rules: str
    metadata: dict[str, str] | None
    files: tuple[tuple[str, ...], ...]
    tensors: dict[str, Part] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Names of all files that belong together, this one's, too."""
        return {MANIFEST, *(name for files in self.files for name in files)}

    def text(self) -> bytes:
        """Return the file, a line per tensor."""
        head = {
            "format": FORMAT, "version": VERSION, "tp": self.tp, "source": self.source, "rules": self.rules,
            "metadata": self.metadata, "files": self.files, "skipped": self.skipped,
        }  # fmt: skip
        lines = ["{", *(f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()), '"tensors": {']
        tensors = [f"{json.dumps(fqn)}: {json.dumps(_fields(part))}" for fqn, part in self.tensors.items()]
        lines += [f"{line}," for line in tensors[:-1]] + tensors[-1:] + ["}", "}", ""]
        return "\n".join(lines).encode()


def _fields(part: Part) -> dict[str, Any]:
    """A tensor's entry; what is as usual is left out."""
    rule = part.rule
    extra = {key: value for key in _RULE_FIELDS[2:] if (value := getattr(rule, key))}
    what = {"dim": rule.dim, **extra} if rule.action == "cut" else {}
    return {"dtype": part.dtype, "shape": part.shape, "action": rule.action, **what}


def read_manifest(path: str) -> Manifest:
    """Read and check a manifest.

    Raises
    ------
    HeaderError
        Something is not as it should be.
    UnsupportedError
        It is of a later version.
    FileNotFoundError
        There is none.
    """
    storage, _, name = open_storage(path)
    try:
        with error_context(path=name):
            return _manifest(parse(storage.view()))
    finally:
        storage.close()


def _manifest(value: Any) -> Manifest:
    _require(isinstance(value, dict) and value.get("format") == FORMAT, f'an object whose "format" is "{FORMAT}"')
    if value.get("version") != VERSION:
        raise UnsupportedError(f"expected version {VERSION} of the manifest, found {escaped(value.get('version'))}")
    tp, files, metadata = value.get("tp"), value.get("files"), value.get("metadata")
    _require(_is_number(tp, RANKS_MAX) and tp > 0, f'a number of ranks up to {RANKS_MAX} at "tp"')
    _require(isinstance(files, list) and len(files) == tp, '"files" to be a list for each rank')
    _require(all(map(_is_texts, files)) and all(is_plain_name(n) for names in files for n in names), "names of files")
    _require(len({n for names in files for n in names}) == sum(map(len, files)), "each file once")
    notes = [] if metadata is None else list(metadata.values()) if isinstance(metadata, dict) else None
    _require(_is_texts(notes), 'null or texts at "metadata"')
    tensors, skipped = value.get("tensors"), value.get("skipped")
    _require(isinstance(tensors, dict) and _is_texts(skipped), '"tensors" and "skipped"')
    source, rules = value.get("source"), value.get("rules")
    _require(_is_texts([source, rules]), 'texts at "source" and "rules"')
    parts = {fqn: _part(fqn, entry) for fqn, entry in tensors.items()}
    return Manifest(tp, source, rules, metadata, tuple(map(tuple, files)), parts, tuple(skipped))


def _part(fqn: str, entry: Any) -> Part:
    with error_context(record=fqn):
        _require(isinstance(entry, dict) and str(entry.get("dtype")) in BY_NAME, "a tensor with a known dtype")
        shape = entry.get("shape")
        _require(isinstance(shape, list) and len(shape) <= DIMS_MAX, f"a shape of at most {DIMS_MAX} numbers")
        _require(all(_is_number(n, NUMBER_MAX) for n in shape), "a shape of numbers")
        if prod(shape) * 16 > NUMBER_MAX:
            raise LimitError(f"a tensor of shape {escaped(shape)} is larger than any file")
        fields = {key: entry[key] for key in _RULE_FIELDS if key in entry}
        _require(entry.get("action") != "skip", "no action of skip, since skipped tensors are listed by themselves")
        _require(set(entry) == {"dtype", "shape", *fields}, "no other fields of a tensor")
        lists = {key: tuple(fields[key]) for key in ("sections", "heads") if isinstance(fields.get(key), list)}
        _require(len(lists) == len({"sections", "heads"} & set(fields)), "lists of sections and heads")
        numbers = [n for key in _RULE_FIELDS[1:] for n in lists.get(key, (fields.get(key, 0),))]
        _require(all(type(n) is int and abs(n) <= NUMBER_MAX for n in numbers), "a rule of numbers")
        try:
            return Part(entry["dtype"], tuple(shape), Rule("**", **{**fields, **lists}))
        except (ValueError, TypeError) as error:
            raise HeaderError(f"manifest: {error}") from None


def is_plain_name(name: object) -> bool:
    """Tell whether a text from a file is the name of a file beside it, on any system, and leads nowhere else."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and name.isprintable()
        and not any(char in name for char in '/\\:*?"<>|')
    )


def _is_number(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and not _LONE.search(text) for text in value)


def _require(right: object, what: str) -> None:
    if not right:
        raise HeaderError(f"manifest: expected {what}")
