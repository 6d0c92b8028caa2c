# SPDX-License-Identifier: Apache-2.0
# Objects that hold others: containers, names, and whatever reduces to a call.
# A part of _pickler.pyx, in which all names are defined.

cdef enum:
    BATCH = 1000  # items per APPENDS and SETITEMS, as CPython's _pickle.c


class _Named:
    """A global of torch by name, for when torch is not there."""

    __slots__ = ("module", "name")

    def __init__(self, module, name):
        self.module = module
        self.name = name


_named = {}


cdef object _torch_global(str module, str name):
    """torch's own object, if somebody imported torch, so that it shares the memo with the user's; else its name."""
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        found = _named.get((module, name))
        if found is None:
            found = _named.setdefault((module, name), _Named(module, name))
    return found


cdef class _Objects(_Output):
    """What any pickle has."""

    cdef int save(self, object obj) except -1:
        """Write any object; see `_Pickler`."""
        raise NotImplementedError

    # ------------------------------------------------------------ containers

    @cython.final
    cdef int save_tuple(self, tuple obj) except -1:
        cdef Py_ssize_t i, count = len(obj)
        if count == 0:
            return self.op(c")")
        if count > 3:
            self.op(c"(")
        for part in obj:
            self.save(part)
        i = self.slot_of(<PyObject *> obj)
        if self.slots[i] != NULL:  # a part held the tuple itself, which wrote it whole
            if count > 3:
                self.op(c"1")
            else:
                for _ in range(count):
                    self.op(c"0")
            self.recall(obj)
            return 0
        self.op(c"t" if count > 3 else <char> (0x84 + count))
        return self.memoize(obj)

    @cython.final
    cdef int save_list(self, list obj) except -1:
        cdef Py_ssize_t end, i = 0, count = len(obj)
        self.op(c"]")
        self.memoize(obj)
        if count == 1:
            self.save(obj[0])
            return self.op(c"a")
        while i < len(obj):
            self.op(c"(")
            end = i + BATCH
            while i < end and i < len(obj):  # what is saved may change the list
                self.save(obj[i])
                i += 1
            self.op(c"e")
        return 0

    @cython.final
    cdef int save_dict(self, dict obj) except -1:
        cdef Py_ssize_t left = len(obj), count = len(obj)
        self.op(c"}")
        self.memoize(obj)
        if count == 0:
            return 0
        for key, value in obj.items():
            if count > 1 and (count - left) % BATCH == 0:
                self.op(c"(")
            self.save(key)
            self.save(value)
            left -= 1
            if count == 1:
                self.op(c"s")
            elif left == 0 or (count - left) % BATCH == 0:
                self.op(c"u")
        if count % BATCH == 0:  # CPython asks for one more batch, which is empty
            self.op(c"(")
            self.op(c"u")
        return 0

    @cython.final
    cdef int batch(self, object items, bint pairs) except -1:
        """Items of an iterator, as CPython batches those of a reduction: a last one alone has no mark."""
        cdef Py_ssize_t count = BATCH
        items = iter(items)
        while count == BATCH:
            chunk = []
            for item in items:
                chunk.append(item)
                if len(chunk) == BATCH:
                    break
            count = len(chunk)
            if count == 0:
                return 0
            if count > 1:
                self.op(c"(")
            for item in chunk:
                if pairs:
                    if type(item) is not tuple or len(<tuple> item) != 2:
                        raise PicklingError("expected pairs from a reduction's dict items")
                    self.save((<tuple> item)[0])
                    self.save((<tuple> item)[1])
                else:
                    self.save(item)
            if pairs:
                self.op(c"u" if count > 1 else c"s")
            else:
                self.op(c"e" if count > 1 else c"a")
        return 0

    # ------------------------------------------------- names and reductions

    @cython.final
    cdef int save_type(self, object obj) except -1:
        for constant in (None, NotImplemented, ...):
            if obj is type(constant):
                return self.save_reduce((type, (constant,)), obj)
        return self.save_named(obj, None)

    @cython.final
    cdef int save_named(self, object obj, object name) except -1:
        """A global by its qualified name."""
        if name is None:
            name = getattr(obj, "__qualname__", None) or obj.__name__
        module = whichmodule(obj, name)
        found = sys.modules.get(module)
        parent = None
        if found is None:
            try:
                __import__(module)
            except ImportError:
                raise PicklingError(f"can't save {obj!r}: there is no module {module}") from None
            found = sys.modules[module]
        for part in name.split("."):
            if part == "<locals>" or not hasattr(found, part):
                raise PicklingError(f"can't save {obj!r}: it's not found as {module}.{name}")
            parent, found = found, getattr(found, part)
        if found is not obj:
            raise PicklingError(f"can't save {obj!r}: it's not the same object as {module}.{name}")
        if parent is not sys.modules[module]:
            return self.save_reduce((getattr, (parent, name.rpartition(".")[2])), obj)
        return self.save_global(obj, module, name)

    @cython.final
    cdef int save_global(self, object obj, str module, str name) except -1:
        """A GLOBAL under its Python 2 name, as protocol 2 has it."""
        module, name = _NAMES.get((module, name), (module, name))
        module = _IMPORTS.get(module, module)
        if "\n" in module or "\n" in name:
            raise PicklingError(f"can't save {module!r}.{name!r}: not a name")
        try:
            text = f"c{module}\n{name}\n".encode("ascii")
        except UnicodeEncodeError:
            raise PicklingError(f"can't save {module}.{name}: not an ASCII name") from None
        self.write(text, len(text))
        return self.memoize(obj)

    @cython.final
    cdef inline int global_of(self, object obj) except -1:
        """A global that was probably written before."""
        return 0 if self.recall(obj) else self.save(obj)

    @cython.final
    cdef int save_by_reduction(self, object obj, type kind) except -1:
        """Whatever else there is goes by copyreg and ``__reduce_ex__``, as in any pickle."""
        reduce = _dispatch_table.get(kind)
        value = obj.__reduce_ex__(2) if reduce is None else reduce(obj)
        if type(value) is str:
            return self.save_named(obj, value)
        if type(value) is not tuple or not 2 <= len(value) <= 6:
            raise PicklingError(f"expected __reduce__ of {kind.__name__} to return a tuple of 2 to 6 parts")
        return self.save_reduce(value, obj)

    @cython.final
    cdef int save_reduce(self, tuple value, object obj) except -1:
        """(callable, arguments[, state[, list items[, dict items[, state setter]]]])."""
        callee, args = value[0], value[1]
        state = value[2] if len(value) > 2 else None
        if not callable(callee) and type(callee) is not _Named or type(args) is not tuple \
                or len(value) > 5 and value[5] is not None and not callable(value[5]):
            raise PicklingError(f"expected a reduction of {type(obj).__name__} to begin with a callable and a tuple")
        name = getattr(callee, "__name__", "")
        if name == "__newobj__":
            if not args or args[0] is not obj.__class__:
                raise PicklingError(f"expected the reduction of {type(obj).__name__} to make one of that class")
            self.save(args[0])
            self.save(args[1:])
            self.op(<char> 0x81)
        elif name == "__newobj_ex__":
            import functools
            if len(args) != 3 or type(args[1]) is not tuple or type(args[2]) is not dict:
                raise PicklingError("expected a class, a tuple and a dict from a reduction by __newobj_ex__")
            cls, positional, keywords = args
            self.save(functools.partial(cls.__new__, cls, *positional, **keywords))
            self.save(())
            self.op(c"R")
        else:
            self.save(callee)
            self.save(args)
            self.op(c"R")
        if self.slots[self.slot_of(<PyObject *> obj)] != NULL:  # an argument held the object itself
            self.op(c"0")
            self.recall(obj)
        else:
            self.memoize(obj)
        if len(value) > 3 and value[3] is not None:
            self.batch(value[3], False)
        if len(value) > 4 and value[4] is not None:
            self.batch(value[4], True)
        if state is not None:
            self.save_state(value, obj, state)
        return 0

    @cython.final
    cdef int save_state(self, tuple value, object obj, object state) except -1:
        if len(value) > 5 and value[5] is not None:
            self.save(value[5])
            self.save(obj)
            self.save(state)
            self.op(<char> 0x86)
            self.op(c"R")
            return self.op(c"0")
        self.save(state)
        return self.op(c"b")

    @cython.final
    cdef int save_bytes(self, bytes obj) except -1:
        if not obj:
            return self.save_reduce((bytes, ()), obj)
        return self.save_reduce((_codecs_encode, (obj.decode("latin-1"), "latin1")), obj)
