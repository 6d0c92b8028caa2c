"""`safetensors` and ``torch.load``/``torch.save`` served by tensorio, in programs that know nothing of it.

::

    python -m tensorio.dropin serve.py --port 8000      # a program as it is
    python -m tensorio.dropin -m gunicorn app:app

    import tensorio.dropin                              # or one line in the program
    tensorio.dropin.install()

``import safetensors`` then gives `tensorio.safetensors`, whether safetensors is
installed or not; ``torch.load`` and ``torch.save`` are those of `tensorio.torch`.
Processes started from here follow. See ``docs/dropin.md``.

==================== =====================================================
`_safetensors`       finder: the package's names, its version
`_torch`             the two functions, when torch is or gets imported
`_bound`             what other modules took by ``from ... import``
`_children`          what processes started from here inherit
`_report`            who did what, over all processes; the line at exit
`_command`           ``python -m tensorio.dropin``
`_site`              the first thing that those processes run
==================== =====================================================
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tensorio.dropin import _children, _report, _safetensors, _torch

if TYPE_CHECKING:
    from typing import Literal, TextIO

__all__ = ["install", "uninstall"]

_lock = threading.RLock()


def install(
    *,
    torch: bool = True,
    safetensors: bool = True,
    children: bool = True,
    report: TextIO | Literal[False] | None = None,
) -> None:
    """Put tensorio in the place of safetensors and of ``torch.load`` and ``torch.save``, in this process.

    Parameters
    ----------
    torch : bool
        Replace ``torch.load``, ``torch.save`` and the same two in ``torch.serialization``: now if torch has been
        imported, else when it will be. torch is not imported by this.
    safetensors : bool
        ``import safetensors``, and any submodule, gives `tensorio.safetensors`. Modules imported from
        the original before are replaced in ``sys.modules``. ``importlib.metadata.version("safetensors")`` gives the
        version whose surface that is, also where safetensors is not installed.
    children : bool
        Processes that are started from here do the same. They learn of it from the environment: an
        entry in ``PYTHONPATH`` and variables ``TENSORIO_DROPIN*``. Forked ones need nothing.
    report : text file, False or None
        Where one line is written at exit that says what was served here and in all children; None: ``sys.stderr`` as
        it is then; False: nowhere.

    Raises
    ------
    ImportError
        torch or a part of safetensors is imported already, and what replaces it can't be. Nothing is changed then.
    RuntimeError
        Called from inside torch's own import.

    Warns
    -----
    RuntimeWarning
        ``torch.load`` or ``torch.save`` is not torch's own any more, because the program replaced it: it is left as
        it is. Or, while torch is imported later: `tensorio.torch` can't be. Or there is no folder for temporary
        files: no line is written then.

    Notes
    -----
    Names in other modules' globals that were taken from the originals before (``from safetensors import safe_open``)
    are bound anew, whatever they are called there. What is kept elsewhere is not found: attributes of classes and
    instances, defaults of arguments, closures, `functools.partial`.

    Calling it again adds what was not asked for before. May be called from any thread. Costs the import of what it
    replaces, if that was imported, and some milliseconds for the search.
    """
    with _lock:
        if safetensors:
            _safetensors.install()
        if torch:
            try:
                _torch.install()
            except BaseException:
                if safetensors:
                    _safetensors.uninstall()
                raise
        _report.begin(report)
        if children:
            _children.install(torch=_torch.installed(), safetensors=_safetensors.installed(), report=_report.folder())


def uninstall() -> None:
    """Undo `install`: later imports and calls get the originals, and so do modules that `install` bound anew.

    What was made or taken in between stays as it is: tensors, handles, and functions that other modules imported from
    the replacements. Nothing is written at exit. Does nothing if nothing is installed.
    """
    with _lock:
        _children.uninstall()
        _report.end()
        _torch.uninstall()
        _safetensors.uninstall()
