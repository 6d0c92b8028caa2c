"""The format of what a command is to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorio.cli._text import spelled

if TYPE_CHECKING:
    from tensorio.formats._base import Format

__all__ = ["target_format"]


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
