# SPDX-License-Identifier: Apache-2.0
# What a pickle asks to be made: calls, objects and their states, persistent ids.
# A part of _unpickler.pyx, in which all names are defined.

cdef tuple _SIZED = (list, tuple, dict)  # what the functions of tensorio.machine.calls copy


cdef class _Calls(_Containers):
    """Calls of one run.

    Parameters
    ----------
    placed
        See `loads`.
    """
    cdef bint lenient  # unknown objects are kept
    cdef dict placed
    cdef dict placed_made
    cdef int unbuilt  # objects that still need a state

    def __cinit__(self, pickle, Py_ssize_t start, rules, bint sweep, records, list leases, decode, set wanted,
                  Py_ssize_t first_row, Py_ssize_t first_dim, int64_t own_storage, made_storage, nested_storage,
                  dict placed):
        self.lenient = rules.unknown == "opaque"
        self.placed = placed
        self.placed_made = {}

    # --------------------------------------------------------------- calls

    @cython.final
    cdef int op_reduce(self) except -1:
        cdef object args
        self.need(2)
        args = <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        out = self.call(<object> self.stack[self.sp - 2], <tuple> args, None, self.buf[self.at] == c"R")
        self.drop(self.sp - 2)
        return self.push_made(out)

    @cython.final
    cdef int op_newobj_ex(self) except -1:
        """cls.__new__(cls, *args, **kwargs)."""
        self.need(3)
        args, kwargs = <object> self.stack[self.sp - 2], <object> self.stack[self.sp - 1]
        if not PyTuple_CheckExact(args):
            self.expected("a tuple of arguments", args)
        if type(kwargs) is not dict:
            self.expected("a dict of arguments", kwargs)
        out = self.call(<object> self.stack[self.sp - 3], <tuple> args, <dict> kwargs, False)
        self.drop(self.sp - 3)
        return self.push_made(out)

    @cython.final
    cdef int op_inst(self) except -1:
        """INST and OBJ: a class and, from the mark on, its arguments; INST names the class in its own text."""
        cdef const uint8_t *module
        cdef const uint8_t *name
        cdef Py_ssize_t n_module, n_name, height
        if self.buf[self.at] == c"i":
            self.line(&module, &n_module)
            self.line(&name, &n_name)
            height = self.unmark()
            cls = self.find(PyBytes_FromStringAndSize(<const char *> module, n_module + n_name + 2))
            first = height
        else:
            height = self.unmark()
            if height == self.sp:
                self.wrong("expected a class behind the mark")
            cls = <object> self.stack[height]
            first = height + 1
        self.charge(COST_OBJECT + 8 * (self.sp - height))
        args = tuple([<object> self.stack[i] for i in range(first, self.sp)])
        out = self.call(cls, args, None, False)
        self.drop(height)
        return self.push_made(out)

    @cython.final
    cdef inline int push_made(self, object made) except -1:
        if type(made) is _Unbuilt:
            self.unbuilt += 1
        return self.push(made)

    @cython.final
    cdef int op_extension(self, uint32_t code) except -1:
        """EXT1, EXT2, EXT4: a name that only the process which wrote the pickle knows."""
        return self.push(self.find(f"copyreg\nextension {code}\n".encode()))

    @cython.final
    cdef object call(self, object callee, tuple args, dict kwargs, bint reduce):
        """What ``callee(*args)`` stands for, if `reduce`; else, ``callee.__new__(callee, *args, **kwargs)``."""
        cdef int kind
        if type(callee) is _Opaque:
            self.charge(COST_OPAQUE)
            out = _Opaque(callee.module, callee.name, args)
            out.kwargs = kwargs or None
            return out
        if type(callee) is not _Global:
            return self.call_value(callee, args, kwargs, reduce)
        if kwargs:
            self.wrong(f"{callee!r} takes no named arguments")
        kind = (<_Global> callee).kind
        if self.placed is not None and args and type(args[0]) is tuple and kind in (K_REBUILD, K_REBUILD_V2):
            args = (self.spelled_storage(args[0]), *args[1:])
        if kind == K_REBUILD_V2:
            return self.rebuild(args, 2)
        if kind == K_REBUILD_V3:
            return self.rebuild(args, 3)
        if kind == K_REBUILD:
            return self.rebuild(args, 1)
        if kind == K_REBUILD_PARAMETER:
            return self.parameter(args)
        if kind == K_ORDERED_DICT and PyTuple_GET_SIZE(args) == 0:
            self.charge(COST_ORDERED_DICT)
            return PyODict_New()
        try:
            return self.call_rare(kind, callee, args)
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise

    @cython.final
    cdef object call_value(self, object callee, tuple args, dict kwargs, bint reduce):
        """Calls of what stands for itself in the tree: plain types, classes that the caller allowed, torch's of old."""
        if type(callee) is _TorchTag:
            return self.old_tensor(callee, args)
        if isinstance(callee, type) and callee in self.allowed:
            self.charge(COST_OPAQUE)
            from tensorio import allowing
            if reduce:
                return allowing.call(callee, self.resolved(args), self.check)
            return allowing.make(callee, self.resolved(args), self.resolved(kwargs), self.check)
        if isinstance(callee, type) and callee in _BY_TYPE:
            return self.call(_BY_TYPE[callee], args, kwargs, reduce)
        self.expected("something to call", callee)

    @cython.final
    cdef object old_tensor(self, object tag, tuple args):
        """torch.nn.Parameter(tensor) and torch.FloatTensor() of releases up to 0.3, filled by their state."""
        self.charge(COST_OPAQUE)
        if not args:
            return _Unbuilt(tag)
        if ".sparse." in tag and 2 <= len(args) <= 3 and self.is_tensor(args[0]) and self.is_tensor(args[1]):
            raise UnsupportedError(f"pickle opcode 0x{self.buf[self.at]:02x}: {tag} called with indices and values, "
                                   "as no writer of torch's does", offset=self.at)
        if not self.is_tensor(args[0]) or len(args) > 2:
            self.wrong(f"{tag} is a tag here and can't be called with what is no tensor")
        if type(args[0]) is Leaf and tag in ("torch.nn.parameter.Parameter", "torch.nn.Parameter"):
            self.row_of(<Leaf> args[0]).flags |= TIO_ROW_PARAMETER
        return args[0]

    @cython.final
    cdef object call_rare(self, int kind, _Global callee, tuple args):
        # What these make is an object of fixed size, plus at most a copy of their first argument.
        first = args[0] if args else None
        if PyUnicode_CheckExact(first) or type(first) is bytes:
            self.charge(COST_DICT + 2 * <int64_t> len(first))
        else:
            self.charge(COST_OPAQUE + (COST_ITEM * <int64_t> len(first) if isinstance(first, _SIZED) else 0))
        if self.maker is not None and kind < K_NP_RECONSTRUCT:
            return self.call_plain(kind, callee, args)
        if kind == K_REBUILD_KIND:
            return _REBUILD_KINDS[callee.kind_name](args, self)
        if kind == K_REBUILD_QTENSOR:
            return self.qtensor(args)
        if kind == K_REBUILD_FROM_TYPE:
            return self.from_type(args)
        if kind == K_REBUILD_PARAMETER_STATE:
            if len(args) != 4:
                self.wrong(f"expected 4 arguments to rebuild a parameter with state, found {len(args)}")
            return self.parameter(args[:3])
        if kind == K_CALL or kind == K_ORDERED_DICT:
            made = _CALLS[callee.kind_name](self.spelled_out(args), self.check)
            if type(made) is _Redirect:
                return self.call(made.callee, made.args, made.kwargs, False)
            return made
        if kind == K_LOAD_FROM_BYTES:
            return self.load_from_bytes(args) if self.named is None else _Opaque(callee.module, callee.name, args)
        if kind == K_JOBLIB_ARRAY:
            return _Unbuilt("joblib_array")
        return self.call_numpy(kind, callee, args)

    @cython.final
    cdef object call_plain(self, int kind, _Global callee, tuple args):
        """The calls that a maker's tensors go with."""
        if kind == K_REBUILD_PARAMETER_STATE and len(args) == 4 and not args[3]:
            return self.parameter(args[:3])
        call = self.maker.calls.get(callee.kind_name) if kind == K_CALL or kind == K_ORDERED_DICT else None
        if call is None:
            raise _NotPlain(f"a call of {callee.name}")
        return call(self.spelled_out(args), self.check)

    @cython.final
    cdef object qtensor(self, tuple args):
        """(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
        cdef _StorageRef ref
        if len(args) != 7:
            self.wrong(f"expected 7 arguments to rebuild a quantized tensor, found {len(args)}")
        if type(args[0]) is _Opaque:
            return _Opaque("torch._utils", "_rebuild_qtensor", args)
        if type(args[0]) is not _StorageRef:
            self.expected("a storage", args[0])
        ref = <_StorageRef> args[0]
        # Elements of 2 and 4 bits can't be a view: the storage as it is, and what it would be.
        packed = ref.cls.name in ("QUInt4x2Storage", "QUInt2x4Storage")
        if packed:
            self.placeholders -= 1
        values = self.whole_storage(ref) if packed else self.rebuild(args[:4], 1)
        return _REBUILD_KINDS["rebuild_qtensor"]((values, args[4], args[5], ref.cls.name, args[1:4]), self)

    @cython.final
    cdef object from_type(self, tuple args):
        """(function, class, arguments, state): a subclass of tensor."""
        if len(args) != 4 or not PyTuple_CheckExact(args[2]):
            self.wrong("expected a function, a class, arguments and a state to rebuild a tensor of some type")
        func = args[0]
        if type(func) is _Global and (<_Global> func).kind not in _TENSOR_KINDS:
            self.expected("a function that rebuilds a tensor", func)  # one of another type might call one, and so on
        if type(func) is _Global or type(func) is _Opaque:
            made = self.call(func, <tuple> args[2], None, True)
        else:  # before 2.6, a jagged tensor was made by its class
            self.charge(COST_OPAQUE)
            made = _REBUILD_KINDS["from_class"]((func, args[2], args[3]), self)
        return _REBUILD_KINDS["from_type"]((made, args[1], args[3]), self)

    # ---------------------------------------------------------------- state

    @cython.final
    cdef int op_build(self) except -1:
        cdef object target, state
        self.need(2)
        target = <object> self.stack[self.sp - 2]
        state = <object> self.stack[self.sp - 1]
        if type(target) is _Opaque:
            target.state = state
        elif PyODict_CheckExact(target) or type(target) is _Counter:
            self.set_attributes(target, state)
        elif type(target) is _Unbuilt:
            state = self.pop()
            self.unbuilt -= 1
            return self.replace(self.build(target, state))
        elif self.maker is not None and id(target) not in self.unfilled:
            raise _NotPlain("an object that takes a state")
        elif id(target) not in self.unfilled and self.is_tensor(target):
            self.old_variable(target, state)
        else:
            self.build_in_place(target, state)
        return self.drop(self.sp - 1)

    @cython.final
    cdef object build(self, object unbuilt, object state):
        """What an object without contents becomes with its state."""
        try:
            if type(unbuilt.kind) is _TorchTag:
                return self.old_state(unbuilt.kind, state)
            if unbuilt.kind == "np_array":
                return self.np_array(state)
            if unbuilt.kind == "joblib_array":
                return self.joblib_array(state)
            return _STATES[unbuilt.kind](unbuilt, state, self.check)
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise

    @cython.final
    cdef int build_in_place(self, object target, object state) except -1:
        try:
            if self.unfilled.pop(id(target), None) is not None:
                self.numpy_state(target, state)
            elif type(target) in _STATES:
                _STATES[type(target)](target, state, self.check)
            elif type(target) in self.allowed:
                from tensorio import allowing
                allowing.set_state(target, self.resolved(state))
            else:
                self.expected("an object that takes a state", target)
        except (FormatError, UnsupportedError) as error:
            if error.offset is None:
                error.offset = self.at
            raise
        return 0

    @cython.final
    cdef object old_state(self, object tag, object state):
        """A tensor of the time before `_rebuild_tensor`: (storage, offset, size, stride), or a Variable around one."""
        if PyTuple_CheckExact(state) and len(state) == 4 and type(state[0]) is _StorageRef:
            return self.rebuild(state, 1)
        if PyTuple_CheckExact(state) and len(state) == 5 and self.is_tensor(state[0]):
            return state[0]
        self.wrong(f"expected the state of a {tag}: storage, offset, size and stride, or a tensor and its flags")

    @cython.final
    cdef int old_variable(self, object target, object state) except -1:
        """Releases up to 0.3: (requires_grad, volatile, hooks) of a Variable."""
        if not PyTuple_CheckExact(state) or len(state) != 3 or type(state[0]) is not bool:
            self.wrong("expected the state of a Variable: requires_grad, volatile and hooks")
        if type(target) is Leaf and state[0] is True:
            self.row_of(<Leaf> target).flags |= TIO_ROW_REQUIRES_GRAD
        return 0

    @cython.final
    cdef int set_attributes(self, object target, object state) except -1:
        """Attributes of a dict, such as a state dict's ``_metadata``; none may hide one of its methods."""
        if type(state) is not dict:
            self.expected("a dict of attributes", state)
        for name in <dict> state:
            if type(name) is not str or not name.isidentifier() or hasattr(OrderedDict, name) or hasattr(Counter, name):
                self.wrong(f"attribute {escaped(name)} of a dict")
        target.__dict__.update(state)
        return 0

    # ------------------------------------------------------- persistent ids

    @cython.final
    cdef int op_persid(self, object pid) except -1:
        """What a persistent id stands for goes where it was: at the top of the stack."""
        if PyUnicode_CheckExact(pid):
            found = self.place(pid)
            self.drop(self.sp - 1)  # last: it may have held the only reference to the id
            return self.push(found)
        word = <object> PyTuple_GET_ITEM(pid, 0) if PyTuple_CheckExact(pid) and PyTuple_GET_SIZE(pid) else None
        count = len(pid) if word is not None else 0
        if _is_word(word, "storage"):
            if count != 5 and not (count == 6 and self.rules.legacy) and self.named is None:
                self.wrong(f"expected a persistent id of 5 parts, found {count}")
            if 5 <= count <= 6 and type(<object> PyTuple_GET_ITEM(pid, 1)) is not _Opaque:
                return self.op_binpersid(self.rules.legacy)
        elif _is_word(word, "module") and count == 4 and self.rules.legacy:  # class, source file, source
            return self.module_class(<object> PyTuple_GET_ITEM(pid, 1))
        elif self.placed is not None and count == 3 and type(word) is not str:  # the same, in tar files
            return self.module_class(word)
        elif _is_word(word, "reduce_package"):  # torch.package: (word, number, function, arguments); kept as data
            pass
        elif not (self.named is not None or (self.lenient and type(word) is str)):
            self.wrong("expected a persistent id: ('storage', class, key, location, numel), found "
                       + (f"a tuple that begins with {_kind_of(pid[0])}" if count else _kind_of(pid)))
        out = _Opaque("", "persistent id", pid if PyTuple_CheckExact(pid) else (pid,))
        self.charge(COST_OPAQUE)
        self.drop(self.sp - 1)
        return self.push(out)

    @cython.final
    cdef int module_class(self, object cls) except -1:
        """The class of a module, told by a persistent id; what is known to be something else is none."""
        if type(cls) is not _Opaque and not (isinstance(cls, type) and cls in self.allowed):
            self.expected("the class of a module in a persistent id", cls)
        kept = cls  # the id may be all that holds it
        self.drop(self.sp - 1)
        return self.push(kept)

    @cython.final
    cdef object spelled_storage(self, tuple pid):
        """Tar files whose writer put the parts of a persistent id where the storage would be."""
        self.push(pid)
        self.op_persid(<object> self.stack[self.sp - 1])
        return self.pop()

    @cython.final
    cdef object place(self, str key):
        """A tensor or storage that is described elsewhere in the file."""
        cdef tio_row row
        cdef int64_t[2 * MAX_RANK] dims
        cdef Py_ssize_t record
        cdef int itemsize
        found = self.placed_made.get(key)
        if found is not None:
            return found
        placed = None if self.placed is None else self.placed.get(key)
        if placed is None:
            if self.named is not None:
                return _Opaque("", "persistent id", (key,))
            self.wrong(f"persistent id {escaped(key)}: there is no such tensor in the file")
        if self.maker is not None:
            self.location = "cpu"
            self.moves = self.maker.moves("cpu")
        record = placed.record
        if not 0 <= record < self.n_records:
            raise ValueError(f"record {record}")
        known = _BY_NAME[placed.dtype]
        row.dtype, row.flags, itemsize = known.code, 0, known.itemsize
        if placed.size is None:
            row.rank = 1
            dims[0], dims[1] = self.extents[record].nbytes // itemsize, 1
        else:
            row.rank = self.read_dims(placed.size, placed.stride, dims)
        self.geometry(self.whole(placed.offset, "the storage offset"), record, 0, self.extents[record].nbytes, itemsize,
                      &row, dims)
        found = self.placed_made[key] = self.tensor(&row, dims)
        return found
