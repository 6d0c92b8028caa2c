"""Small values that torch checkpoints hold besides tensors, as inert data.

None of them needs torch; each is written back to a ``.pt`` as what it was.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Device", "Opaque", "Size", "TorchDType", "TorchTag"]


class Size(tuple[int, ...]):
    """A ``torch.Size``: the shape of something, as a tuple of int."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class Device(NamedTuple):
    """A ``torch.device``.

    Attributes
    ----------
    type : str
        Such as ``"cpu"`` and ``"cuda"``.
    index : int or None
        Which of them; None if the file does not say.
    """

    type: str
    index: int | None = None  # type: ignore[assignment]  # torch's word; hides tuple.index


class TorchDType(str):
    """A ``torch.dtype`` by name, e.g. ``"bfloat16"``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"TorchDType({str(self)!r})"


class TorchTag(str):
    """A constant of torch by its full name, e.g. ``"torch.sparse_coo"`` or ``"torch.per_tensor_affine"``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"TorchTag({str(self)!r})"


class Opaque:
    """An object of a class that is not allowed, kept as inert data: nothing of it was run.

    Attributes
    ----------
    module, name : str
        What the pickle calls its class or function.
    args : tuple or None
        The arguments it would have been called with; None if it is the class
        or function itself.
    kwargs : dict or None
        Those that were named.
    state : object
        What its state would have been set to; None if nothing.
    items : list
        What would have been appended to it (values) or set in it (key and value pairs).
    """

    __slots__ = ("args", "items", "kwargs", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[object, ...] | None = None) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.kwargs: dict[str, object] | None = None
        self.state: object = None
        self.items: list[object] = []

    def __repr__(self) -> str:
        shown = f"{self.module}.{self.name}".encode("unicode_escape").decode("ascii")[:80]
        return f"<Opaque {shown}>"
