"""``python -m tensorio.dropin``: become a Python that runs the program with the drop-in installed.

The process is replaced (``exec``) by a plain interpreter whose environment has
what `_children` would hand to a child. So ``sys.argv``, ``__main__``,
``sys.path``, tracebacks, exit codes, signals and `multiprocessing` are as ever.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tensorio.dropin import _children, _report

__all__ = ["main"]

USAGE = """\
usage: python -m tensorio.dropin [options] (-m module | -c code | script) [arguments...]

Runs a program as 'python' would, with safetensors and torch.load/torch.save served by tensorio, in it and in the
processes it starts. One line on standard error says at its end what was served.

options:
  --no-torch        leave torch.load and torch.save as they are
  --no-safetensors  leave safetensors as it is
  --quiet           no line at the end
  --help            this text
Options of the interpreter go before '-m tensorio.dropin'.
"""
WRONG_USE = 2
OPTIONS = ("--no-torch", "--no-safetensors", "--quiet")


def main() -> int:
    """Run what ``sys.argv`` says; returns, with the exit code, only if that is not to be run or on Windows."""
    options, target = _split(sys.argv[1:])
    if "--help" in options or "-h" in options:
        print(USAGE, end="")
        return 0
    wrong = _wrong(options, target)
    if wrong:
        print(f"tensorio.dropin: {wrong}\n\n{USAGE}", end="", file=sys.stderr)
        return WRONG_USE
    env = dict(os.environ)
    _children.environment(
        env,
        torch="--no-torch" not in options,
        safetensors="--no-safetensors" not in options,
        report=os.environ.get(_report.VARIABLE),  # of a program that this one is a child of
        program="quiet" if "--quiet" in options else "report",
    )
    command = [sys.executable, *_interpreter_options(), *target]
    if os.name == "nt":  # exec there starts a second process and ends the first
        return subprocess.call(command, env=env)
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(command[0], command, env)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our options, and the program with what is its own."""
    for i, word in enumerate(arguments):
        if not word.startswith("-") or word[:2] in ("-m", "-c") or word == "-":
            return arguments[:i], arguments[i:]
    return arguments, []


def _wrong(options: list[str], target: list[str]) -> str | None:
    """What is wrong with the command line or this interpreter, if anything is."""
    unknown = [word for word in options if word not in OPTIONS]
    if unknown:
        return f"no option {unknown[0]}"
    if not target or target in (["-m"], ["-c"]):
        return "nothing to run: expected -m module, -c code or a script"
    if sys.flags.no_site or sys.flags.ignore_environment:
        return "can't install itself in an interpreter run with -S, -E or -I: leave that out"
    return None


def _interpreter_options() -> list[str]:
    """The options that this interpreter was given itself, from its whole command line."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    # The last are -m tensorio.dropin, -mtensorio.dropin, or one with other letters before the m.
    while words and not words[-1].startswith("-"):
        words.pop()
    last = words.pop().partition("m")[0] if words else "-"
    return words if last == "-" else [*words, last]
