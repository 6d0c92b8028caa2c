"""The surface of the ``safetensors`` package (release 0.8.0), over mappings: change one import.

::

    from tensorio.safetensors import safe_open
    from tensorio.safetensors.torch import load_file, save_file

Imports no framework; the modules `numpy`, `torch`, `flax`, `tensorflow`, `mlx`
and `paddle` import theirs. What differs is listed in ``docs/safetensors.md``.
"""

from tensorio.safetensors._safetensors_rust import (
    SafetensorError,
    TensorSpec,
    __version__,
    _safe_open_handle,
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "__version__",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]
