from array import array
from collections.abc import Callable, Sequence
from typing import Any

from tensorio._arrays import Lease

hand_over: object

def has_dtype(dtype: int) -> bool: ...
def capsule(
    lease: Lease, dtype: int, shape: Sequence[int], strides: Sequence[int], offset: int, nbytes: int
) -> Any: ...
def tensors(rows: array[int], dims: array[int], leases: list[Lease], consumer: Callable[[Any], Any]) -> list[Any]: ...
def tensor_row(rows: array[int], dims: array[int], row: int, lease: Lease) -> Any: ...
