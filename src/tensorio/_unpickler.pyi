from array import array
from collections.abc import Callable
from typing import Any, final

from typing_extensions import Buffer

from tensorio._arrays import Lease

@final
class Leaf:
    row: int
    def __init__(self, row: int) -> None: ...

def loads(
    pickle: Buffer,
    numbers: array[int],
    keys: dict[str, int],
    extents: array[int],
    leases: list[Lease] | None = None,
    decode: Callable[[int, int], Lease] | None = None,
    wanted: set[int] | None = None,
    unknown: str = "error",
) -> tuple[Any, array[int], array[int]]: ...
