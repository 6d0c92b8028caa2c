"""Write one small file of every kind that the torch running this can save, and what is in each.

    python make_golden.py FOLDER

leaves in FOLDER the files and `expected.json`: for every file its tensors (path, dtype, shape, stride, offset,
storage, SHA-256 of the elements' bytes in C order) and plain values, told by torch itself in the same run, and the
files that this release can't write, with the reason. `golden_release.py` runs it under a release of choice.

It runs under every torch from 1.0 (Python 2.7) on, so the spelling is that of Python 2.
"""

from __future__ import print_function

import ctypes
import hashlib
import json
import os
import random
import sys
import warnings

import torch
from torch import nn

from golden_files import FILES, other_container
from golden_kinds import RELEASE, TREES

HASHED = 1 << 16  # of a tensor of more bytes than that, no digest is made


# ---------------------------------------------------------------- what is in them


def storage_of(tensor):
    """The place of a tensor's storage in memory; None for none."""
    try:
        held = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
        return held.data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def raw(tensor):
    """The elements' bytes in C order."""
    for name in ("resolve_conj", "resolve_neg"):
        if hasattr(tensor, name):
            tensor = getattr(tensor, name)()
    tensor = tensor.contiguous()
    count = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), count) if count else b""


class Teller(object):
    """Walks a tree and notes its tensors and plain values."""

    def __init__(self):
        self.tensors, self.values, self.storages, self.alive = [], [], {}, []

    def tell(self, obj, path):
        if isinstance(obj, torch.Tensor):
            self.tensors.append(dict(self.tensor(obj), path=path))
        elif isinstance(obj, nn.Module):
            for key, value in obj.state_dict().items():
                self.tell(value, path + [key])
        elif isinstance(obj, dict):
            for key in obj:
                self.tell(obj[key], path + [key])
        elif isinstance(obj, (list, tuple)):
            for i, value in enumerate(obj):
                self.tell(value, path + [i])
        elif type(obj).__name__ == "ndarray":
            held = obj.tobytes()
            self.tensors.append({"path": path, "kind": "ndarray", "dtype": str(obj.dtype), "shape": list(obj.shape),
                                 "sha256": hashlib.sha256(held).hexdigest()})  # fmt: skip
        elif "Storage" in type(obj).__name__:
            whole = getattr(torch, obj.type().split(".")[-1].replace("Storage", "Tensor"))().set_(obj)
            self.tensors.append(dict(self.tensor(whole), path=path, kind="storage"))
        else:
            self.values.append([path, type(obj).__name__, spelt(obj)])

    def tensor(self, t):
        """Facts of one tensor; of its parts, where it has parts."""
        out = {"kind": type(t).__name__, "dtype": str(t.dtype)[6:], "requires_grad": t.requires_grad}
        t = t.detach()
        if getattr(t, "is_nested", False):
            return dict(out, kind="nested", parts=[self.tensor(part) for part in t.unbind()])
        out["shape"] = list(t.shape)
        if str(t.layout) != "torch.strided":
            return dict(out, kind=str(t.layout)[6:], dense=self.tensor(t.to_dense()))
        if t.device.type == "meta":
            return dict(out, kind="meta", stride=list(t.stride()))
        if getattr(t, "is_quantized", False):
            return dict(out, kind="quantized", scheme=str(t.qscheme())[6:], dense=self.tensor(t.dequantize()),
                        values=self.tensor(t.int_repr()))  # fmt: skip
        self.alive.append(t)
        place = storage_of(t)
        number = None if place is None else self.storages.setdefault(place, len(self.storages))
        small = t.numel() * t.element_size() <= HASHED
        digest = hashlib.sha256(raw(t)).hexdigest() if small else None
        return dict(out, stride=list(t.stride()), offset=t.storage_offset(), storage=number, sha256=digest)


def spelt(value):
    """A plain value as JSON can hold it, exactly."""
    if isinstance(value, float):
        return float(value).hex()
    if isinstance(value, (bytes, bytearray)) and not isinstance(value, str):
        return "".join("%02x" % octet for octet in bytearray(value))
    if value is None or isinstance(value, (bool, str, type(b"".decode()))):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return str(value)


def told(obj):
    """What the test is to find."""
    teller = Teller()
    teller.tell(obj, [])
    return {"tensors": teller.tensors, "values": teller.values}


# --------------------------------------------------------------------- writing


def jobs():
    """Name and writer of every file."""
    for name, make, both in TREES:
        yield name + ".pt", saver(make, {})
        if both:
            yield name + (".legacy.pt" if RELEASE >= (1, 6) else ".zip.pt"), saver(make, None)
    for name, write in FILES:
        yield name, write


def saver(make, options):
    """A writer of `make`'s tree, with ``torch.save``."""

    def write(path):
        chosen = other_container(not path.endswith(".legacy.pt")) if options is None else options
        made = make()
        torch.save(made, path, **chosen)
        return made

    return write


def attempt(job, path):
    """What a job says is in its file; or why there is none."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return told(job(path)), None
    except Exception as error:
        return None, "%s: %s" % (type(error).__name__, str(error).split("\n")[0][:100])


def in_child(job, path):
    """The same in a child: some releases crash on what they can't save."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write_end, "w") as out:
            json.dump(attempt(job, path), out)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if status == 0 else (None, "it ends by signal %d" % (status & 127))


def write(folder, run=attempt):
    """Write every file this release can, and return what is in them."""
    expected = {"torch": torch.__version__, "python": sys.version.split()[0], "files": {}, "left out": {}}
    for name, job in jobs():
        path = os.path.join(folder, name)
        found, why = run(job, path)
        if found is None:
            expected["left out"][name] = why
            if os.path.exists(path):
                os.remove(path)
            continue
        twins = [other for other, facts in expected["files"].items() if facts == found]
        expected["files"][name] = {"as": min(twins)} if twins else found
    with open(os.path.join(folder, "expected.json"), "w") as out:
        json.dump(expected, out, indent=0, sort_keys=True)
    return expected


if __name__ == "__main__":
    for left_out in sorted(write(sys.argv[1], in_child)["left out"].items()):
        print(torch.__version__, *left_out)
