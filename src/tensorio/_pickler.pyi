from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

def dumps(
    obj: object,
    leaf: Callable[[Any], tuple[Any, ...]] | None = None,
    compact: bool = False,
    exact: bool = False,
    fetch: Callable[[Any], Any] | None = None,
) -> tuple[bytes, array[int], array[int], array[int], list[object], dict[int, np.ndarray[Any, Any]], int]: ...
