"""The names that others import from the reference's compiled module."""

from tensorio.safetensors._errors import SafetensorError
from tensorio.safetensors._handle import PySafeSlice, _safe_open_handle, safe_open
from tensorio.safetensors._writing import TensorSpec, deserialize, serialize, serialize_file

__all__ = [
    "PySafeSlice",
    "SafetensorError",
    "TensorSpec",
    "__version__",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]

# Of the reference that is followed: packages compare it with what they need.
__version__ = "0.8.0"
