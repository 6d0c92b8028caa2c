# SPDX-License-Identifier: Apache-2.0
# torch's own tensors and storages, where torch is there.
# A part of _pickler.pyx, in which all names are defined.

cdef int _BYTE = _BY_NAME["uint8"].code
cdef str _BY_BYTES = "bytes"  # torch takes all types without a storage class, and uint8, for one


cdef class _Torch(_Tensors):
    """Objects of torch's, whose storages are written whole if not for `compact`."""
    cdef bint exact
    cdef object fetch
    cdef dict whole         # compact: bytes of the torch storages that are written in part, as `by_storage`
    cdef dict classes       # exact: the class as which the bytes at an address are saved
    cdef dict by_storage    # torch storages: (identity, class) -> Piece
    cdef object torch, torch_tensor, torch_parameter, torch_storage, torch_typed_storage

    def __cinit__(self, grouped, leaf, compact, bint exact, fetch):
        self.exact = exact
        self.fetch = fetch
        self.whole, self.classes, self.by_storage = {}, {}, {}
        self.torch = sys.modules.get("torch")
        self.torch_tensor = getattr(self.torch, "Tensor", None)
        self.torch_parameter = getattr(getattr(self.torch, "nn", None), "Parameter", None)
        self.torch_storage = getattr(self.torch, "UntypedStorage", None)
        self.torch_typed_storage = getattr(self.torch, "TypedStorage", None)

    @cython.final
    cdef bint save_torch(self, object obj, type kind) except -1:
        """torch's tensors and storages; False for anything else."""
        cdef Tensor t
        cdef bint plain = kind is self.torch_tensor or kind is self.torch_parameter
        if plain or isinstance(obj, self.torch_tensor):
            if plain and not obj.__dict__:
                of_torch(obj, &t)
                if t.dtype >= 0 and not t.flags & (CONJ | NEG):
                    self.save_plain(obj, &t, kind is self.torch_parameter)
                    return True
                if t.dtype < 0 and not obj.is_quantized and str(obj.dtype).partition(".")[2] not in _BY_NAME:
                    raise UnsupportedError(f"torch files have no storage for {obj.dtype}")
            self.save_by_reduction(obj, kind)
            return True
        if kind is self.torch_storage:
            self.save_storage(obj, obj.nbytes(), self.g_untyped)
            return True
        if isinstance(obj, self.torch_typed_storage):
            self.save_storage(obj._untyped_storage, obj._size(), getattr(self.torch, obj._pickle_storage_type()))
            return True
        return False

    @cython.final
    cdef int save_plain(self, object obj, Tensor *t, bint parameter) except -1:
        """A tensor that is one strided view of memory, without Python attributes."""
        cdef int64_t first
        cdef int32_t piece
        storage = obj.untyped_storage()
        if self.compact and self.is_whole(storage, t):
            piece = self.whole_storage(storage, t.dtype)
            first = obj.storage_offset()
        elif self.compact:
            self.keep.append(storage)
            if <int64_t> obj.storage_offset() * t.itemsize + t.reach > <int64_t> storage.nbytes():
                raise UnsupportedError("a torch tensor is larger than its storage, which was resized; nothing to save")
            self.whole[self.storage_key(storage, t.dtype)] = storage.nbytes()
            piece = self.place_view(-1, t, t.address, t.address + t.reach, None, &first)
            self.spans[self.n_spans - 1].held = True
        else:
            piece = self.whole_storage(storage, t.dtype)
            first = obj.storage_offset()
        if parameter:
            self.parameter(t, piece, first)
        else:
            self.tensor(t, piece, first)
        return self.memoize(obj)

    @cython.final
    cdef bint is_whole(self, object storage, const Tensor *t) except -1:
        """Compact: whether a storage is written whole, since something that torch reduces itself refers to it.

        The first run found that out; the second one then counts the span that it does not place.
        """
        key = self.storage_key(storage, t.dtype)
        if self.grouped is None or key not in (<_Torch> self.grouped).by_storage:
            return False
        if key not in self.whole:
            self.whole[key] = storage.nbytes()
            self.placed += storage.nbytes()
        self.span(-1, t.dtype, t.address, t.address + t.reach)
        self.n_spans += 1
        return True

    @cython.final
    cdef tuple storage_key(self, object storage, object kind):
        """What stands for a torch storage as of one class; as in torch, an empty one is of every class."""
        by_bytes = kind == _BYTE or kind == "UntypedStorage" or type(kind) is int and _STORAGE_OF[kind] is None
        return storage._cdata, (_BY_BYTES if by_bytes else kind) if storage.nbytes() else None

    @cython.final
    cdef int32_t whole_storage(self, object storage, object kind) except -1:
        """One piece per torch storage and class, in order of first appearance; a device's bytes are fetched."""
        count = storage.nbytes()
        key = self.storage_key(storage, kind)
        if self.exact and count and self.classes.setdefault(storage.data_ptr(), key[1]) != key[1]:
            raise UnsupportedError("bytes that are saved as two types")
        piece = self.by_storage.get(key)
        if piece is None:
            if storage.device.type == "meta":
                raise UnsupportedError("a storage on the meta device has no bytes to save")
            if self.exact and storage.device.type != "cpu":
                raise UnsupportedError("a storage on another device")
            if storage.device.type in ("cpu", "meta"):
                here = storage
            else:
                here = storage.cpu() if self.fetch is None else self.fetch(storage)
            self.keep.append((storage, here))
            piece = self.new_piece(-1, <int64_t> <uintptr_t> (<object> here.data_ptr()), count)
            self.by_storage[key] = piece
        return piece

    @cython.final
    cdef int save_storage(self, object storage, int64_t numel, object cls) except -1:
        """A bare storage, on its own or out of a reduction."""
        location = self.torch.serialization.location_tag(storage)
        return self.pid(self.whole_storage(storage, _class_code(cls)), cls, location, numel)


cdef object _class_code(object cls):
    """The dtype code a plain tensor of a storage class goes by, so that both find the same piece."""
    name = getattr(cls, "__name__", "")
    for code, known in enumerate(_STORAGE_OF):
        if known == name:
            return code
    return name


cdef int64_t _uncompacted(_Torch pickler) except -1:
    """Bytes of the storages that would be written if not for `compact`: torch's whole, others from end to end."""
    cdef Span *s
    cdef Py_ssize_t i
    held = {pickler.spans[i].group for i in range(pickler.n_spans) if pickler.spans[i].held}
    groups = {}
    for i in range(pickler.n_spans):
        s = &pickler.spans[i]
        if s.group not in held:
            groups[s.group] = s.group_hi - s.group_lo
    return sum(pickler.whole.values()) + sum(groups.values())
