from collections.abc import Callable
from typing import final

from typing_extensions import Buffer

from tensorio._arrays import Lease
from tensorio.errors import TensorIOError
from tensorio.pickles import Loaded, Named, Placed, Records, Rules

@final
class Leaf:
    row: int
    def __init__(self, row: int) -> None: ...

def loads(
    pickle: Buffer,
    records: Records | None = None,
    *,
    leases: list[Lease] | None = None,
    decode: Callable[[int, int], Lease] | None = None,
    wanted: set[int] | None = None,
    rules: Rules = ...,
    start: int = 0,
    first_row: int = 0,
    first_dim: int = 0,
    placed: dict[str, Placed] | None = None,
    own_storage: int = -1,
    made_storage: Callable[[Buffer], int] | None = None,
    nested_storage: Callable[[int | bytes, int], tuple[str, int, int, int]] | None = None,
) -> Loaded: ...
def names(pickle: Buffer, start: int = 0, own: str = "") -> tuple[list[Named], int | None, TensorIOError | None]: ...
