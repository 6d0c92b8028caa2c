"""Checkpoints in several files: each is loaded as by itself, once the index is found to fit them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._index import of_one_save, open_several

if TYPE_CHECKING:
    from tensorio.checkpoint._several import Place

__all__ = ["load_several"]


def load_several(path: str, load: Callable[[str], Any]) -> Any:
    """Load the checkpoint of a folder, or the files that an index names.

    Parameters
    ----------
    path : str
        See `place_of_several`.
    load : callable
        Loads one file.

    Returns
    -------
    object
        A dict of the tensors of all files, which are of one save; of a folder with a single file, what `load` makes
        of that.
    """

    def act(place: Place) -> Any:
        if not place.is_index:
            return load(place.path)
        with open_several(path) as checkpoint:  # raises unless index and files agree
            return {fqn: tensor for file in checkpoint.files for fqn, tensor in load(file).items()}

    return of_one_save(path, act)
