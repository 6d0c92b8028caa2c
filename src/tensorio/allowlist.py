"""The names a pickle may use without asking, and why each is harmless.

A name selects a function of our own by exact (module, name); nothing is ever
imported or called by a file's word. What is not here is refused, or kept as an
inert `tensorio.values.Opaque`.
"""

from __future__ import annotations

from typing import NamedTuple

from tensorio.dtypes import BY_NAME

__all__ = ["ALLOWED", "Entry"]


class Entry(NamedTuple):
    """What one name stands for.

    Attributes
    ----------
    kind : str
        Which function of the pickle machine it selects.
    dtype : str
        Element type, for storage classes and dtypes.
    why : str
        Why it is harmless.
    """

    kind: str
    dtype: str = ""
    why: str = ""


_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}  # fmt: skip

# torch's name -> ours, where they differ.
_DTYPE_ALIASES = {
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip

_NOT_TORCH = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}


def _build() -> dict[tuple[str, str], Entry]:
    table: dict[tuple[str, str], Entry] = {}
    why = "a tag: tells the element type of a record"
    for torch_name, dtype in _STORAGES.items():
        table["torch", f"{torch_name}Storage"] = Entry("storage", dtype, why)
        table["torch.cuda", f"{torch_name}Storage"] = Entry("storage", dtype, why)
    table["torch.storage", "UntypedStorage"] = Entry("untyped", "uint8", why)
    for name in BY_NAME.keys() - _NOT_TORCH:
        table["torch", name] = Entry("dtype", name, "a tag: an element type as a value")
    for alias, name in _DTYPE_ALIASES.items():
        table["torch", alias] = Entry("dtype", name, "a tag: an element type as a value")
    view = "our own function: a view proven inside its record"
    table["torch._utils", "_rebuild_tensor"] = Entry("rebuild", why=view)
    table["torch._utils", "_rebuild_tensor_v2"] = Entry("rebuild_v2", why=view)
    table["torch._utils", "_rebuild_tensor_v3"] = Entry("rebuild_v3", why=view)
    table["torch._utils", "_rebuild_parameter"] = Entry("rebuild_parameter", why="our own function: sets two flags")
    table["torch", "Size"] = Entry("size", why="a tuple of ints")
    table["torch", "device"] = Entry("device", why="a word and an int")
    table["collections", "OrderedDict"] = Entry("ordered_dict", why="made empty or from checked pairs")
    table["collections", "Counter"] = Entry("counter", why="made from a dict of checked keys")
    for module in ("builtins", "__builtin__"):
        table[module, "set"] = Entry("set", why="made from a list of checked elements")
        table[module, "frozenset"] = Entry("frozenset", why="made from a list of checked elements")
        table[module, "bytes"] = Entry("bytes", why="the empty bytes only")
        table[module, "bytearray"] = Entry("bytearray", why="made from bytes, never from a size")
        table[module, "complex"] = Entry("complex", why="made from two floats")
    table["_codecs", "encode"] = Entry("encode", why="Latin-1 only: as many bytes as characters")
    for module in ("numpy.core.numeric", "numpy._core.numeric"):
        table[module, "_frombuffer"] = Entry("np_frombuffer", why="an array over checked bytes")
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[module, "_reconstruct"] = Entry("np_reconstruct", why="an empty array, filled by a checked state")
        table[module, "scalar"] = Entry("np_scalar", why="bytes of the length of a checked dtype")
    table["numpy", "ndarray"] = Entry("np_ndarray", why="a tag: the class of an array to be filled")
    table["numpy", "dtype"] = Entry("np_dtype", why="a type letter and a width; no objects' dtypes")
    table["copyreg", "_reconstructor"] = Entry("reconstructor", why="names another class, whose own rule holds")
    table["copyreg", "__newobj__"] = Entry("newobj", why="names another class, whose own rule holds")
    table["joblib.numpy_pickle", "NumpyArrayWrapper"] = Entry("joblib_array", why="an array of checked size behind it")
    table["torch.storage", "_load_from_bytes"] = Entry("load_from_bytes", why="a storage, read by the same machine")
    return table


ALLOWED: dict[tuple[str, str], Entry] = _build()
