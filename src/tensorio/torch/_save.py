"""`save`: our writer where `torch.save` would write the same; all else is `torch.save`'s, and appears at once, too."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import torch

from tensorio import _core, _served
from tensorio.errors import UnsupportedError
from tensorio.formats import torch_zip
from tensorio.formats._base import SaveOptions
from tensorio.plan import Plan
from tensorio.torch._places import has_stock_packages, is_ordinary
from tensorio.torch._settings import setting
from tensorio.torch._sources import is_path
from tensorio.writing.output import replacing, write_plan

__all__ = ["save", "torch_save"]

# Whatever takes its place later (`tensorio.dropin`), this is torch's.
torch_save = torch.serialization.save

_PROTOCOL = 2
_NATIVE_ALIGN = 64  # what torch takes if nobody said otherwise


def save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> None:
    """Save as `torch.save` does, so that the file appears whole or not at all.

    Parameters
    ----------
    obj : object
    f : str, os.PathLike or writable binary file object
        A path's file is written beside it and renamed over it: a failed save
        leaves the old file as it was, and tensors that alias it keep its bytes.
    pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record
        As in `torch.save`; anything but the defaults is passed on to it, and
        what it writes to a path is renamed, too.

    Raises
    ------
    Exception
        What `torch.save` raises for what can't be saved.
    OSError
        From the system, with errno and file name.

    Notes
    -----
    Every byte is as `torch.save` writes it, except for the record
    ``.data/serialization_id``, which depends on the contents only. Like it, this
    does not sync the file to disk: `tensorio.save` does.
    """
    ordinary = (
        pickle_module is pickle
        and pickle_protocol == _PROTOCOL
        and _use_new_zipfile_serialization
        and not _disable_byteorder_record
        and (is_path(f) or hasattr(f, "write"))
    )
    plan = _plan(obj, f) if ordinary else None
    if plan is None:
        _served.pass_on("torch.save")
        words = (pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
        return _pass_on(obj, f, words)
    write_plan(plan, f, durable=False)
    _served.count("torch.save", plan.nbytes)
    return None


def _plan(obj: object, f: Any) -> Plan | None:
    """The file's layout; None if torch would write another one, or none."""
    align = _alignment()
    if align is None or not is_ordinary() or not has_stock_packages():
        return None
    try:
        if is_path(f) and os.path.exists(f) and not os.path.isfile(f):
            return None
        name = os.fspath(f) if is_path(f) else None
        return torch_zip.plan(obj, SaveOptions(align=align, name=name, exact=True))
    except Exception:  # of whatever sort: torch meets it again, and says it in its own words
        return None


def _alignment() -> int | None:
    """Where torch would let records begin, in bytes; None if it is set to write in other ways."""
    checksums = getattr(torch.serialization, "get_crc32_options", lambda: True)()
    align = setting("save", "storage_alignment", _NATIVE_ALIGN)
    return align if checksums and type(align) is int and 1 <= align <= _core.ZIP_ALIGN_MAX else None


def _pass_on(obj: object, f: Any, words: tuple[Any, ...]) -> None:
    """`torch.save`; a path's file by way of another one, if there can be one beside it."""
    if not is_path(f):
        torch_save(obj, f, *words)
        return
    with contextlib.ExitStack() as stack:
        try:
            target = stack.enter_context(replacing(f))
        except (OSError, UnsupportedError):  # a device, a folder that nothing can be added to: as torch does it
            target = f
        torch_save(obj, target, *words)
