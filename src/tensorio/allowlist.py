"""The names a pickle may use without asking, and why each is harmless.

A name selects a function of our own by exact (module, name); nothing is ever
imported or called by a file's word. What is not here is refused, or kept as an
inert `tensorio.values.Opaque`.
"""

from __future__ import annotations

from typing import NamedTuple

from tensorio.dtypes import BY_NAME
from tensorio.machine.script_calls import SCRIPT_NAMES, SCRIPT_STORAGES

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

# Quantized integers; those of 2 and 4 bits are packed, and counted in bytes.
_QUANTIZED_STORAGES = {
    "QInt8": "int8", "QUInt8": "uint8", "QInt32": "int32", "QUInt4x2": "uint8", "QUInt2x4": "uint8",
}  # fmt: skip

# Element types that no plain tensor has: torch names them as values, and in tensors without data.
_SHELL_DTYPES = (
    "qint8", "quint8", "qint32", "quint4x2", "quint2x4", *(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)),
)  # fmt: skip

_TAGS = {
    "torch": (
        "strided", "jagged", "_mkldnn", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc",
        "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
        "per_channel_affine_float_qparams",
        "contiguous_format", "channels_last", "channels_last_3d", "preserve_format", "legacy_contiguous_format",
        "Tensor",
    ),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.nn": ("Parameter",),
    "torch.autograd.variable": ("Variable",),
    "torch.autograd": ("Variable",),
    "torch.nested._internal.nested_tensor": ("NestedTensor",),
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed.tensor._api": ("DTensor",),
    "torch.distributed._tensor.api": ("DTensor",),
    "torch.distributed._tensor": ("DTensor",),
}  # fmt: skip

_OLD_TENSORS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")

_REBUILDS = {
    ("torch._utils", "_rebuild_parameter_with_state"): ("rebuild_parameter_with_state", "sets two flags"),
    ("torch._utils", "_rebuild_qtensor"): ("rebuild_qtensor", "a view, and numbers beside it"),
    ("torch._utils", "_rebuild_sparse_tensor"): ("rebuild_sparse", "tensors side by side; indices checked when used"),
    ("torch._utils", "_rebuild_sparse_csr_tensor"): ("rebuild_sparse", "the same of releases 1.9 to 1.13"),
    ("torch._utils", "_rebuild_nested_tensor"): ("rebuild_nested", "tensors side by side; offsets checked when used"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): ("rebuild_meta", "a dtype and a shape, no data"),
    ("torch._utils", "_rebuild_wrapper_subclass"): ("rebuild_wrapper_subclass", "a class's name, a dtype, a shape"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): ("device_tensor", "the tensor it is given"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): ("device_from_numpy", "the array it is given"),
    ("torch._utils", "_rebuild_xla_tensor"): ("device_from_numpy", "the array it is given"),
    ("torch._tensor", "_rebuild_from_type_v2"): ("rebuild_from_type", "a tensor beside the name of its class"),
    ("torch._tensor", "_rebuild_from_type"): ("rebuild_from_type", "a tensor beside the name of its class"),
    ("torch.tensor", "_rebuild_from_type_v2"): ("rebuild_from_type", "a tensor beside the name of its class"),
    ("torch.tensor", "_rebuild_from_type"): ("rebuild_from_type", "a tensor beside the name of its class"),
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): ("rebuild_njt", "tensors side by side"),
    ("torch.serialization", "_get_layout"): ("get_layout", "the name of a layout"),
}

# What describes a tensor that is spread over processes, and other notes on tensors: kept as inert objects.
_INERT = {
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    "torch.distributed.tensor.placement_types": (
        "Shard", "_StridedShard", "Replicate", "Partial", "_MaskPartial", "_NormPartial",
    ),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
    # Up to release 2.5.
    "torch.distributed._tensor.placement_types": (
        "DTensorSpec", "TensorMeta", "Shard", "Replicate", "Partial", "_Partial",
    ),
    "torch.distributed._tensor._dtensor_spec": ("DTensorSpec", "TensorMeta"),
    "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
    "torch._dynamo.decorators": ("_DimRange",),
    "torch.jit._script": ("unpackage_script_module",),
    "torch.nn.parameter": ("UninitializedParameter", "UninitializedBuffer"),
}  # fmt: skip

_NOT_TORCH = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}

# Results of several tensors with names, e.g. of torch.max: up to torch 2.13.
_NAMED_RESULTS = (
    "aminmax", "cummax", "cummin", "eig", "frexp", "geqrf", "histogram", "histogramdd", "kthvalue",
    "linalg_cholesky_ex", "linalg_eig", "linalg_eigh", "linalg_inv_ex", "linalg_ldl_factor", "linalg_ldl_factor_ex",
    "linalg_lstsq", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_qr", "linalg_slogdet",
    "linalg_solve_ex", "linalg_svd", "lstsq", "lu_unpack", "max", "median", "min", "mode", "nanmedian", "qr",
    "slogdet", "solve", "sort", "svd", "symeig", "topk", "triangular_solve",
)  # fmt: skip


def _plain_values() -> dict[tuple[str, str], Entry]:
    """Values of the standard library and tuples of torch; what each makes is in `tensorio.machine.stdlib`."""
    table: dict[tuple[str, str], Entry] = {}
    for name in ("bool", "int", "float", "str", "list", "tuple", "dict"):
        table["builtins", name] = Entry(name, why="a tag, or a copy of one plain value")
    table["builtins", "object"] = Entry("object", why="a tag, or an object without contents")
    table["builtins", "Ellipsis"] = Entry("ellipsis", why="a constant")
    table["builtins", "range"] = Entry("range", why="three ints")
    table["builtins", "slice"] = Entry("slice", why="three plain values")
    for name in ("date", "datetime", "time"):
        table["datetime", name] = Entry(name, why="a few bytes, each checked")
    table["datetime", "timedelta"] = Entry("timedelta", why="three ints")
    table["datetime", "timezone"] = Entry("timezone", why="a checked timedelta and a name")
    table["decimal", "Decimal"] = Entry("decimal", why="a short text of digits")
    table["fractions", "Fraction"] = Entry("fraction", why="two ints, or a short text of digits")
    table["uuid", "UUID"] = Entry("uuid", why="an int of 128 bits")
    table["uuid", "SafeUUID"] = Entry("safe_uuid", why="one of three constants")
    for module in ("pathlib", "pathlib._local"):
        for kind, name in (("posix_path", "PosixPath"), ("windows_path", "WindowsPath"), ("posix_path", "Path")):
            for pure in (name, f"Pure{name}"):
                table[module, pure] = Entry(kind, why="strings, as a path that can't touch files")
    table["collections", "deque"] = Entry("deque", why="a list; its bound allocates nothing")
    table["collections", "defaultdict"] = Entry("defaultdict", why="made empty; its factory is a plain type")
    table["collections", "UserDict"] = Entry("user_dict", why="holds a dict of checked keys")
    table["collections", "UserList"] = Entry("user_list", why="holds a list")
    table["types", "SimpleNamespace"] = Entry("simple_namespace", why="attributes that hide nothing")
    table["argparse", "Namespace"] = Entry("namespace", why="attributes that hide nothing")
    redirect = "names another class, which goes by its own rule"
    table["copyreg", "_reconstructor"] = Entry("reconstructor", why=redirect)
    table["copyreg", "__newobj__"] = Entry("newobj", why=redirect)
    table["copyreg", "__newobj_ex__"] = Entry("newobj_ex", why=redirect)
    for name in _NAMED_RESULTS:
        table["torch.return_types", name] = Entry("fields", why="a tuple")
        table["torch.return_types", f"{name}_out"] = Entry("fields", why="a tuple")
    return table


def _build() -> dict[tuple[str, str], Entry]:
    table = _plain_values()
    why = "a tag: tells the element type of a record"
    for torch_name, dtype in _STORAGES.items():
        table["torch", f"{torch_name}Storage"] = Entry("storage", dtype, why)
        table["torch.cuda", f"{torch_name}Storage"] = Entry("storage", dtype, why)
    for torch_name, dtype in _QUANTIZED_STORAGES.items():
        table["torch", f"{torch_name}Storage"] = Entry("storage", dtype, why)
    for torch_name, dtype in SCRIPT_STORAGES.items():
        table["torch", f"{torch_name}Storage"] = Entry("storage", dtype, why)
    table["torch.storage", "UntypedStorage"] = Entry("untyped", "uint8", why)
    for name in BY_NAME.keys() - _NOT_TORCH:
        table["torch", name] = Entry("dtype", name, "a tag: an element type as a value")
    for alias, name in _DTYPE_ALIASES.items():
        table["torch", alias] = Entry("dtype", name, "a tag: an element type as a value")
    for name in _SHELL_DTYPES:
        table["torch", name] = Entry("dtype", name, "a tag: an element type as a value")
    table.update(_tags())
    for name, (kind, what) in SCRIPT_NAMES.items():
        table["torch.jit._pickle", name] = Entry(kind, why=f"our own function: {what}")
    view = "our own function: a view proven inside its record"
    table["torch._utils", "_rebuild_tensor"] = Entry("rebuild", why=view)
    table["torch._utils", "_rebuild_tensor_v2"] = Entry("rebuild_v2", why=view)
    table["torch._utils", "_rebuild_tensor_v3"] = Entry("rebuild_v3", why=view)
    table["torch._utils", "_rebuild_parameter"] = Entry("rebuild_parameter", why="our own function: sets two flags")
    for name_pair, (kind, what) in _REBUILDS.items():
        table[name_pair] = Entry(kind, why=f"our own function: {what}")
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
    # Subclasses of ndarray whose data is all there is to them.
    for module, name in (
        ("numpy", "ndarray"), ("numpy", "matrix"), ("numpy.matrixlib.defmatrix", "matrix"), ("numpy", "memmap"),
        ("numpy.core.memmap", "memmap"), ("numpy._core.memmap", "memmap"),
    ):  # fmt: skip
        table[module, name] = Entry("np_ndarray", why="a tag: the class of an array to be filled")
    for row in BY_NAME.values():
        if row.numpy.startswith("ml_dtypes:"):
            table["ml_dtypes", row.name] = Entry("np_type", row.name, "a tag: an element type of an array")
    table["numpy", "dtype"] = Entry("np_dtype", why="a type letter and a width; no objects' dtypes")
    table["joblib.numpy_pickle", "NumpyArrayWrapper"] = Entry("joblib_array", why="an array of checked size behind it")
    table["torch.storage", "_load_from_bytes"] = Entry("load_from_bytes", why="a storage, read by the same machine")
    return table


def _tags() -> dict[tuple[str, str], Entry]:
    """Constants and classes that stand for themselves, and the classes that are kept as inert objects."""
    tag, inert = Entry("tag", why="a tag: its name is all it is"), Entry("inert", why="kept as data, never made")
    table = {(module, name): tag for module, names in _TAGS.items() for name in names}
    for module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse"):
        table.update({(module, f"{name}Tensor"): tag for name in _OLD_TENSORS})
    table.update({(module, name): inert for module, names in _INERT.items() for name in names})
    return table


ALLOWED: dict[tuple[str, str], Entry] = _build()
