"""What processes started from here inherit: variables, and a ``sitecustomize`` that acts on them.

The folder ``_site`` goes first into ``PYTHONPATH``; all that is in it is a
``sitecustomize``, which every interpreter runs at its start. It gives way to the
``sitecustomize`` that would have run without it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from tensorio.dropin import _report

__all__ = ["environment", "install", "join", "uninstall"]

SITE = str(Path(__file__).resolve().parent / "_site")
# Comma-separated: what to replace.
WHAT = "TENSORIO_DROPIN"
# Set for the next interpreter only: it is the program itself. "report" or "quiet".
PROGRAM = "TENSORIO_DROPIN_PROGRAM"


def environment(
    env: MutableMapping[str, str], *, torch: bool, safetensors: bool, report: str | None, program: str | None = None
) -> None:
    """Write into an environment what makes a process started with it join.

    Parameters
    ----------
    env : mapping of str to str
        Changed in place.
    torch, safetensors : bool
    report : str or None
        Folder of the counts; None: no counts.
    program : str or None
        ``"report"`` or ``"quiet"``: the process is the program that was asked for, not one of its children.
    """
    names = [name for name, wanted in (("torch", torch), ("safetensors", safetensors)) if wanted]
    for variable, value in ((WHAT, ",".join(names)), (_report.VARIABLE, report), (PROGRAM, program)):
        if value:
            env[variable] = value
        else:
            env.pop(variable, None)
    rest = _without_site(env.get("PYTHONPATH", ""))
    env["PYTHONPATH"] = f"{SITE}{os.pathsep}{rest}" if rest else SITE  # an empty part would be the current folder


def _without_site(path: str) -> str:
    return os.pathsep.join(part for part in path.split(os.pathsep) if part != SITE)


def install(*, torch: bool, safetensors: bool, report: str | None) -> None:
    """Put it into this process's environment."""
    environment(os.environ, torch=torch, safetensors=safetensors, report=report)


def uninstall() -> None:
    """Take it out again."""
    if WHAT not in os.environ:
        return
    for variable in (WHAT, _report.VARIABLE):
        os.environ.pop(variable, None)
    rest = _without_site(os.environ.get("PYTHONPATH", ""))
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)


def join(program: str | None = None) -> None:
    """Do what the environment says; ``_site/sitecustomize.py`` calls it.

    Parameters
    ----------
    program : str or None
        As for `environment`.
    """
    from tensorio import dropin

    wanted = os.environ.get(WHAT, "").split(",")
    dropin.install(
        torch="torch" in wanted,
        safetensors="safetensors" in wanted,
        report=None if program == "report" else False,
    )
