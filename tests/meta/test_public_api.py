"""The public surface, held to DESIGN section 4: names, signatures, nothing more."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import tensorio

NAMES = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointManager",
    "ChecksumError",
    "Chunk",
    "DTensor",
    "DecryptionError",
    "Device",
    "Extent",
    "Finding",
    "FormatError",
    "HeaderError",
    "JaggedTensor",
    "LimitError",
    "LockedError",
    "Loss",
    "Merged",
    "MetaTensor",
    "NameTakenError",
    "NestedTensor",
    "NonFinite",
    "NonFiniteError",
    "NotPublishedError",
    "Opaque",
    "Prefetch",
    "Publication",
    "PublicationError",
    "Published",
    "QuantizedTensor",
    "RankView",
    "Recovery",
    "Report",
    "Saved",
    "ScanReport",
    "ScannedFile",
    "ShardReport",
    "Size",
    "SparseTensor",
    "Stripped",
    "SubclassTensor",
    "TensorIOError",
    "TensorInfo",
    "TensorKind",
    "TensorMismatchError",
    "TensorNotFoundError",
    "TorchDType",
    "TorchTag",
    "TruncatedError",
    "UnknownFormatError",
    "UnsafePickleError",
    "UnsupportedError",
    "__version__",
    "allow",
    "attach",
    "check_finite",
    "convert",
    "decrypt",
    "delta_chain",
    "encrypt",
    "guard",
    "identify",
    "load",
    "merge",
    "open",
    "publish",
    "published",
    "ranked",
    "recover",
    "rng_state",
    "save",
    "save_async",
    "scan",
    "set_rng_state",
    "shard",
    "state_dict",
    "strip",
    "tp",
    "unpublish",
    "unshard",
    "verify",
    "write_manifest",
]

SIGNATURES = {
    "load": "path, *, format=None, mmap='auto', writable=False, names=None, unknown='error', allow=(), "
            "encoding=None, strict=False, verify=False, check_finite=False, key=None, progress=None",
    "open": "path, *, format=None, mmap='auto', writable=False, unknown='error', allow=(), encoding=None, "
            "strict=False, verify=False, key=None",
    "save": "obj, path, *, format=None, metadata=None, align=None, compact=False, max_shard_size=None, include=None, "
            "exclude=None, base=None, digests=False, manifest=False, readback=False, check_finite=False, durable=True, "
            "progress=None",
    "save_async": "obj, path, **options",
    "convert": "src, dst, *, format=None, dtype=None, rename=None, max_shard_size=None, include=None, exclude=None, "
               "compact=False, unknown='error', allow=(), strict=False, key=None, durable=True, progress=None",
    "delta_chain": "path, *, key=None",
    "merge": "base, *adapters, dst, on_conflict='replace', rename=None, format=None, max_shard_size=None, "
             "unknown='error', allow=(), key=None, durable=True, progress=None",
    "strip": "src, dst, *, keep=None, include=None, exclude=None, flat=False, format=None, max_shard_size=None, "
             "dry_run=False, unknown='opaque', allow=(), key=None, durable=True, progress=None",
    "recover": "src, dst, *, format=None, raw=False, keep_damaged=False, unknown='error', allow=(), encoding=None, "
               "key=None, durable=True, progress=None",
    "verify": "path, *, manifest=None, require=False, key=None, progress=None",
    "write_manifest": "path, *, durable=True, progress=None",
    "encrypt": "src, dst, *, key, key_id='', tensors=None, clear=None, chunk_size=1048576, old_key=None, durable=True, "
               "progress=None",
    "decrypt": "src, dst, *, key, durable=True, progress=None",
    "check_finite": "source, *, key=None",
    "scan": "path, *, allow=(), progress=None",
    "publish": "source, name=None, *, format=None, huge_pages=False, dequantize=False, mode=384, persistent=False, "
               "replace=False, exist_ok=False, timeout=None, unknown='error', allow=(), key=None, "
               "progress=None",
    "attach": "name, *, writable=False, unknown=None, allow=(), timeout=None",
    "published": "",
    "unpublish": "name",
    "identify": "path",
    "guard": "",
    "shard": "src, dst, *, tp, rules, config=None, default='error', format=None, name=None, max_shard_size=None, "
             "metadata=None, overwrite=False, dry_run=False, unknown='error', allow=(), key=None, durable=True, "
             "progress=None",
    "unshard": "src, dst, *, format=None, key=None, durable=True, progress=None",
    "ranked": "source, rank, *, tp, rules, config=None, default='error', unknown='error', allow=(), key=None",
}  # fmt: skip

METHODS = {
    "tree": "self",
    "read": "self, fqn, index=(), out=None",
    "read_into": "self, out, *, progress=None, threads=None",
    "prefetch": "self, fqns=None, *, window=None, wait=False, progress=None",
    "stream": "self, fqns=None, *, window=None, evict=False",
    "check_unchanged": "self",
    "verify": "self, *, require=False, progress=None",
    "close": "self",
}
ATTRIBUTES = {"format", "path", "files", "metadata", "nbytes", "infos", "paths", "loading"}


def signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))[1:-1]


def test_all_is_the_list() -> None:
    assert tensorio.__all__ == NAMES
    assert tensorio.__all__ == sorted(tensorio.__all__)
    assert len(set(tensorio.__all__)) == len(tensorio.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    assert hasattr(tensorio, name)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("_")])
def test_every_name_is_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(tensorio, name))
    assert doc is not None, name
    assert doc.splitlines()[0].endswith("."), name


def test_no_other_public_name_leaks() -> None:
    public = {n for n in vars(tensorio) if not n.startswith("_")}
    submodules = {n for n in public if inspect.ismodule(getattr(tensorio, n))}
    assert public - submodules - set(NAMES) == set()
    assert all(getattr(tensorio, n).__name__.startswith("tensorio.") for n in submodules)


@pytest.mark.parametrize("name", SIGNATURES)
def test_function_has_the_signature_of_the_design(name: str) -> None:
    assert signature(getattr(tensorio, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", METHODS)
def test_method_has_the_signature_of_the_design(name: str) -> None:
    assert signature(getattr(tensorio.Checkpoint, name)) == METHODS[name]


def test_checkpoint_has_the_attributes_of_the_design() -> None:
    with tensorio.open(b"\x02\0\0\0\0\0\0\0{}") as checkpoint:
        public = {n for n in dir(checkpoint) if not n.startswith("_")}
        assert public >= ATTRIBUTES
        assert public == ATTRIBUTES | set(METHODS) | {"get", "items", "keys", "values"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_behind_the_second_are_keyword_only(name: str) -> None:
    kinds = [p.kind for p in inspect.signature(getattr(tensorio, name)).parameters.values()]
    assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) <= 2
    # The options of `save`; files of one kind, in order.
    several = {"save_async": {inspect.Parameter.VAR_KEYWORD}, "merge": {inspect.Parameter.VAR_POSITIONAL}}.get(
        name, set()
    )
    assert set(kinds) - several <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_parameter_is_annotated(name: str) -> None:
    function = inspect.signature(getattr(tensorio, name))
    assert all(p.annotation is not inspect.Parameter.empty for p in function.parameters.values())
    assert function.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize(("call", "word"), [
    (lambda: tensorio.convert("x.pt", "y.pt", dtype="float16"), "dtype="),
])  # fmt: skip
def test_arguments_of_later_versions_are_refused_by_name(call: Any, word: str) -> None:
    with pytest.raises(tensorio.UnsupportedError, match=word):
        call()


def public_calls() -> dict[str, Any]:
    """Functions, and methods of classes, by name."""
    out: dict[str, Any] = {}
    for name in NAMES:
        given = getattr(tensorio, name)
        if inspect.isfunction(given):
            out[name] = given
        elif inspect.isclass(given) and not issubclass(given, Exception):
            methods = inspect.getmembers(given, inspect.isfunction)
            out |= {
                f"{name}.{m}": f for m, f in methods if not m.startswith("_") and f.__module__.startswith("tensorio.")
            }
    return out


def sections(function: Any) -> dict[str, str]:
    """The parts of a docstring of numpydoc by their titles."""
    parts = re.split(r"^(\w+)\n-{4,}\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(function: Any, title: str = "Parameters") -> set[str]:
    rows = [row for row in sections(function).get(title, "").splitlines() if row[:1].strip()]
    return {name.strip().lstrip("*") for row in rows for name in row.split(" : ")[0].split(",")}


@pytest.mark.parametrize("name", public_calls())
def test_every_parameter_is_documented_and_no_other(name: str) -> None:
    function = public_calls()[name]
    if (inspect.getdoc(function) or "").startswith("See `"):
        return  # of the class above
    assert documented(function) == set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_returned_what_fails_and_what_it_costs_is_documented(name: str) -> None:
    function = getattr(tensorio, name)
    want = {"Raises", "Notes"} | ({"Returns"} if inspect.signature(function).return_annotation != "None" else set())
    assert want <= set(sections(function))


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isclass(getattr(tensorio, n))])
def test_every_attribute_is_documented(name: str) -> None:
    given = getattr(tensorio, name)
    fields = [f.name for f in dataclasses.fields(given)] if dataclasses.is_dataclass(given) else []
    fields += getattr(given, "_fields", ())
    told = set().union(*(documented(base, "Attributes") for base in given.__mro__))
    assert {f for f in fields if not f.startswith("_")} <= told
    properties = inspect.getmembers(given, lambda member: isinstance(member, property))
    assert [n for n, member in properties if not n.startswith("_") and not inspect.getdoc(member)] == []
