"""Which of the user's objects are tensors: NumPy, torch, and anything that speaks DLPack.

torch is looked up in ``sys.modules`` and never imported: an object can't be a
torch tensor before somebody else imported torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["as_numpy", "is_foreign_tensor", "is_tensor"]


def is_tensor(obj: object) -> bool:
    """Tell whether an object is written as a tensor."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return True
    if torch is not None and isinstance(obj, torch.Tensor):
        return True
    return is_foreign_tensor(obj)


def is_foreign_tensor(obj: object) -> bool:
    """Tell whether an object of some other array library is written as a tensor."""
    return hasattr(type(obj), "__dlpack__")


def as_numpy(obj: Any) -> np.ndarray[Any, Any]:
    """Return the array of an object of some other array library; copies: no, if that library can avoid it."""
    import numpy as np

    return np.asarray(obj) if hasattr(obj, "__array__") else np.from_dlpack(obj)
