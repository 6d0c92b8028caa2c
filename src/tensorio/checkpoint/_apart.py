"""Verify the files of a checkpoint one by one, where they can't be opened as one: what is whole of it, and what not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tensorio.checkpoint._checkpoint import open_single
from tensorio.checkpoint._index import read_index
from tensorio.checkpoint._several import place_in
from tensorio.checkpoint._verify import verify_names, verify_opened
from tensorio.errors import TensorIOError, TruncatedError
from tensorio.storage.reading import unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorio.checkpoint._report import Report

    Progress = Callable[[int, int], object]

__all__ = ["verify_apart"]


def verify_apart(
    path: str, error: TensorIOError | OSError, manifest: Any, options: dict[str, Any], progress: Progress | None
) -> Report:
    """Verify each file that an index names, and compare the folder with its manifest.

    Parameters
    ----------
    path : str
        A folder, or its index; see `tensorio.checkpoint._several.place_in`.
    error : Exception
        What opening them as one ended with; a problem of its own if none of the files explains it.
    manifest : path or False, optional
        See `tensorio.verify`.
    options : dict
        Those of `open_single`.
    """
    try:
        index = place_in(path).path
    except OSError as failed:  # a link that leads nowhere
        index = failed.filename or path
    folder = os.path.dirname(index) or os.curdir
    report = verify_names(folder, path, manifest, progress)
    named = {os.path.join(folder, name) for name in report.covered}
    told = {problem.path for problem in report.problems}
    apart: list[TensorIOError] = []
    for file in _files(index, folder, told, apart):
        try:
            with open_single(file, **options) as checkpoint:
                found = verify_opened(checkpoint._opened, file, progress, manifest=False)
        except FileNotFoundError:
            if file not in told:  # by the manifest
                apart.append(TruncatedError("the index names a file that is not there", path=file))
        except OSError as failed:
            apart.append(_about(unreadable(failed), file))
        except TensorIOError as failed:
            apart.append(_about(failed, file))
        else:
            apart += found.problems
            report.format = found.format
            report.records += found.records
            report.checked += found.checked
            report.unchecked += 0 if file in named else found.unchecked
    if not apart and not report.problems:  # the files are right, each by itself
        apart.append(_about(unreadable(error) if isinstance(error, OSError) else error, index))
    report.problems = apart + report.problems
    return report


def _files(index: str, folder: str, told: set[str | None], problems: list[TensorIOError]) -> list[str]:
    """The files that an index names, none if it can't be read; or the one that is no index."""
    if not index.endswith(".json"):
        return [index]
    try:
        return [os.path.join(folder, name) for name in dict.fromkeys(read_index(index).values())]
    except OSError as error:
        if index not in told:
            problems.append(_about(unreadable(error), index))
    except TensorIOError as error:
        problems.append(_about(error, index))
    return []


def _about(problem: TensorIOError, path: str) -> TensorIOError:
    problem.path = problem.path or path
    return problem
