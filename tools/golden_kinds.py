"""What ``torch.save`` writes into the golden files: one small tree of every kind that a release can save.

`make_golden.py` saves them. It runs under every torch from 1.0 (Python 2.7) on, so the spelling is that of Python 2.
"""

from __future__ import print_function

import collections
import os
import random
import sys

import torch
from torch import nn

TREES = []  # (name, function giving a tree, "saved in the other container too")
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex128",
    "complex64", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
]  # fmt: skip


class MissingError(Exception):
    """The release does not have the thing at all."""


def tree(both=False):
    """Register a function whose result ``torch.save`` writes; with `both`, in the zip and the legacy container."""

    def register(function):
        TREES.append((function.__name__, function, both))
        return function

    return register


def need(holder, *names):
    """Refuse a release without these attributes."""
    for name in names:
        if not hasattr(holder, name):
            raise MissingError("no " + name)


class Net(nn.Module):
    """A class of the user's own, with a tied weight and a buffer."""

    def __init__(self):
        super(Net, self).__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 4)
        self.again = self.last
        self.register_buffer("steps", torch.tensor([1, 2, 3]))

    def forward(self, x):
        return self.again(self.norm(self.first(x)))


def net():
    """A network whose running statistics are no longer those of the start."""
    model = Net()
    model(torch.randn(5, 4))
    return model


# ------------------------------------------------------------------- trees


@tree(both=True)
def state_dict():
    return net().state_dict()


@tree(both=True)
def dtypes():
    out = collections.OrderedDict()
    for name in DTYPES:
        if hasattr(torch, name):
            made = of_dtype(getattr(torch, name))
            if made is not None and savable(made):
                out[name] = made
    return out


def of_dtype(dtype):
    """Eight elements of any type, or None."""
    whole = torch.arange(8, dtype=torch.int64)
    if str(dtype).startswith("torch.complex"):
        makers = (lambda: torch.view_as_complex(torch.arange(16, dtype=torch.float64).reshape(8, 2)).to(dtype),)
    elif "bits" in str(dtype) or "float4" in str(dtype):
        makers = (lambda: whole.to(torch.int16 if "16" in str(dtype) else torch.uint8).view(dtype),)
    else:
        makers = (lambda: whole.to(dtype), lambda: whole.to(torch.float32).to(dtype))
    for make in makers:
        try:
            return make()
        except (RuntimeError, TypeError, AttributeError):
            continue
    return None


def savable(obj):
    """Whether a release that has a type can save it: the first one with it often could not."""
    try:
        torch.save(obj, os.devnull)
    except Exception:
        return False
    return True


@tree(both=True)
def views():
    base = torch.arange(24, dtype=torch.float32)
    grid = base.reshape(4, 6)
    return {
        "base": base, "whole": grid, "transposed": grid.t(), "narrow": grid.narrow(0, 1, 2), "column": grid[:, 2],
        "step": base[1::3], "expanded": grid[0:1].expand(3, 6), "scalar": base[7], "tied": base,
        "zero": torch.zeros(0, 3), "empty": base[:0], "other": torch.arange(5),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).permute(0, 3, 1, 2),
    }  # fmt: skip


@tree(both=True)
def parameters():
    shared = nn.Parameter(torch.randn(2, 2))
    asks = torch.randn(3).requires_grad_()
    noted = nn.Parameter(torch.randn(2))
    noted.note = "of the user"
    return {
        "parameter": shared, "again": shared, "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "asks": asks, "list": list(nn.ParameterList([nn.Parameter(torch.ones(2)), shared])), "noted": noted,
        "data": shared.data,
    }  # fmt: skip


@tree()
def sizes():
    return {
        "wide": torch.zeros(1).expand(2**31 + 1, 3), "none": torch.empty(0, 2**33), "size": torch.Size([2**40, 1]),
        "far": torch.zeros(70000)[69999:],
    }  # fmt: skip


def trained(optimizer):
    """What a training loop saves after two steps."""
    model = net()
    made = optimizer(model.parameters())
    for _ in range(2):
        made.zero_grad()
        model(torch.randn(5, 4)).pow(2).sum().backward()
        made.step()
    return {"model": model.state_dict(), "optimizer": made.state_dict(), "epoch": 2, "loss": 0.25}


@tree(both=True)
def adam():
    return trained(lambda p: torch.optim.Adam(p, lr=1e-3))


@tree()
def momentum():
    return trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@tree(both=True)
def values():
    return collections.OrderedDict([
        ("none", None), ("true", True), ("int", 7), ("negative", -3), ("word", 70000), ("huge", 2**70),
        ("minus", -2**66), ("float", 0.1), ("infinite", float("inf")), ("complex", 1 + 2j), ("long", "x" * 300),
        ("text", b"na\xc3\xafve \xe6\x97\xa5".decode("utf-8")), ("tuple", (1, (2, ()), "a")), ("set", {3}),
        ("list", [[], [1.5, None]]), ("dict", {1: "one", "two": {"three": torch.ones(1)}}),
        ("size", torch.Size([2, 3])), ("device", torch.device("cpu")), ("gpu", torch.device("cuda", 1)),
        ("dtype", torch.float16 if savable(torch.float16) else None), ("counter", collections.Counter("aab")),
        ("default", collections.defaultdict(list, a=[1])),
    ])  # fmt: skip


@tree()
def octets():
    if sys.version_info[0] == 2:
        raise MissingError("bytes of their own: they are str in Python 2")
    return {"bytes": b"\0\xff", "more": bytes(range(256)) * 2, "array": bytearray(b"xy"), "tensor": torch.ones(1)}


@tree()
def arrays():
    import numpy as np

    return {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "fortran": np.asfortranarray(np.eye(3)[:, :2]),
        "float64": np.float64(0.1), "int64": np.int64(-5), "bool": np.bool_(True), "tensor": torch.ones(2),
    }  # fmt: skip


@tree()
def generators():
    import numpy as np

    np.random.seed(0)
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()[:1]}


@tree()
def bare():
    return torch.arange(6.0).reshape(2, 3)


@tree(both=True)
def storages():
    base = torch.arange(6.0)
    return {"whole": base.storage(), "tensor": base[2:], "bytes": torch.arange(4, dtype=torch.uint8).storage()}


@tree(both=True)
def sparse_coo():
    need(torch, "sparse_coo_tensor")
    at = torch.tensor([[0, 1, 1, 2], [2, 0, 0, 1]])
    loose = torch.sparse_coo_tensor(at, torch.tensor([3.0, 4.0, 5.0, 6.0]), (3, 4))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3))
    return {"loose": loose, "coalesced": loose.coalesce(), "hybrid": hybrid}


def compressed(*names):
    """The sparse layouts of these names, in the order of the names."""
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0], [0.0, 5.0, 6.0, 0.0]])
    out = collections.OrderedDict()
    for name in names:
        need(dense, "to_sparse_" + name)
        to = getattr(dense, "to_sparse_" + name)
        out[name] = to((2, 2)) if name.startswith("bs") else to()
    return out


@tree(both=True)
def sparse_csr():
    return compressed("csr")


@tree()
def sparse_compressed():
    return compressed("csr", "csc", "bsr", "bsc")


@tree(both=True)
def quantized():
    need(torch, "quantize_per_tensor")
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 4 - 1
    out = collections.OrderedDict()
    for name in ("qint8", "quint8", "qint32"):
        out[name] = torch.quantize_per_tensor(x, 0.1, 2, getattr(torch, name))
    out["transposed"] = out["qint8"].t()
    return out


@tree(both=True)
def quantized_by_channel():
    need(torch, "quantize_per_channel")
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 4 - 1
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([0, 1, 2])
    out = {"per_channel": torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)}
    if hasattr(torch, "quint4x2"):
        scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 1, 2])
        out["float_qparams"] = torch.quantize_per_channel(x, scales, zeros, 0, torch.quint8)
    return out


@tree()
def nested():
    need(torch, "nested")
    need(torch.nested, "nested_tensor")
    return {
        "nested": torch.nested.nested_tensor([torch.arange(6.0).reshape(2, 3), torch.ones(1, 3)]),
        "x": torch.ones(1),
    }


@tree()
def jagged():
    need(torch, "jagged")
    return {"jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)}


@tree()
def meta():
    if sys.version_info[0] == 2:
        raise MissingError("no device meta")
    return {"meta": torch.empty(2, 3, device="meta"), "strided": torch.empty_strided((2, 3), (1, 2), device="meta")}


@tree()
def attributes():
    noted = torch.arange(3.0)
    noted.note = "of the user"
    return {"noted": noted, "plain": torch.ones(1)}


@tree()
def buffers():
    need(nn, "Buffer")
    return {"buffer": nn.Buffer(torch.arange(3.0)), "dropped": nn.Buffer(torch.ones(2), persistent=False)}


@tree(both=True)
def whole_module():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2, bias=False)))


@tree()
def own_module():
    return {"net": net(), "epoch": 1}


@tree()
def quantized_module():
    need(torch.quantization if hasattr(torch, "quantization") else torch, "quantize_dynamic")
    return torch.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear}).state_dict()
