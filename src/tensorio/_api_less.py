"""The public functions that write less: parts of checkpoints, and checkpoints put together of parts."""

from __future__ import annotations

from typing import Any

from tensorio.checkpoint._checkpoint import open_checkpoint
from tensorio.errors import UnsupportedError

__all__ = ["delta_chain"]


def delta_chain(path: Any) -> list[str]:
    """List the files that a checkpoint needs: itself and, behind a delta, its base, that one's base, and so on.

    Parameters
    ----------
    path : str or os.PathLike

    Returns
    -------
    list of str
        None of them may be deleted or changed as long as the first is to be read.

    Raises
    ------
    See `open`: every file of the chain is opened and checked against what the one before says of it.
    """
    with open_checkpoint(path, unknown="opaque") as checkpoint:
        if checkpoint.path is None:
            raise UnsupportedError("only a file with a path can refer to others")
        return list(checkpoint.files)
