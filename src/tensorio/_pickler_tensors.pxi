# SPDX-License-Identifier: Apache-2.0
# Tensors by the calls that rebuild them: of arrays, of leaves, and of what NumPy has no array for.
# A part of _pickler.pyx, in which all names are defined.

cdef int REQUIRES_GRAD = TIO_ROW_REQUIRES_GRAD
cdef int PARAMETER = TIO_ROW_PARAMETER
cdef int CONJ = TIO_ROW_CONJ
cdef int NEG = TIO_ROW_NEG
cdef list _NAME_OF = [d.name for d in _DTYPES]

_LAYOUTS = frozenset(f"torch.{name}" for name in ("strided", "jagged", "_mkldnn", "sparse_coo", "sparse_csr",
                                                  "sparse_csc", "sparse_bsr", "sparse_bsc"))


cdef class _Tensors(_Storages):
    """Tensors as torch's pickles have them."""
    cdef object leaf
    # torch's own objects, or the names of them:
    cdef object g_v2, g_v3, g_parameter, g_untyped
    cdef list g_storage

    def __cinit__(self, grouped, leaf, *args):
        self.leaf = leaf
        self.g_v2 = _torch_global("torch._utils", "_rebuild_tensor_v2")
        self.g_v3 = _torch_global("torch._utils", "_rebuild_tensor_v3")
        self.g_parameter = _torch_global("torch._utils", "_rebuild_parameter")
        self.g_untyped = _torch_global("torch.storage", "UntypedStorage")
        self.g_storage = [None if name is None else _torch_global("torch", name) for name in _STORAGE_OF]

    @cython.final
    cdef int ints(self, const int64_t *values, int count) except -1:
        """A tuple of ints that nothing else refers to."""
        cdef int i
        if count == 0:
            return self.op(c")")
        if count > 3:
            self.op(c"(")
        for i in range(count):
            self.any_int(values[i])
        self.op(c"t" if count > 3 else <char> (0x84 + count))
        return self.put_next()

    @cython.final
    cdef int hooks(self) except -1:
        """The empty OrderedDict of hooks that torch writes with each tensor."""
        self.global_of(OrderedDict)
        self.op(c")")
        self.op(c"R")
        return self.put_next()

    @cython.final
    cdef int tensor(self, const Tensor *t, int32_t piece, int64_t first) except -1:
        """The call that rebuilds a tensor `first` elements into its storage, without its own memo slot."""
        cdef object cls = self.g_storage[t.dtype]
        cdef bint typed = cls is not None
        cdef int64_t nbytes = self.pieces[piece].nbytes
        self.global_of(self.g_v2 if typed else self.g_v3)
        self.op(c"(")
        if typed:
            self.pid(piece, cls, "cpu", nbytes // t.itemsize)
        else:
            self.pid(piece, self.g_untyped, "cpu", nbytes)
        self.any_int(first)
        self.ints(t.shape, t.rank)
        self.ints(t.strides, t.rank)
        self.op(<char> 0x88 if t.flags & REQUIRES_GRAD else <char> 0x89)
        self.hooks()
        if not typed:
            self.global_of(_torch_global("torch", _NAME_OF[t.dtype]))
        if t.flags & (CONJ | NEG):
            self.save({name: True for name, bit in (("conj", CONJ), ("neg", NEG)) if t.flags & bit})
        self.op(c"t")
        self.put_next()
        return self.op(c"R")

    @cython.final
    cdef int parameter(self, Tensor *t, int32_t piece, int64_t first) except -1:
        """A tensor wrapped as a Parameter, which asks for gradients in its stead."""
        cdef bint grad = t.flags & REQUIRES_GRAD
        t.flags &= ~REQUIRES_GRAD
        self.global_of(self.g_parameter)
        self.tensor(t, piece, first)
        self.put_next()
        self.op(<char> 0x88 if grad else <char> 0x89)
        self.hooks()
        self.op(<char> 0x87)
        self.put_next()
        return self.op(c"R")

    @cython.final
    cdef bint save_array(self, object a, object owner) except -1:
        """A NumPy array as the tensor that torch.from_numpy makes of it; False for types that are no tensor's."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece = self.place_array(a, &t, -1, &first)
        if piece < 0:
            return False
        self.tensor(&t, piece, first)
        self.memoize(owner)
        return True

    @cython.final
    cdef int32_t place_array(self, object a, Tensor *t, int group, int64_t *first) except -1:
        """The piece of an array, as `place`; -2 for types that are no tensor's.

        A `group` that is not negative stands for its type where storages are shared.
        """
        if a.ndim > MAX_RANK:
            return -2
        of_array(a, t)
        if t.dtype < 0 or t.reach < 0:
            first[0] = 0
            return self.place_copy(a, t)
        self.keep.append(a)
        if group < 0:
            return self.place_view(-1, t, t.address, t.address + t.reach, a, first)
        return self.place(-1, group, t.address, t.address + t.reach, first)

    @cython.final
    cdef int32_t place_copy(self, object a, Tensor *t) except -1:
        """An array of foreign byte order or odd strides: written in C order, copied when its turn comes."""
        cdef int32_t piece
        row = of_numpy(a.dtype)
        if row is None:
            return -2
        t.dtype, t.itemsize = row.code, row.itemsize
        _c_order(t)
        piece = self.new_piece(-1, 0, t.numel * t.itemsize)
        self.made[piece] = a
        return piece

    @cython.final
    cdef int save_leaf(self, object obj) except -1:
        """A tensor whose bytes are elsewhere."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece = self.place_leaf(obj, &t, -1, &first)
        if t.flags & PARAMETER:
            self.parameter(&t, piece, first)
        else:
            self.tensor(&t, piece, first)
        return self.memoize(obj)

    @cython.final
    cdef int32_t place_leaf(self, object obj, Tensor *t, int group, int64_t *first) except -1:
        """The piece of a leaf, as `place_array`."""
        cdef int64_t offset, nbytes, space
        cdef int i
        dtype, space, offset, nbytes, shape, strides, flags = self.leaf(obj)
        if _DTYPES[dtype].packed:
            raise UnsupportedError(f"torch files have no dtype for {_NAME_OF[dtype]}")
        t.dtype, t.rank, t.flags, t.itemsize = dtype, len(shape), flags, _DTYPES[dtype].itemsize
        for i in range(t.rank):
            t.shape[i] = shape[i]
            t.strides[i] = strides[i] // t.itemsize
        if group < 0:
            return self.place_view(space, t, offset, offset + nbytes, obj, first)
        return self.place(space, group, offset, offset + nbytes, first)

    # ---------------------------------------- tensors that NumPy has no array for

    @cython.final
    cdef int save_kind(self, object obj) except -1:
        """As torch reduces them."""
        if not any([type(part) is _Leaf for part in obj.parts().values()]):  # leaves were checked when they were read
            obj.check()
        if obj.parameter:
            bare = _replace(obj, parameter=False, requires_grad=False)
            return self.save_reduce((self.g_parameter, (bare, obj.requires_grad, OrderedDict())), obj)
        if type(obj) is _QuantizedTensor:
            return self.save_quantized(obj)
        return self.save_reduce(_reduction(obj), obj)

    @cython.final
    cdef int save_quantized(self, object obj) except -1:
        """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
        cdef Tensor t
        cdef int64_t first
        cdef int32_t piece
        group, storage = _QUANTIZED[obj.dtype]
        if self.leaf is not None and type(obj.values) is _Leaf:
            piece = self.place_leaf(obj.values, &t, group, &first)
        else:
            piece = self.place_array(obj.values, &t, group, &first)
        if _QUANTIZED_TYPES[obj.dtype][1] < 8:
            _flat(obj.shape, &t)
            if first:
                raise UnsupportedError(f"a {obj.dtype} tensor that shares its bytes with another can't be written")
        self.global_of(_torch_global("torch._utils", "_rebuild_qtensor"))
        self.op(c"(")
        self.pid(piece, _torch_global("torch", storage), "cpu", self.pieces[piece].nbytes // t.itemsize)
        self.any_int(first)
        self.ints(t.shape, t.rank)
        self.ints(t.strides, t.rank)
        scale, zero_point = (list(n) if type(n) is tuple else n for n in (obj.scale, obj.zero_point))
        ends = (scale, zero_point) if obj.axis is None else (scale, zero_point, obj.axis)
        self.save((TorchTag(f"torch.{obj.scheme}"), *ends))
        self.op(<char> 0x88 if obj.requires_grad else <char> 0x89)
        self.hooks()
        self.op(c"t")
        self.put_next()
        self.op(c"R")
        return self.memoize(obj)

    @cython.final
    cdef int save_tag(self, str name) except -1:
        """A constant or class of torch: layouts by a call, all others as a global."""
        module, _, short = name.rpartition(".")
        found = _torch_global(module, short)
        if name not in _LAYOUTS:
            if type(found).__name__ == "memory_format":  # torch can't pickle these
                found = _named.setdefault((module, short), _Named(module, short))
            return self.global_of(found)
        if type(found) is not _Named:
            return self.global_of(found)
        return 0 if self.recall(found) else self.save_reduce(
            (_torch_global("torch.serialization", "_get_layout"), (name,)), found)


def _reduction(obj):
    """The call that rebuilds a tensor that NumPy has no array for, but for quantized ones."""
    kind = type(obj)
    if kind is _SparseTensor:
        parts = (obj.indices, obj.values) if obj.layout == "coo" else (obj.compressed, obj.indices, obj.values)
        last = () if obj.layout != "coo" or obj.is_coalesced is None else (obj.is_coalesced,)
        data = (*parts, Size(obj.shape), *last)
        return _torch_global("torch._utils", "_rebuild_sparse_tensor"), (TorchTag(f"torch.sparse_{obj.layout}"), data)
    if kind is _MetaTensor:
        dtype = _torch_global("torch", obj.dtype)
        return (_torch_global("torch._utils", "_rebuild_meta_tensor_no_storage"),
                (dtype, obj.shape, obj.strides, obj.requires_grad))
    if kind is _NestedTensor:
        offsets = np.array(obj.offsets, np.int64) if type(obj.offsets) is tuple else obj.offsets
        return (_torch_global("torch._utils", "_rebuild_nested_tensor"),
                (obj.buffer, obj.sizes, obj.strides, offsets))
    if kind is _JaggedTensor:
        module = "torch.nested._internal.nested_tensor"
        words = {"values": obj.values, "offsets": obj.offsets, "lengths": obj.lengths, "_ragged_idx": obj.ragged_idx,
                 "_metadata_cache": {}, "requires_grad": obj.requires_grad}
        return (_torch_global("torch._tensor", "_rebuild_from_type_v2"),
                (_torch_global(module, "_rebuild_njt"), _torch_global(module, "NestedTensor"), (words,), None))
    raise UnsupportedError(f"{obj!r} can't be written: torch makes it by running its class, with the processes it is "
                           "spread over; save its parts instead")


cdef int _flat(tuple shape, Tensor *t) except -1:
    """Give a tensor a shape, with strides in C order."""
    cdef int i
    if len(shape) > MAX_RANK:
        raise UnsupportedError(f"a tensor of {len(shape)} dimensions; torch has at most {MAX_RANK}")
    t.rank = <int> len(shape)
    for i in range(t.rank):
        t.shape[i] = shape[i]
    _c_order(t)
    return 0
