"""Golden files that take more than ``torch.save``: TorchScript, packages, exported programs, streams.

`make_golden.py` calls the functions. They run under every torch from 1.0 (Python 2.7) on, so the spelling is that of
Python 2.
"""

from __future__ import print_function

import collections
import pickle
import sys

import torch
from torch import nn

from golden_kinds import RELEASE, MissingError, Net, need, net, values

FILES = []  # (name, function writing a file, giving what is to be found in it)


def file(suffix):
    """Register a function that writes a file by other means and returns the tree to expect."""

    def register(function):
        FILES.append((function.__name__ + suffix, function))
        return function

    return register


def other_container(new):
    """Options for the wanted container, where this release has a choice."""
    if RELEASE < (1, 4):  # the option came with 1.4; the default turned with 1.6
        if new:
            raise MissingError("only the legacy container")
        return {}
    return {"_use_new_zipfile_serialization": new}


@file(".pt")
def protocol_4(path):
    if sys.version_info[0] == 2:
        raise MissingError("no protocol 4")
    made = {"state": net().state_dict(), "values": values(), "bytes": b"\0\xff"}
    torch.save(made, path, pickle_protocol=4)
    return made


@file(".pt")
def stream(path):
    """Two objects behind each other: only the legacy container can."""
    made = [{"a": torch.arange(3)}, {"b": torch.ones(2, 2), "c": 5}]
    with open(path, "wb") as out:
        for obj in made:
            torch.save(obj, out, **other_container(False))
    return made


@file(".pt")
def mathbits(path):
    """Conjugated and negated views, as the release reads them: before 2.0 the mark was not saved."""
    need(torch.Tensor, "resolve_conj")
    z = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    torch.save({"plain": z, "conjugate": z.conj(), "negative": z.clone().conj().imag}, path)
    return torch.load(path)


@file(".pkl")
def plain(path):
    """The pickle module alone: each storage is a legacy file within the pickle."""
    made = {"w": torch.arange(6.0).reshape(2, 3), "p": nn.Parameter(torch.ones(2)), "n": 3}
    with open(path, "wb") as out:
        pickle.dump(made, out, min(4, pickle.HIGHEST_PROTOCOL))
    return made


def example():
    return torch.ones(2, 4)


@file(".pt")
def traced(path):
    model = net().eval()
    if RELEASE < (1, 4):  # these can't trace a shared module
        model.again = nn.Linear(3, 4)
    torch.jit.trace(model, example()).save(path)
    return dict(torch.jit.load(path).state_dict())  # 1.3 keeps one name of a shared module only


def scripted(model):
    need(torch.jit, "script")
    if RELEASE < (1, 2):
        raise MissingError("scripts of a module")
    return torch.jit.script(model.eval())


@file(".pt")
def script(path):
    model = scripted(net())
    notes = {"notes.txt": "of the user"}
    if RELEASE < (1, 8):
        made = torch._C.ExtraFilesMap()
        made["notes.txt"] = notes["notes.txt"]
        notes = made
    torch.jit.save(model, path, _extra_files=notes)
    return dict(torch.jit.load(path).state_dict())


@file(".pt")
def frozen(path):
    need(torch.jit, "freeze")
    model = torch.jit.freeze(scripted(net()))
    model.save(path)
    nodes = [n.output().toIValue() for n in model.graph.nodes() if n.kind() == "prim::Constant"]
    return {"constants": [v for v in nodes if isinstance(v, torch.Tensor)]}


class Lists(nn.Module):
    """Attributes that are containers."""

    def __init__(self):
        super(Lists, self).__init__()
        from typing import Dict, List

        self.tensors = torch.jit.Attribute([torch.ones(2), torch.arange(3.0)], List[torch.Tensor])
        self.table = torch.jit.Attribute({"a": torch.zeros(2, 1), "b": torch.ones(1)}, Dict[str, torch.Tensor])
        self.counts = torch.jit.Attribute([1, 2, 3], List[int])
        self.name = torch.jit.Attribute("of the user", str)
        self.scale = torch.jit.Attribute(0.5, float)

    def forward(self, x):
        return x * self.scale + self.counts[0]


@file(".pt")
def script_lists(path):
    model = scripted(Lists())
    model.save(path)
    names = "tensors", "table", "counts", "name", "scale"
    return collections.OrderedDict((name, getattr(model, name)) for name in names)


@file(".ptl")
def lite(path):
    model = scripted(net())
    need(model, "_save_for_lite_interpreter")
    model._save_for_lite_interpreter(path)
    return dict(model.state_dict())


@file(".pt")
def package(path):
    try:
        from torch.package import PackageExporter
    except ImportError:
        raise MissingError("no torch.package")
    made = {"state": net().state_dict(), "module": nn.Sequential(nn.Linear(2, 2)), "lr": 0.5}
    with PackageExporter(path) as exporter:
        exporter.extern(["torch.**"])
        exporter.save_pickle("weights", "weights.pkl", made)
        exporter.save_text("notes", "notes.txt", "of the user")
    return made


@file(".pt2")
def exported(path):
    if not hasattr(getattr(torch, "export", None), "save"):
        raise MissingError("no torch.export.save")

    class Scaled(Net):
        """With a buffer that is not part of the state, and a constant."""

        def __init__(self):
            super(Scaled, self).__init__()
            self.register_buffer("scratch", torch.arange(4.0), persistent=False)

        def forward(self, x):
            return super(Scaled, self).forward(x) + self.scratch * torch.tensor([1.0, 2.0, 3.0, 4.0])

    program = torch.export.export(Scaled().eval(), (example(),))
    torch.export.save(program, path)
    made = dict(program.state_dict)
    constants = getattr(program, "constants", None) or getattr(program, "tensor_constants", {})  # 2.2 names them so
    made.update((k, v) for k, v in constants.items() if isinstance(v, torch.Tensor))
    return made
