# SPDX-License-Identifier: Apache-2.0
# Tensors: views of storages, proven, and kept as rows or made at once.
# A part of _unpickler.pyx, in which all names are defined.

cdef enum:
    MAX_RANK = 64  # dimensions, NumPy's NPY_MAXDIMS
    COST_TENSOR = 320  # bytes: an array, or a leaf and its row

ctypedef object (*make_view_fn)(PyObject *lease, int64_t dtype, int64_t rank, const int64_t *shape,
                                const int64_t *strides, int64_t offset, int64_t nbytes)
ctypedef object (*hand_over_fn)(PyObject *lease, PyObject *consumer, int64_t dtype, int64_t rank, const int64_t *shape,
                                const int64_t *strides, int64_t offset, int64_t nbytes)


@cython.final
@cython.freelist(64)
cdef class Leaf:
    """Stands for a tensor in a tree.

    Attributes
    ----------
    row : int
        Number of its row in the table.
    """
    cdef readonly Py_ssize_t row

    def __init__(self, Py_ssize_t row):
        self.row = row

    def __repr__(self):
        return f"<tensor {self.row}>"


cdef class _Tensors(_Storages):
    """Tensors of one run.

    Parameters
    ----------
    leases, decode, wanted, first_row, first_dim
        See `loads`.
    """
    cdef list leases
    cdef object decode
    cdef set wanted
    cdef make_view_fn make_view
    cdef type ndarray
    cdef tio_row *rows
    cdef Py_ssize_t n_rows, rows_room
    cdef int64_t *dims
    cdef Py_ssize_t n_dims, dims_room
    cdef Py_ssize_t first_row, first_dim
    # Where the tensors are not NumPy's:
    cdef object consumer
    cdef hand_over_fn hand_over
    cdef const uint8_t *taken
    cdef list bases  # by record: the first tensor in it, or all its bytes
    cdef dict decoded_as  # the dtype as which a record that is not raw was decoded
    cdef Py_ssize_t current  # record of the last view
    cdef int64_t first  # its first element, counted in elements; one without any has that, too

    def __cinit__(self, pickle, Py_ssize_t start, rules, bint sweep, records, list leases, decode, set wanted,
                  Py_ssize_t first_row, Py_ssize_t first_dim, *args):
        self.leases = leases
        self.decode = decode
        self.wanted = wanted
        self.first_row = first_row
        self.first_dim = first_dim
        if rules.maker is not None:
            # Halves of surrogate pairs are text that Python has and UTF-8 has not: names of files, for example.
            self.errors = "surrogatepass"
        if leases is not None and rules.maker is not None:
            self.make_others(rules.maker)
        elif leases is not None:
            from tensorio import _arrays
            import numpy
            self.make_view = <make_view_fn> (<void **> PyCapsule_GetPointer(
                _arrays.make_view, "tensorio._arrays.make_view"))
            self.ndarray = numpy.ndarray

    def __dealloc__(self):
        PyMem_Free(self.rows)
        PyMem_Free(self.dims)

    cdef int make_others(self, object maker) except -1:
        """Make tensors by a `Maker` instead of arrays."""
        from tensorio import _dlpack
        self.maker = maker
        self.plain = True
        self.consumer = maker.consumer
        self.taken = <const uint8_t *> <bytes> maker.taken
        self.hand_over = <hand_over_fn> (<void **> PyCapsule_GetPointer(
            _dlpack.hand_over, "tensorio._dlpack.hand_over"))
        self.bases = [None] * self.n_records
        self.decoded_as = {}
        return 0

    # -------------------------------------------------------------- tensors

    @cython.final
    cdef object rebuild(self, tuple args, int version):
        """A view: (storage, offset, size, stride[, requires_grad, hooks[, dtype]][, metadata])."""
        cdef Py_ssize_t count = PyTuple_GET_SIZE(args), fixed = 4 if version == 1 else 4 + version
        cdef _StorageRef ref
        cdef tio_row row
        cdef int64_t[2 * MAX_RANK] dims
        cdef int itemsize
        cdef object storage
        if count != fixed and not (version > 1 and count == fixed + 1):
            self.wrong(f"expected {fixed} arguments to rebuild a tensor, found {count}")
        storage = <object> PyTuple_GET_ITEM(args, 0)
        if type(storage) is _Opaque:
            return _Opaque("torch._utils", "_rebuild_tensor", args)
        if type(storage) is not _StorageRef:
            self.expected("a storage", storage)
        ref = <_StorageRef> storage
        self.placeholders -= 1
        self.moves, self.location = ref.moves, ref.location
        row.dtype = ref.dtype
        row.flags = 0
        itemsize = ref.itemsize
        if version == 3:
            itemsize = self.dtype_v3(ref, <object> PyTuple_GET_ITEM(args, 6), &row)
        elif ref.cls.kind == K_UNTYPED:
            self.wrong("an untyped storage needs a dtype")
        if version > 1:
            self.check_grad(<object> PyTuple_GET_ITEM(args, 4), <object> PyTuple_GET_ITEM(args, 5), &row)
        if count > fixed:
            self.check_bits(<object> PyTuple_GET_ITEM(args, fixed), &row)
        row.rank = self.read_dims(<object> PyTuple_GET_ITEM(args, 2), <object> PyTuple_GET_ITEM(args, 3), dims)
        self.geometry(self.whole(<object> PyTuple_GET_ITEM(args, 1), "the storage offset"), ref.record, ref.first,
                      ref.nbytes, itemsize, &row, dims)
        return self.tensor(&row, dims)

    @cython.final
    cdef Py_ssize_t read_dims(self, object size, object stride, int64_t *dims) except -1:
        """Size and stride, as Python has them; the rank."""
        cdef Py_ssize_t i, rank
        if not isinstance(size, (tuple, list)) or not isinstance(stride, (tuple, list)):
            self.wrong("expected size and stride as tuples of int")
        rank = len(size)
        if rank != len(stride):
            self.wrong(f"size has {rank} dimensions and stride {len(stride)}")
        if rank > MAX_RANK:
            raise LimitError(f"tensor of {rank} dimensions; at most {MAX_RANK} are read", offset=self.at)
        for i in range(rank):
            dims[i] = self.whole(size[i], "a size")
            dims[rank + i] = self.whole(stride[i], "a stride")
        return rank

    @cython.final
    cdef int dtype_v3(self, _StorageRef ref, object dtype, tio_row *row) except -1:
        if self.maker is not None:
            try:
                known = self.maker.dtypes.get(dtype)
            except TypeError:  # it has no hash
                self.expected("a dtype", dtype)
            if known is None:
                raise _NotPlain("a tensor of some other type")
            row.dtype = known.code
            return known.itemsize
        if type(dtype) is not _TorchDType:
            self.expected("a dtype", dtype)
        if ref.cls.kind != K_UNTYPED and ref.itemsize != 1:
            self.wrong("expected an untyped storage")
        known = _BY_NAME.get(dtype)
        if known is None:
            raise UnsupportedError(f"a plain tensor of {dtype}", offset=self.at)
        row.dtype = known.code
        return known.itemsize

    @cython.final
    cdef int check_grad(self, object requires_grad, object hooks, tio_row *row) except -1:
        if requires_grad is True:
            row.flags |= TIO_ROW_REQUIRES_GRAD
        elif requires_grad is not False:
            self.expected("a bool as requires_grad", requires_grad)
        if hooks is not None and not PyODict_CheckExact(hooks):
            self.expected("an OrderedDict of hooks", hooks)
        if self.maker is not None and hooks:
            raise _NotPlain("hooks")
        return 0

    @cython.final
    cdef int check_bits(self, object metadata, tio_row *row) except -1:
        """The conjugate and negative bits; other keys are notes that torch ignores, too."""
        if type(metadata) is not dict:
            self.expected("a dict of tensor metadata", metadata)
        for name, bit in (("conj", TIO_ROW_CONJ), ("neg", TIO_ROW_NEG)):
            value = (<dict> metadata).get(name, False)
            if value is True:
                row.flags |= bit
            elif value is not False:
                self.expected(f"a bool as {name}", value)
        return 0

    @cython.final
    cdef int geometry(self, int64_t first, Py_ssize_t record, int64_t begin, int64_t nbytes, int itemsize,
                      tio_row *row, int64_t *dims) except -1:
        """Prove the view inside `nbytes` at `begin` of its record, turn strides into bytes, and fill the row.

        `first` and the strides in `dims` count elements; all are known not to be negative.
        """
        cdef Py_ssize_t i, rank = row.rank
        cdef uint64_t offset, span = 0, term, n, room = <uint64_t> nbytes
        cdef bint empty = False
        cdef const Extent *extent = self.extents + record
        for i in range(rank):
            empty = empty or dims[i] == 0
        for i in range(rank):
            n = <uint64_t> (dims[i] - 1) if dims[i] else 0
            if not tio_mul(<uint64_t> dims[rank + i], <uint64_t> itemsize, &term) or term >> 63:
                if n and not empty:
                    self.wrong("a stride of over 2^63 - 1 bytes")
                term = 0  # never stepped along
            dims[rank + i] = <int64_t> term
            if not empty and (not tio_mul(n, term, &term) or not tio_add(span, term, &span)):
                self.wrong("size and stride overflow")
        row.storage = extent.storage if extent.storage >= 0 else -1 - record  # not raw: a storage is made for it
        row.offset = extent.offset + begin
        self.current, self.first = record, first
        row.chunks = 1
        row.chunk = 0
        row.nbytes = 0
        if empty:
            return 0
        if not tio_mul(<uint64_t> first, <uint64_t> itemsize, &offset) \
                or not tio_add(span, <uint64_t> itemsize, &span) or offset > room or span > room - offset:
            self.wrong(f"the tensor leaves its storage: expected at most {room} bytes, found a view of {span} bytes at "
                       f"{offset}")
        row.offset += <int64_t> offset
        row.nbytes = <int64_t> span
        return 0

    @cython.final
    cdef object tensor(self, tio_row *row, int64_t *dims):
        """An array, or a leaf and a row."""
        cdef Leaf leaf
        self.charge(COST_TENSOR + 16 * row.rank)
        if self.maker is not None:
            return self.others(row, dims)
        if self.leases is not None and self.wanted is None:
            return self.array(row, dims)
        self.keep_row(row, dims)
        self.n_rows += 1
        if self.leases is not None and self.first_row + self.n_rows - 1 in self.wanted:
            return self.array(row, dims)
        leaf = Leaf.__new__(Leaf)
        leaf.row = self.first_row + self.n_rows - 1
        return leaf

    @cython.final
    cdef object array(self, tio_row *row, int64_t *dims):
        cdef object lease
        cdef int64_t i
        cdef uint64_t made
        if row.storage >= 0:
            lease = self.leases[row.storage]
        else:
            lease = self.decode(-1 - row.storage, row.dtype)
        out = self.make_view(<PyObject *> lease, row.dtype, row.rank, dims, dims + row.rank, row.offset, row.nbytes)
        if row.flags & (TIO_ROW_CONJ | TIO_ROW_NEG):
            made = <uint64_t> out.itemsize
            for i in range(row.rank):  # a copy is made, which may be larger than the bytes it is of
                if dims[row.rank + i] and (not tio_mul(made, <uint64_t> dims[i], &made) or made >> 62):
                    made = <uint64_t> 1 << 62
                    break
            self.charge(max(0, <int64_t> made - row.nbytes))
            out = _lazy_bits(out, row.flags & TIO_ROW_CONJ, row.flags & TIO_ROW_NEG)
        return out

    @cython.final
    cdef object others(self, tio_row *row, int64_t *dims):
        """A tensor by the maker: one storage per record, which the first tensor that covers it brings along."""
        cdef Py_ssize_t record = self.current
        cdef const Extent *extent = self.extents + record
        cdef object lease, out, base = self.bases[record]
        cdef uint64_t total = 1
        cdef int64_t i
        for i in range(row.rank):  # torch counts elements in 63 bits, wherever they are stored
            if dims[i] and (not tio_mul(total, <uint64_t> dims[i], &total) or total >> 59):
                raise LimitError("tensor whose shape has over 2^59 elements", offset=self.at)
        if base is None or extent.storage < 0:
            lease = self.leases[extent.storage] if extent.storage >= 0 else self.decoded_once(record, row.dtype)
        if base is None and not self.moves and self.taken[row.dtype] and row.nbytes == extent.nbytes \
                and (row.nbytes or not self.first):
            out = self.hand_over(<PyObject *> lease, <PyObject *> self.consumer, row.dtype, row.rank, dims,
                                 dims + row.rank, row.offset, row.nbytes)
            if row.nbytes:
                self.bases[record] = out
        else:
            out = self.other_view(row, dims, lease if base is None else None)
        if row.flags & TIO_ROW_REQUIRES_GRAD:
            out.requires_grad = True
        if row.flags & (TIO_ROW_CONJ | TIO_ROW_NEG):
            self.maker.set_bits(out, bool(row.flags & TIO_ROW_CONJ), bool(row.flags & TIO_ROW_NEG))
        return out

    @cython.final
    cdef object decoded_once(self, Py_ssize_t record, int64_t dtype):
        """The lease of a record that is not raw: one of them, as it is one storage."""
        cdef int unit = _DTYPES[dtype].swap
        if self.decoded_as.setdefault(record, unit) != unit:
            raise _NotPlain("a record of the other byte order, as elements of two sizes")
        return self.decode(record, dtype)

    @cython.final
    cdef object other_view(self, tio_row *row, int64_t *dims, object lease):
        """A tensor in a storage that others may be in, too."""
        cdef const Extent *extent = self.extents + self.current
        cdef int64_t i, itemsize = _DTYPES[row.dtype].itemsize
        if lease is not None:
            self.bases[self.current] = self.maker.base(
                lease, extent.offset, extent.nbytes, itemsize, self.location if self.moves else None)
        return self.maker.view(
            self.bases[self.current], row.dtype, self.first, tuple([dims[i] for i in range(row.rank)]),
            tuple([dims[row.rank + i] // itemsize for i in range(row.rank)]))

    @cython.final
    cdef int keep_row(self, tio_row *row, int64_t *dims) except -1:
        self.grow_rows(2 * row.rank)
        row.dims = self.first_dim + self.n_dims
        if row.rank:  # else there may be no memory yet, and memcpy wants some even for nothing
            memcpy(self.dims + self.n_dims, dims, 2 * row.rank * sizeof(int64_t))
        self.n_dims += 2 * row.rank
        self.rows[self.n_rows] = row[0]
        return 0

    @cython.final
    cdef int grow_rows(self, Py_ssize_t more_dims) except -1:
        cdef Py_ssize_t room
        cdef void *p
        if self.n_rows == self.rows_room:
            room = 2 * self.rows_room if self.rows_room else 64
            p = PyMem_Realloc(self.rows, room * sizeof(tio_row))
            if p == NULL:
                raise MemoryError()
            self.rows = <tio_row *> p
            self.rows_room = room
        if self.n_dims + more_dims > self.dims_room:
            room = 2 * self.dims_room + more_dims + 256
            p = PyMem_Realloc(self.dims, room * sizeof(int64_t))
            if p == NULL:
                raise MemoryError()
            self.dims = <int64_t *> p
            self.dims_room = room
        return 0

    @cython.final
    cdef object parameter(self, tuple args):
        """(tensor, requires_grad, hooks): the same tensor, marked."""
        cdef tio_row scratch
        cdef tio_row *row = &scratch
        scratch.flags = 0
        if len(args) != 3:
            self.wrong(f"expected 3 arguments to rebuild a parameter, found {len(args)}")
        tensor = args[0]
        if self.maker is not None:
            self.check_grad(args[1], args[2], row)
            return self.maker.parameter(tensor, args[1])
        if not self.is_tensor(tensor):
            if type(tensor) is _Opaque:
                return tensor
            if isinstance(tensor, _TensorKind):
                self.check_grad(args[1], args[2], row)
                return tensor.as_parameter(args[1])
            self.expected("a tensor", tensor)
        if type(tensor) is Leaf:
            row = self.row_of(<Leaf> tensor)
            row.flags &= ~<int64_t> TIO_ROW_REQUIRES_GRAD
        self.check_grad(args[1], args[2], row)
        row.flags |= TIO_ROW_PARAMETER
        return tensor

    cdef tio_row *row_of(self, Leaf leaf) except NULL:
        """The row of a tensor made in this run."""
        return &self.rows[leaf.row - self.first_row]

    def is_tensor(self, obj):
        """Tell whether an object is a plain tensor: a leaf, or an array (of a storage, or of NumPy's own)."""
        if type(obj) is Leaf:
            return True
        if self.maker is not None:
            return False
        if self.ndarray is None:
            self.ndarray = getattr(_modules.get("numpy"), "ndarray", None)  # loaded by now, if the object is one
        return self.ndarray is not None and type(obj) is self.ndarray

    def describe(self, tensor):
        """Return dtype name, shape and strides in bytes of what `is_tensor` knows."""
        cdef tio_row *row
        cdef int64_t *dims
        if type(tensor) is Leaf:
            row = self.row_of(<Leaf> tensor)
            dims = self.dims + (row.dims - self.first_dim)
            return (_DTYPES[row.dtype].name, tuple([dims[i] for i in range(row.rank)]),
                    tuple([dims[row.rank + i] for i in range(row.rank)]))
        from tensorio.dtypes import of_numpy
        known = of_numpy(tensor.dtype)
        return "" if known is None else known.name, tensor.shape, tensor.strides

    # ------------------------------------------------------- the fast path

    @cython.final
    cdef inline bint at_rebuild(self):
        cdef object top = <object> self.stack[self.sp - 1]
        return type(top) is _Global and (<_Global> top).kind == K_REBUILD_V2

    @cython.final
    cdef bint fast_tensor(self) except -1:
        """Take all opcodes of a plain tensor at once, and make nothing but the tensor.

        Called behind the MARK of a `_rebuild_tensor_v2` call. Bytes that are
        anything else than `csrc/tensor_ops.h` describes are left to the slow
        path, as are memo slots that hold something else.
        """
        cdef tio_tensor_ops ops
        cdef tio_row row
        cdef _Global cls
        cdef object key
        cdef const uint8_t *text
        cdef Py_ssize_t i, count, record
        if not tio_tensor_ops_match(self.buf, <uint64_t> self.n, <uint64_t> self.pos, &ops):
            return False
        if ops.legacy and not self.legacy:
            return False
        if not _is_word(self.peek(ops.word), "storage") or not PyUnicode_CheckExact(self.peek(ops.location)) \
                or self.kind_at(ops.cls) != K_STORAGE or self.kind_at(ops.hooks) != K_ORDERED_DICT:
            return False
        if ops.key_slot < 0:
            text, count = ops.key, <Py_ssize_t> ops.key_len
        else:
            key = self.peek(<Py_ssize_t> ops.key_slot)
            if not PyUnicode_CheckExact(key):
                return False
            text = <const uint8_t *> self.key_text(key, &count)
        cls = <_Global> self.peek(ops.cls)
        record = self.mention(text, count, cls, ops.numel, self.peek(ops.location))
        row.flags = TIO_ROW_REQUIRES_GRAD if ops.requires_grad else 0
        row.dtype = cls.dtype
        row.rank = ops.rank
        self.geometry(ops.offset, record, 0, self.extents[record].nbytes, cls.itemsize, &row, ops.dims)
        made = self.tensor(&row, ops.dims)
        for i in range(TIO_TENSOR_PUTS):
            if ops.puts[i] >= 0:
                self.memo_set(<Py_ssize_t> ops.puts[i], <PyObject *> <size_t> (1 if i else 2 * ops.key_at + 1))
        self.pos = <Py_ssize_t> ops.end
        self.drop(self.sp - 1)
        self.push(made)
        return True

    @cython.final
    cdef inline object peek(self, Py_ssize_t slot):
        """What a memo slot holds; None if nothing, or nothing that was made."""
        if slot >= self.memo_room or self.memo[slot] == NULL:
            return None
        if <size_t> self.memo[slot] & 1:
            if <size_t> self.memo[slot] == 1:
                return None
            self.revive(slot)
        return <object> self.memo[slot]

    @cython.final
    cdef inline int kind_at(self, Py_ssize_t slot) except -1:
        cdef object held = self.peek(slot)
        return (<_Global> held).kind if type(held) is _Global else K_OPAQUE

    # ------------------------------------------------------ storages as arrays

    @cython.final
    cdef object whole_storage(self, _StorageRef ref):
        """A storage that was saved by itself: a flat array."""
        cdef tio_row row
        cdef int64_t[2] dims
        row.dtype, row.flags, row.rank = ref.dtype, 0, 1
        dims[0], dims[1] = ref.nbytes // ref.itemsize, 1
        self.geometry(0, ref.record, ref.first, ref.nbytes, ref.itemsize, &row, dims)
        return self.tensor(&row, dims)

    def table(self):
        """Return (rows, dims), arrays of int64, of the tensors met; empty if they became arrays."""
        rows, dims = _array("q"), _array("q")
        if self.leases is None:
            rows.frombytes(PyBytes_FromStringAndSize(<const char *> self.rows, self.n_rows * sizeof(tio_row)))
            dims.frombytes(PyBytes_FromStringAndSize(<const char *> self.dims, self.n_dims * 8))
        return rows, dims
