"""Open, check, convert and save tensor checkpoints over mmap.

>>> import tensorio
>>> weights = tensorio.load("model.safetensors")       # doctest: +SKIP
>>> with tensorio.open("model.pt") as checkpoint:       # doctest: +SKIP
...     array = checkpoint["layers.0.weight"]

Importing this package imports neither NumPy nor any framework.
"""

from tensorio import tp
from tensorio._api import identify, load, open, scan, verify
from tensorio._api_async import AsyncSaver, save_async
from tensorio._api_crypt import decrypt, encrypt
from tensorio._api_less import delta_chain, merge, strip
from tensorio._api_save import convert, recover, save, write_manifest
from tensorio._api_tp import ranked, shard, unshard
from tensorio._version import __version__
from tensorio.allowing import allow
from tensorio.checkpoint._checkpoint import Checkpoint
from tensorio.checkpoint._finite import NonFinite, check_finite
from tensorio.checkpoint._merge import Merged
from tensorio.checkpoint._prefetch import Prefetch
from tensorio.checkpoint._ranked import RankView
from tensorio.checkpoint._recover import Loss, Recovery
from tensorio.checkpoint._report import Report
from tensorio.checkpoint._saving import Saved
from tensorio.checkpoint._shard import ShardReport
from tensorio.checkpoint._strip import Stripped
from tensorio.errors import (
    ChecksumError,
    DecryptionError,
    FormatError,
    HeaderError,
    LimitError,
    LockedError,
    NameTakenError,
    NonFiniteError,
    NotPublishedError,
    PublicationError,
    TensorIOError,
    TensorMismatchError,
    TensorNotFoundError,
    TruncatedError,
    UnknownFormatError,
    UnsafePickleError,
    UnsupportedError,
)
from tensorio.kinds import (
    DTensor,
    JaggedTensor,
    MetaTensor,
    NestedTensor,
    QuantizedTensor,
    SparseTensor,
    SubclassTensor,
    TensorKind,
)
from tensorio.manager._manager import CheckpointManager
from tensorio.manager._rng import rng_state, set_rng_state
from tensorio.modules import state_dict
from tensorio.scanning._report import Finding, ScannedFile, ScanReport
from tensorio.sharing._api import attach, publish, published, unpublish
from tensorio.sharing._attach import Published
from tensorio.sharing._publication import Publication
from tensorio.system.guarding import guard
from tensorio.tensors import Chunk, Extent, TensorInfo
from tensorio.values import Device, Opaque, Size, TorchDType, TorchTag

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointManager",
    "ChecksumError",
    "Chunk",
    "DTensor",
    "DecryptionError",
    "Device",
    "Extent",
    "Finding",
    "FormatError",
    "HeaderError",
    "JaggedTensor",
    "LimitError",
    "LockedError",
    "Loss",
    "Merged",
    "MetaTensor",
    "NameTakenError",
    "NestedTensor",
    "NonFinite",
    "NonFiniteError",
    "NotPublishedError",
    "Opaque",
    "Prefetch",
    "Publication",
    "PublicationError",
    "Published",
    "QuantizedTensor",
    "RankView",
    "Recovery",
    "Report",
    "Saved",
    "ScanReport",
    "ScannedFile",
    "ShardReport",
    "Size",
    "SparseTensor",
    "Stripped",
    "SubclassTensor",
    "TensorIOError",
    "TensorInfo",
    "TensorKind",
    "TensorMismatchError",
    "TensorNotFoundError",
    "TorchDType",
    "TorchTag",
    "TruncatedError",
    "UnknownFormatError",
    "UnsafePickleError",
    "UnsupportedError",
    "__version__",
    "allow",
    "attach",
    "check_finite",
    "convert",
    "decrypt",
    "delta_chain",
    "encrypt",
    "guard",
    "identify",
    "load",
    "merge",
    "open",
    "publish",
    "published",
    "ranked",
    "recover",
    "rng_state",
    "save",
    "save_async",
    "scan",
    "set_rng_state",
    "shard",
    "state_dict",
    "strip",
    "tp",
    "unpublish",
    "unshard",
    "verify",
    "write_manifest",
]
