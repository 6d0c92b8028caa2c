"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tensorio.formats import WRITTEN

if TYPE_CHECKING:
    from tensorio.encryption._keys import KeySource

__all__ = ["fetched", "format_option", "key_option", "size_option", "unknown_option"]

Command = TypeVar("Command", bound=Callable[..., Any])

KEY = "env:NAME|file:PATH"


unknown_option = click.option(
    "--unknown", type=click.Choice(("error", "opaque")), default="error", show_default=True,
    help="Objects of classes that are not harmless: refuse the file, or keep them as data.",
)  # fmt: skip
format_option = click.option(
    "--format", "format_", type=click.Choice(WRITTEN), help="Of DST; by its suffix if not given."
)
size_option = click.option(
    "--max-shard-size", metavar="SIZE",
    help="Several files of at most so many bytes, and an index, in the folder DST: 5GB.",
)  # fmt: skip


def key_option(
    name: str = "--key", help: str = "Where the key of an encrypted file is.", **options: Any
) -> Callable[[Command], Command]:
    """Return the decorator for an option whose value is a key."""
    return click.option(name, metavar=KEY, callback=fetched, help=help, **options)


def fetched(ctx: click.Context, param: click.Parameter, value: str | None) -> KeySource | None:
    """Return the source of the key, having seen that there is one; its bytes are not kept."""
    if value is None:
        return None
    from tensorio.encryption._keys import KeySource

    try:
        source = KeySource(value)
        source.key()
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return source
