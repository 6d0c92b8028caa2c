# SPDX-License-Identifier: Apache-2.0
# What pickles hold besides torch's storages: strings of bytes, and NumPy arrays, dtypes and scalars made of them.
# A part of _unpickler.pyx, in which all names are defined.


@cython.final
@cython.freelist(64)
cdef class _Span:
    """Bytes of the pickle that were not copied out of it."""
    cdef Py_ssize_t at, nbytes  # from the start of the pickle
    cdef uint8_t op  # that they are the argument of


cdef class _Arrays(_Tensors):
    """Bytes and NumPy arrays of one run.

    Parameters
    ----------
    own_storage, made_storage, nested_storage
        See `loads`.
    """
    cdef int64_t own_storage
    cdef object made_storage
    cdef object nested_storage
    cdef object encoding
    cdef bint spans  # whether some of the pickle's bytes were not copied out of it
    cdef object last  # the last string that was, which lies at `last_at`
    cdef Py_ssize_t last_at, last_nbytes
    cdef dict nested  # by id: (array of objects, how deep such arrays lie in it)
    cdef dict unfilled  # arrays and dtypes that may still be given a state, by id

    def __cinit__(self, pickle, Py_ssize_t start, rules, bint sweep, records, list leases, decode, set wanted,
                  Py_ssize_t first_row, Py_ssize_t first_dim, int64_t own_storage, made_storage, nested_storage, *args):
        self.encoding = rules.encoding
        self.budget = rules.spare // 3 * 2
        self.own_storage = own_storage
        self.made_storage = made_storage
        self.nested_storage = nested_storage
        self.unfilled = {}
        self.nested = {}

    # ---------------------------------------------------------------- bytes

    @cython.final
    cdef bint bytes_op(self, uint8_t op) except -1:
        """SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8; Python 2's SHORT_BINSTRING, BINSTRING."""
        cdef uint64_t count
        cdef const uint8_t *p
        cdef Py_ssize_t at
        if op == c"C" or op == c"U":
            count = self.take(1)[0]
        elif op == c"B" or op == c"T":
            count = tio_load32(self.take(4))
            if op == c"T" and count >> 31:
                self.wrong("a string of negative length")
        elif op == 0x8e or op == 0x96:
            count = tio_load64(self.take(8))
        else:
            return False
        at = self.pos
        p = self.take_u(count) if count else self.buf
        if self.own_storage >= 0 and op != c"C" and op != c"U":
            self.push(self.span(op, at, <Py_ssize_t> count))
            return True
        self.charge(COST_OBJECT + <int64_t> count)
        raw = PyBytes_FromStringAndSize(<const char *> p, <Py_ssize_t> count)
        self.last = bytearray(raw) if op == 0x96 else self.decoded(raw, self.encoding) if op == c"U" or op == c"T" \
            else raw
        self.last_at, self.last_nbytes = at, <Py_ssize_t> count
        self.push(self.last)
        return True

    @cython.final
    cdef _Span span(self, uint8_t op, Py_ssize_t at, Py_ssize_t count):
        cdef _Span span = _Span.__new__(_Span)
        self.charge(COST_OBJECT)
        span.op, span.at, span.nbytes = op, at, count
        self.spans = True
        return span

    @cython.final
    cdef object contents(self, _Span span):
        """A copy of bytes that were left in the pickle, as what their opcode makes."""
        self.charge(COST_OBJECT + span.nbytes)
        raw = PyBytes_FromStringAndSize(<const char *> self.buf + span.at, span.nbytes)
        if span.op == 0x96:
            return bytearray(raw)
        return self.decoded(raw, self.encoding) if span.op == c"T" else raw

    @cython.final
    cdef tuple spelled_out(self, tuple args):
        """Arguments with the bytes that they stand for."""
        for arg in args:
            if type(arg) is _Span:
                return tuple([self.contents(<_Span> arg) if type(arg) is _Span else arg for arg in args])
        return args

    @cython.final
    cdef object undecoded(self, object data):
        """The bytes of a string of Python 2, which was taken for text."""
        if not PyUnicode_CheckExact(data):
            return data
        try:
            return (<str> data).encode("utf-8" if self.encoding is None else self.encoding)
        except UnicodeError:
            return data

    cdef object resolved(self, object node):
        """A container without placeholders for bytes; see `_Containers`."""
        return node

    @cython.final
    cdef Py_ssize_t place_of(self, object data, Py_ssize_t *nbytes) except -2:
        """Where bytes lie in the pickle; -1 if they were made otherwise."""
        if type(data) is _Span:
            nbytes[0] = (<_Span> data).nbytes
            return (<_Span> data).at
        if data is self.last and data is not None:
            nbytes[0] = self.last_nbytes
            return self.last_at
        return -1

    # ---------------------------------------------------------------- NumPy

    @cython.final
    cdef object call_numpy(self, int kind, _Global callee, tuple args):
        rebuild = _rebuild_module()
        if kind == K_NP_SCALAR:
            return rebuild.np_scalar(tuple([self.undecoded(arg) for arg in self.spelled_out(args)]))
        if kind == K_NP_FROMBUFFER:
            if len(args) == 5 and args[3] == "K" and args[4] is not None:  # transposed: in the order of these axes
                return self.np_array((1, args[2], args[1], False, args[0]), args[4])
            if not (len(args) == 4 or len(args) == 5 and args[4] is None):
                self.wrong("expected bytes, dtype, shape and order to rebuild an array")
            return self.np_array((1, args[2], args[1], args[3] == "F", args[0]))
        if kind == K_NP_RECONSTRUCT:
            if args and type(args[0]) is _Opaque:  # a subclass of ndarray
                return _Opaque(args[0].module, args[0].name, args)
            made = rebuild.np_reconstruct(self.spelled_out(args))
            if self.own_storage >= 0:
                return _Unbuilt("np_array")
        elif kind == K_NP_DTYPE:
            made = rebuild.np_dtype(args)
        else:
            self.wrong(f"{callee.module}.{callee.name} is a tag and can't be called")
        self.unfilled[id(made)] = made
        return made

    @cython.final
    cdef object np_array(self, object state, object axes=None):
        """An array, from its state: a tensor, over the pickle's own bytes where they are elements as they stand."""
        cdef Py_ssize_t at = -1, nbytes = 0
        if self.own_storage >= 0 and PyTuple_CheckExact(state) and len(<tuple> state) == 5 \
                and PyLong_CheckExact(state[0]) and state[0] == 1:
            at = self.place_of(state[4], &nbytes)
        if at >= 0:
            layout = _rebuild_module().np_layout(state[1], state[2], state[3], nbytes, axes)
            if layout is not None:
                return self.own_tensor(layout, self.own_storage, self.start + at, nbytes)
        made = _rebuild_module().np_empty()
        self.numpy_state(made, state)
        if axes is not None:
            made = _rebuild_module().np_transposed(made, axes)
        if self.made_storage is None:
            return made
        layout, data = _rebuild_module().np_made(made)
        if layout is None:
            return made
        self.charge(len(data))
        return self.own_tensor(layout, self.made_storage(data), 0, len(data))

    @cython.final
    cdef object own_tensor(self, tuple layout, int64_t storage, Py_ssize_t offset, Py_ssize_t nbytes):
        """(dtype code, shape, strides in bytes) over bytes of a storage."""
        cdef tio_row row
        cdef int64_t[2 * MAX_RANK] dims
        cdef Py_ssize_t i
        code, shape, strides = layout
        row.dtype, row.flags, row.rank = code, 0, len(shape)
        for i in range(row.rank):
            dims[i], dims[row.rank + i] = shape[i], strides[i]
        row.storage, row.offset, row.nbytes = storage, offset, nbytes
        row.chunks, row.chunk = 1, 0
        return self.tensor(&row, dims)

    @cython.final
    cdef int numpy_state(self, object target, object state) except -1:
        """Fill an array or dtype that was made for it, once."""
        if type(target).__name__ == "ndarray":
            if PyTuple_CheckExact(state) and len(<tuple> state) == 5:
                state = self.spelled_out(<tuple> state)
                data = state[4] if type(state[4]) is not list else self.resolved(state[4])
                state = (*state[:4], self.undecoded(data))
            _rebuild_module().np_state(target, state, self.unfilled, self.nested)
        else:
            _rebuild_module().np_dtype_state(target, state)
        return 0

    @cython.final
    cdef object joblib_array(self, object state):
        """The array that joblib wrote behind the state of its wrapper, in the middle of the pickle.

        Source: ``NumpyArrayWrapper.read_array`` of joblib 0.10 to 1.5; since 1.2, one byte says how many bytes of
        padding follow it. An array of objects is a pickle of its own.
        """
        cdef Py_ssize_t at, nbytes
        if self.own_storage < 0:
            raise UnsupportedError("a joblib array inside another file")
        if type(state) is not dict:
            self.expected("a dict of attributes", state)
        if self.frame_end and self.pos != self.frame_end:
            self.wrong("the frame goes on behind the wrapper of an array")
        self.frame_end = 0
        shape, dtype, order = [(<dict> state).get(name) for name in ("shape", "dtype", "order")]
        if _rebuild_module().np_has_objects(shape, dtype):
            made = self.inner_pickle()
            if type(made).__name__ != "ndarray" and type(made) is not _Opaque:
                self.expected("an array of objects", made)
            return made
        if (<dict> state).get("numpy_array_alignment_bytes") is not None:
            self.take(self.take(1)[0])
        nbytes = _rebuild_module().np_nbytes(shape, dtype)
        at = self.pos
        self.take_u(<uint64_t> nbytes)
        return self.np_array((1, shape, dtype, order == "F", self.span(c"B", at, nbytes)))

    # ------------------------------------------------------- nested storages

    @cython.final
    cdef object load_from_bytes(self, tuple args):
        """torch.storage._load_from_bytes(...): a storage that was saved as a file of its own into a string of bytes."""
        cdef Py_ssize_t at, nbytes = 0, record = self.n_records
        cdef _StorageRef ref
        if self.own_storage < 0 or self.nested_storage is None:
            raise UnsupportedError("a torch storage inside a string of bytes, inside another file")
        if len(args) != 1:
            self.wrong("expected the bytes of a storage")
        at = self.place_of(args[0], &nbytes)
        if at < 0 and type(args[0]) is not bytes:
            self.expected("the bytes of a storage", args[0])
        dtype, storage, offset, count = self.nested_storage(self.start + at if at >= 0 else args[0], nbytes)
        ref = _StorageRef()
        ref.cls = <_Global> _STORAGE_OF[dtype]
        ref.dtype, ref.itemsize = _BY_NAME[dtype].code, _BY_NAME[dtype].itemsize
        self.charge(COST_RECORD)
        if self.n_records == self.records_room:
            self.grow_records(2 * self.n_records + 64)
        self.extents[record].storage, self.extents[record].offset = storage, offset
        self.extents[record].nbytes = count
        self.n_records += 1
        ref.record, ref.first, ref.nbytes = record, 0, count
        self.placeholders += 1
        return ref


cdef dict _STORAGE_OF = {}
for _g in _GLOBALS.values():
    if (<_Global> _g).kind == K_STORAGE and (<_Global> _g).module == "torch":
        _STORAGE_OF.setdefault(_DTYPES[(<_Global> _g).dtype].name, _g)
