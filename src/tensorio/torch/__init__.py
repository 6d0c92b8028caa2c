"""What `torch.load` and `torch.save` do, over mappings: tensors alias the file, their pages are shared.

Needs torch (extra ``torch``); ``import tensorio`` does not.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401  # said here, once, instead of by whatever module is first to miss it
except ImportError as error:
    if error.name != "torch":
        raise
    raise ImportError("tensorio.torch needs torch: pip install 'tensorio[torch]'", name="torch") from None

from tensorio.torch._errors import LoadError
from tensorio.torch._files import load_file, save_file
from tensorio.torch._load import load
from tensorio.torch._rng import rng_state, set_rng_state
from tensorio.torch._save import save

__all__ = ["LoadError", "load", "load_file", "rng_state", "save", "save_file", "set_rng_state"]
