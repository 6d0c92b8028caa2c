from array import array
from typing import Any

import numpy as np

__pyx_capi__: dict[str, Any]

def describe_array(array: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...], int, int, bool]: ...
def describe_torch(tensor: Any) -> tuple[int, tuple[int, ...], int, int, bool] | None: ...
def places(objects: list[Any], torch_tensor: Any = None) -> array[int]: ...
