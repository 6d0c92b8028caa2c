"""Checkpoints in several files: each is loaded as by itself, once the index is found to fit them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._index import of_one_save, open_several
from tensorio.checkpoint._several import INDEX_SUFFIX

if TYPE_CHECKING:
    from tensorio.checkpoint._several import Place

__all__ = ["is_several", "load_several"]


def is_several(f: Any) -> bool:
    """Tell whether what is to be loaded is a folder or an index."""
    return isinstance(f, str | os.PathLike) and (os.fsdecode(f).endswith(INDEX_SUFFIX) or os.path.isdir(f))


def load_several(path: str | os.PathLike[str], load: Callable[[str], Any]) -> Any:
    """Load the checkpoint of a folder, or the files that an index names.

    Parameters
    ----------
    path : str or os.PathLike
    load : callable
        Loads one file.

    Returns
    -------
    object
        A dict of the tensors of all files, which are of one save; of a folder with a single file, what `load` makes
        of that.
    """
    name = os.fsdecode(path)

    def act(place: Place) -> Any:
        if not place.is_index:
            return load(place.path)
        with open_several(name) as checkpoint:  # raises unless index and files agree
            return {fqn: tensor for file in checkpoint.files for fqn, tensor in load(file).items()}

    return of_one_save(name, act)
