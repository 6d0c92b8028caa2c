"""What a command is to write: the format, and the size of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorio.cli._text import spelled
from tensorio.errors import UnsupportedError

if TYPE_CHECKING:
    from tensorio.formats._base import Format

__all__ = ["target_format"]


def target_format(
    target: str, named: str | None, most: str | None = None, hint: str = "DST"
) -> tuple[Format, int | None]:
    """Return the format of a target, by ``--format`` or its suffix, and the most bytes of each file if it is several.

    Parameters
    ----------
    most : str, optional
        What ``--max-shard-size`` says.
    hint : str
        What the target is called on the command line.

    Raises
    ------
    click.BadParameter
        Nothing says which format it is; `most` is no size; no files of limited size can be written there.
    """
    from tensorio import formats
    from tensorio.checkpoint._packing import nbytes_of
    from tensorio.checkpoint._shards import shard_target

    try:
        limit = None if most is None else nbytes_of(most)
    except ValueError as error:
        raise click.BadParameter(spelled(str(error), "max_shard_size"), param_hint="--max-shard-size") from None
    try:
        return (formats.for_target(target, named) if limit is None else shard_target(target, named).format), limit
    except (ValueError, UnsupportedError) as error:
        raise click.BadParameter(spelled(str(error), "format", "max_shard_size"), param_hint=hint) from None
