"""The command line tool: click says what may be typed, rich draws; everything else is the library.

Commands import what they need when they run: `tensorio inspect` starts without
NumPy and in under 60 MiB.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from tensorio._version import __version__
from tensorio.cli import (
    checkpoints,
    convert,
    demo,
    encrypt,
    inspect,
    manifest,
    merge,
    publish,
    recover,
    scan,
    shard,
    strip,
    verify,
)
from tensorio.cli._text import complain
from tensorio.errors import TensorIOError

__all__ = ["cli", "run"]

BAD_FILE, WRONG_USE = 1, 2
# What a shell reports for a program that died of the signal (128 + its number).
INTERRUPTED, PIPE_CLOSED = 130, 141


class Tool(click.Group):
    """A group whose commands end in exit codes, never in tracebacks for what can be expected."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        with exit_codes(ctx):
            return super().invoke(ctx)


@contextmanager
def exit_codes(ctx: click.Context) -> Iterator[None]:
    """Turn expected errors into one line on stderr and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except TensorIOError as error:
        complain(error)
        ctx.exit(BAD_FILE)
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _forget_stdout()
            ctx.exit(PIPE_CLOSED)
        complain(error)
        ctx.exit(WRONG_USE)
    except MemoryError:
        complain("out of memory")
        ctx.exit(WRONG_USE)


def _forget_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not complain at exit."""
    with suppress(OSError, ValueError, AttributeError):  # not a real stream: nothing is flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=Tool, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tensorio")
def cli() -> None:
    """Look into, check and convert tensor checkpoints without loading them.

    \b
    Exit codes
      0    fine
      1    the file is bad (one line on stderr says why), or verify found problems,
           or scan found something dangerous or unreadable
      2    wrong use: an unknown option, a path that can't be opened
      3    scan found names that are unknown, and nothing worse
      130  interrupted
      141  the reader of the output closed the pipe
    """  # noqa: D301  (click wants the backspace itself)


for module in (inspect, verify, manifest, scan, convert, merge, strip, shard, recover, checkpoints, demo):
    cli.add_command(module.command)
for command in (*encrypt.commands, *publish.commands):
    cli.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the tool with `arguments` (those of the process by default) and return its exit code."""
    try:
        cli.main(None if arguments is None else list(arguments), prog_name="tensorio")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
