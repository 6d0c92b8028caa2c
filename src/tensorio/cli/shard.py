"""``tensorio shard``: files for each rank of a tensor-parallel group, and back."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from tensorio.cli._options import key_option, unknown_option
from tensorio.cli._text import Cell, Sheet, console, cut_middle, shown, size, some, spelled
from tensorio.errors import TensorIOError
from tensorio.formats import WRITTEN

if TYPE_CHECKING:
    from tensorio.checkpoint._shard import ShardReport

__all__ = ["command"]

SCHEMA = 1
SHOWN_MAX = 20  # names listed of each kind
LABEL_MAX = 30  # columns of a file's name beside its bar
# Arguments of the functions that are options here.
OPTIONS = ("unknown", "default", "max_shard_size", "name")


@click.command("shard", short_help="Cut a checkpoint into files for each rank, or put them together.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@click.option("--tp", type=click.IntRange(1), help="Number of ranks.")
@click.option("--rules", help="A file of rules, or a preset: llama, mixtral, gpt2, gpt_neox, bert, t5, ...")
@click.option("--default", type=click.Choice(("error", "replicate", "skip")), default="error", show_default=True,
              help="What becomes of tensors that no rule fits.")  # fmt: skip
@click.option("--config", type=click.Path(), help="The model's config.json; the one beside SRC if not given.")
@click.option("--set", "settings", multiple=True, metavar="KEY=N", help="A number that rules take from config.json.")
@click.option("--format", "format_", type=click.Choice(WRITTEN), help="Of the files.")
@click.option("--name", help="Of the files, with {rank} and {part} in it.")
@click.option("--max-shard-size", metavar="SIZE", help="Several files a rank, of at most so many bytes: 5GB.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier run made.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--merge", is_flag=True, help="SRC is a folder of such files: put them together in the file DST.")
@unknown_option
@key_option(help="Where the key of SRC is, if it is encrypted; DST is not.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(source: str, target: str, merge: bool, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Cut the tensors of SRC for a tensor-parallel group of --tp ranks: a folder DST with a file for each.

    \b
    tensorio shard model.safetensors ranks --tp 4 --rules llama
    tensorio shard model/ ranks --tp 2 --rules my.rules --dry-run
    tensorio shard --merge ranks model.safetensors

    SRC is a file, or a folder with a model.safetensors.index.json. A rule is a
    line: a pattern of names, "=", and a dimension or a word. The first that fits
    a name counts. "*" stands for a part of a name without dots, "**" for any
    number of whole levels.

    \b
      model.layers.*.mlp.up_proj.weight = 0          cut along dimension 0
      **.qkv_proj.weight = 0 heads=32,8,8            three sections, cut between heads
      **.gate_up_proj.weight = 0 sections=1,1        two sections, each cut by itself
      **.embed_tokens.weight = 0 pad_to=64           with rows of zeros at the end
      **.norm.weight = replicate                     on every rank
      **.o_proj.bias = rank0                         on rank 0 only
      **.inv_freq = skip optional                    nowhere, if there is any

    DST appears whole or not at all, with less than 64 MiB of memory, whatever the
    size. Its tensorio_tp.json says how it was cut.
    """  # noqa: D301  (click wants the backspace itself)
    start = time.perf_counter()
    try:
        if merge:
            _merge(source, target, options, as_json, start)
        else:
            _cut(source, target, options, as_json, dry_run, start)
    except TensorIOError as error:
        error.message = _spelt(error.message)
        raise
    except ValueError as error:
        raise click.UsageError(_spelt(str(error))) from None


def _spelt(text: str) -> str:
    return re.sub(r"config=\{'([\w.]+)': \.\.\.\}", r"--set \1=N", spelled(text, *OPTIONS))


def _cut(source: str, target: str, options: dict[str, Any], as_json: bool, dry_run: bool, start: float) -> None:
    import tensorio
    from tensorio.cli._progress import bar

    if options["tp"] is None or options["rules"] is None:
        raise click.UsageError("--tp and --rules are needed to cut a checkpoint; --merge puts one together")
    keywords = {
        key: options[key] for key in ("tp", "rules", "default", "name", "max_shard_size", "overwrite", "unknown", "key")
    }
    with bar(cut_middle(shown(os.path.basename(source)), LABEL_MAX)) as progress:
        report = tensorio.shard(source, target, config=_config(source, options), format=options["format_"],
                                dry_run=dry_run, progress=progress, **keywords)  # fmt: skip
    if as_json:
        _print_json(_fields(report, dry_run))
    else:
        console().print(_sheet(report, dry_run, time.perf_counter() - start))


def _config(source: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """The model's config.json, with what --set says; None: the library looks for one."""
    from tensorio.tp import config_of

    if not options["settings"]:
        return None if options["config"] is None else config_of(options["config"])
    folder = source if os.path.isdir(source) else os.path.dirname(source)
    path = options["config"] or os.path.join(folder, "config.json")
    config = config_of(path) if options["config"] or os.path.isfile(path) else {}
    for setting in options["settings"]:
        key, _, value = setting.partition("=")
        if not key or not value.isdecimal():
            raise click.BadParameter(f"expected KEY=N, found {setting!r}", param_hint="--set")
        config[key] = int(value)
    return config


def _merge(source: str, target: str, options: dict[str, Any], as_json: bool, start: float) -> None:
    import tensorio
    from tensorio.cli._progress import bar

    for key in ("tp", "rules", "config", "name", "max_shard_size"):
        if options[key] is not None:
            raise click.UsageError(f"--{key.replace('_', '-')} is for cutting, and --merge puts together")
    with bar(cut_middle(shown(os.path.basename(target)), LABEL_MAX)) as progress:
        skipped = tensorio.unshard(source, target, format=options["format_"], key=options["key"], progress=progress)
    nbytes = os.path.getsize(target)
    if as_json:
        _print_json({"schema": SCHEMA, "source": source, "target": target, "nbytes": nbytes, "skipped": skipped})
        return
    sheet = Sheet("<>>")
    sheet.add(Cell(shown(target), "bold"), f"{size(nbytes)} in {time.perf_counter() - start:.2f} s")
    _list(sheet, f"missing, since {'it was' if len(skipped) == 1 else 'they were'} skipped: ", skipped)
    console().print(sheet)


# ------------------------------------------------------------------------------ output


def _fields(report: ShardReport, dry_run: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "source": report.source, "target": report.target, "written": not dry_run,
        "format": report.format, "tp": report.tp, "tensors": report.tensors, "files": report.files,
        "nbytes": report.nbytes, "rules": dict(report.rules), "unmatched": report.unmatched,
        "skipped": report.skipped, "padded": report.padded, "repeated": report.repeated, "dropped": report.dropped,
    }  # fmt: skip


def _print_json(fields: dict[str, Any]) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
    click.echo("{\n" + ",\n".join(lines) + "\n}")


def _sheet(report: ShardReport, dry_run: bool, seconds: float) -> Sheet:
    sheet = Sheet("<>>")
    done = "would be written" if dry_run else f"in {seconds:.2f} s"
    sheet.add(Cell(shown(report.target), "bold"), f"{some(report.tensors, 'tensor')} for {some(report.tp, 'rank')}, "
              f"{report.format}, {size(sum(report.nbytes))} {done}")  # fmt: skip
    sheet.add(Cell("  ranks", "dim"))
    for rank, (files, nbytes) in enumerate(zip(report.files, report.nbytes, strict=True)):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        sheet.add(f"    {rank}  {shown(files[0])}{more}", size(nbytes), "")
    sheet.add(Cell("  tensors by rule", "dim"))
    for pattern, count in report.rules.items():
        if count:
            sheet.add(f"    {shown(pattern)}", f"{count:,}", "")
    _list(sheet, "without a rule: ", report.unmatched)
    _list(sheet, "skipped: ", report.skipped)
    _list(sheet, "padded with zeros: ", report.padded)
    _list(sheet, "with fewer heads than ranks, so that several ranks have the same: ", report.repeated)
    _list(sheet, "dropped, since they are no tensors: ", report.dropped)
    return sheet


def _list(sheet: Sheet, what: str, names: tuple[str, ...] | list[str]) -> None:
    if not names:
        return
    sheet.add(Cell(f"  {what}{len(names):,}", "yellow"))
    folded = Counter(re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name) for name in names)  # layers as one
    for name, count in list(folded.items())[:SHOWN_MAX]:
        sheet.add(f"    {shown(name) or '(the object itself)'}", f"x{count:,}" if count > 1 else "", "")
    if len(folded) > SHOWN_MAX:
        sheet.add(Cell(f"    ... and {len(folded) - SHOWN_MAX:,} more", "dim"))
