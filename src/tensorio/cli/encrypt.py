"""``tensorio encrypt``, ``decrypt`` and ``keygen``: files that only who has the key can read."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import click

from tensorio.cli._options import key_option
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some, spelled
from tensorio.errors import TensorIOError
from tensorio.writing.output import naming

__all__ = ["commands"]

SHOWN_MAX = 20  # names listed of files in the clear
LABEL_MAX = 30  # columns of a file's name beside its bar
# Arguments of the functions that are options here.
OPTIONS = ("tensors", "clear", "chunk_size", "old_key")
SPEED_NBYTES = 16 << 20  # below that, a speed is noise


@click.command("encrypt", short_help="Encrypt a file, or tensors of it.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@key_option("--key", "Where the key is.", required=True)
@click.option("--key-id", default="", metavar="NAME", help="A name for the key, to stand in the file, readable.")
@click.option("--tensors", multiple=True, metavar="PATTERN",
              help="Encrypt only these tensors of a .safetensors: names with * and **; may be repeated.")  # fmt: skip
@click.option("--clear", multiple=True, metavar="PATTERN",
              help="Leave these files of a folder readable: '*.json', or '' for none; may be repeated.")  # fmt: skip
@click.option("--chunk-size", type=int, default=1 << 20, show_default=True, metavar="BYTES",
              help="Bytes that are decrypted together: a power of two from 4096.")  # fmt: skip
@key_option("--old-key", "If SRC is encrypted: its key, to encrypt it with another.")
def encrypt(source: str, target: str, tensors: tuple[str, ...], clear: tuple[str, ...], **options: Any) -> None:
    """Encrypt SRC by AES-256-GCM: a file; all files of a folder; or some tensors of a .safetensors, which any reader
    still opens.

    Of a folder, small files that other tools look for stay readable (*.json,
    tokenizers, text), and are listed; --clear says which instead.

    \b
    tensorio keygen model.key
    tensorio encrypt model.pt model.pt.enc --key file:model.key
    tensorio encrypt model.safetensors some.safetensors --key env:KEY --tensors '**.lora_A.**' --tensors 'head.*'

    DST may be SRC, and appears whole or not at all. With file:, the key is a file
    of 32 bytes or of one line of text; with env:, a variable with such text: 64
    hexadecimal digits, or 44 characters of base64. The same option of decrypt,
    inspect, verify, convert and others reads what was encrypted.
    """  # noqa: D301  (click wants the backspace itself)
    _run("encrypt", source, target, tensors=tensors or None, clear=clear or None, **options)


@click.command("decrypt", short_help="Write an encrypted file as it was.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@key_option("--key", "Where the key is.", required=True)
def decrypt(source: str, target: str, key: Any) -> None:
    """Write what SRC was before it was encrypted to DST: a file or a folder.

    DST appears whole or not at all: nothing is written of a file that was
    changed since.
    """
    _run("decrypt", source, target, key=key)


@click.command("keygen", short_help="Make a key.")
@click.argument("path", metavar="FILE", type=click.Path())
def keygen(path: str) -> None:
    """Write a new random key to FILE, which must not exist: a line of 64 hexadecimal digits that only you can read.

    Keep a copy of it: without the key, nobody can read what is encrypted with it.
    """
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        with open(fd, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(fd)
    sheet = Sheet("<<")
    sheet.add(Cell(shown(path), "bold"), f"a key; use it as --key file:{shown(path)}")
    console().print(sheet)


def _run(act: str, source: str, target: str, **options: Any) -> None:
    import tensorio
    from tensorio.cli._progress import bar

    start = time.perf_counter()
    try:
        with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
            saved = getattr(tensorio, act)(source, target, progress=progress, **options)
    except TensorIOError as error:
        error.message = spelled(error.message, *OPTIONS)
        raise
    except ValueError as error:
        raise click.UsageError(spelled(str(error), *OPTIONS)) from None
    seconds = time.perf_counter() - start
    speed = f", {size(saved.nbytes / seconds)}/s" if saved.nbytes >= SPEED_NBYTES else ""
    files = f"{some(len(saved.files), 'file')}, " if len(saved.files) != 1 else ""
    sheet = Sheet("<<")
    sheet.add(Cell(shown(target), "bold"), f"{act}ed, {files}{size(saved.nbytes)} in {seconds:.2f} s{speed}")
    if saved.clear:
        what = "in the clear" if act == "encrypt" else "copied, since they were not encrypted"
        sheet.add(Cell(f"  {what}: {some(len(saved.clear), 'file')}", "yellow"))
        for path in saved.clear[:SHOWN_MAX]:
            sheet.add(f"    {shown(os.path.basename(path))}")
        if len(saved.clear) > SHOWN_MAX:
            sheet.add(Cell(f"    ... and {len(saved.clear) - SHOWN_MAX:,} more", "dim"))
    console().print(sheet)


commands = (encrypt, decrypt, keygen)
