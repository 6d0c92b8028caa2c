from array import array
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from typing_extensions import Buffer

make_view: Any

@final
class Lease:
    def __new__(cls, obj: Buffer, writable: bool = False) -> Lease: ...

def view(
    lease: Lease, dtype: int, shape: Sequence[int], strides: Sequence[int], offset: int, nbytes: int
) -> np.ndarray[Any, Any]: ...
def view_row(rows: array[int], dims: array[int], row: int, lease: Lease) -> np.ndarray[Any, Any]: ...
def views(rows: array[int], dims: array[int], leases: list[Lease]) -> list[np.ndarray[Any, Any]]: ...
def places(
    rows: array[int], dims: array[int], picks: array[int], lease: Callable[[int], Lease | None]
) -> array[int]: ...
