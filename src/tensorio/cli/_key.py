"""The option ``--key`` of commands that read files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tensorio.encryption._keys import KeySource

__all__ = ["fetched", "key_option"]

Command = TypeVar("Command", bound=Callable[..., Any])

KEY = "env:NAME|file:PATH"


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
