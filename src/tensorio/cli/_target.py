"""What a command is to write: the format, and the size of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorio.cli._text import spelled

if TYPE_CHECKING:
    from tensorio.formats._base import Format

__all__ = ["several_target", "target_format"]


def target_format(target: str, named: str | None, hint: str = "DST") -> Format:
    """Return the format of a target, by what ``--format`` says or by its suffix.

    Parameters
    ----------
    hint : str
        What the target is called on the command line.

    Raises
    ------
    click.BadParameter
        Nothing says which one it is.
    """
    from tensorio import formats

    try:
        return formats.for_target(target, named)
    except ValueError as error:
        raise click.BadParameter(spelled(str(error), "format"), param_hint=hint) from None


def several_target(target: str, named: str | None, most: str) -> tuple[Format, int]:
    """Return the format of several files with an index, and the most bytes of each: what ``--max-shard-size`` says.

    Raises
    ------
    click.BadParameter
        Nothing says which format it is, or there are none in it; `most` is no size.
    """
    from tensorio.checkpoint._packing import nbytes_of
    from tensorio.checkpoint._shards import shard_target

    try:
        return shard_target(target, named).format, nbytes_of(most)
    except ValueError as error:
        text = spelled(str(error), "format", "max_shard_size")
        raise click.BadParameter(text, param_hint="--max-shard-size") from None
