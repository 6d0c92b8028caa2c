# SPDX-License-Identifier: Apache-2.0
# Names: what a (module, name) in the pickle stands for. Nothing is imported or called for it.
# A part of _unpickler.pyx, in which all names are defined.

cdef enum:
    MAX_REFUSED = 1000     # refused names listed

cdef enum Kind:
    K_OPAQUE = 0
    K_STORAGE
    K_UNTYPED
    K_VALUE  # stands for itself in the tree: dtypes, tags, types
    K_INERT  # an Opaque that is not refused
    K_REBUILD
    K_REBUILD_V2
    K_REBUILD_V3
    K_REBUILD_PARAMETER
    K_REBUILD_PARAMETER_STATE
    K_REBUILD_QTENSOR
    K_REBUILD_FROM_TYPE
    K_REBUILD_KIND  # one of tensorio.machine.rebuild_kinds
    K_ORDERED_DICT
    K_CALL  # one of tensorio.machine.calls
    K_LOAD_FROM_BYTES
    K_JOBLIB_ARRAY
    K_NP_RECONSTRUCT
    K_NP_FROMBUFFER
    K_NP_SCALAR
    K_NP_NDARRAY
    K_NP_DTYPE

cdef dict _KINDS = {
    **dict.fromkeys(_REBUILD_KINDS, K_REBUILD_KIND), **dict.fromkeys(_CALLS, K_CALL),
    "storage": K_STORAGE, "untyped": K_UNTYPED, "dtype": K_VALUE, "tag": K_VALUE, "inert": K_INERT,
    "rebuild": K_REBUILD, "rebuild_v2": K_REBUILD_V2, "rebuild_v3": K_REBUILD_V3,
    "rebuild_parameter": K_REBUILD_PARAMETER, "rebuild_parameter_with_state": K_REBUILD_PARAMETER_STATE,
    "rebuild_qtensor": K_REBUILD_QTENSOR, "rebuild_from_type": K_REBUILD_FROM_TYPE, "ordered_dict": K_ORDERED_DICT,
    "ellipsis": K_VALUE, "load_from_bytes": K_LOAD_FROM_BYTES,
    "joblib_array": K_JOBLIB_ARRAY, "np_reconstruct": K_NP_RECONSTRUCT, "np_frombuffer": K_NP_FROMBUFFER,
    "np_scalar": K_NP_SCALAR,
    "np_ndarray": K_NP_NDARRAY, "np_type": K_NP_NDARRAY, "np_dtype": K_NP_DTYPE,
}


# What may be asked for a tensor in the place of another.
cdef tuple _TENSOR_KINDS = (K_REBUILD, K_REBUILD_V2, K_REBUILD_V3, K_REBUILD_PARAMETER, K_REBUILD_PARAMETER_STATE,
                            K_REBUILD_QTENSOR, K_REBUILD_KIND)


@cython.final
cdef class _Global:
    """What a (module, name) in the pickle stands for."""
    cdef readonly str module, name, kind_name
    cdef int kind
    cdef int dtype
    cdef int itemsize
    cdef object value  # what it is in the tree, for dtypes and tags

    def __repr__(self):
        return f"<global {escaped(self.module)}.{escaped(self.name)}>"


cdef dict _BY_TYPE = {}  # plain types, which stand for themselves in the tree until they are called


cdef dict _make_globals():
    table = {}
    for (module, name), entry in _ALLOWED.items():
        g = _Global()
        g.module, g.name, g.kind_name, g.kind = module, name, entry.kind, _KINDS[entry.kind]
        if entry.kind == "tag":
            g.value = TorchTag(f"{module}.{name}")
        elif entry.kind == "ellipsis":
            g.value = ...
        elif entry.kind in _TYPES and entry.kind != "ordered_dict":
            g.value = _TYPES[entry.kind]
            _BY_TYPE[g.value] = g
        elif entry.dtype and entry.kind != "np_type":
            g.value = TorchDType(entry.dtype) if entry.kind == "dtype" else None
            if entry.dtype in _BY_NAME:
                g.dtype, g.itemsize = _BY_NAME[entry.dtype].code, _BY_NAME[entry.dtype].itemsize
        table[f"{module}\n{name}\n".encode()] = g
    return table


cdef dict _GLOBALS = _make_globals()


cdef class _Names(_Stack):
    """The names of one run.

    Parameters
    ----------
    rules : Rules
    sweep : bool
        Whether to note every name, and to go on where only a value is odd.
    """
    cdef object rules
    cdef object maker  # of tensors that are not NumPy's, see `tensorio.pickles.Maker`
    cdef set allowed  # classes
    cdef dict opaque
    cdef readonly list refused
    cdef readonly list named

    def __cinit__(self, pickle, Py_ssize_t start, rules, bint sweep, *args):
        self.rules = rules
        self.allowed = set(rules.allow.values())
        self.opaque = {}
        self.refused = []
        self.named = [] if sweep else None

    @cython.final
    cdef object find(self, bytes key):
        """The meaning of ``b"module\\nname\\n"``; an Opaque for what is not allowed."""
        found = _GLOBALS.get(key)
        if found is None:
            found = self.find_rare(key)
        elif self.named is not None:
            self.named.append(_Named((<_Global> found).module, (<_Global> found).name, self.at))
        if type(found) is _Global:
            if (<_Global> found).value is not None:
                return self.value_of((<_Global> found).value)
            if (<_Global> found).kind == K_INERT:
                if self.maker is not None:
                    raise _NotPlain("an object of torch's own")
                return self.inert(key, (<_Global> found).module, (<_Global> found).name)
        return found

    @cython.final
    cdef inline object value_of(self, object value):
        """What a name that stands for itself is in the tree."""
        if self.maker is None:
            return value
        found = self.maker.values.get(value)
        if found is None:
            raise _NotPlain("a value of some other sort")
        return found

    @cython.final
    cdef object find_rare(self, bytes key):
        """Names that the table does not have as they are: Python 2's, the caller's, the file's own, unknown ones."""
        try:
            module, name, _ = key.decode("utf-8").split("\n")
        except (UnicodeDecodeError, ValueError):
            self.wrong("a name that is not UTF-8, or has a newline")
        if self.named is not None:
            self.named.append(_Named(module, name, self.at))
        modern = _NAME_MAPPING.get((module, name)) or (_IMPORT_MAPPING.get(module, module), name)
        found = _GLOBALS.get(f"{modern[0]}\n{modern[1]}\n".encode())
        if found is not None:
            return found
        if self.maker is not None:
            raise _NotPlain("a name that is not on the list")
        found = self.rules.allow.get((module, name))
        if found is not None:
            return found
        known = key in self.opaque
        found = self.inert(key, module, name)
        own = self.rules.own and module.startswith(self.rules.own)
        if not (known or own) and len(self.refused) < MAX_REFUSED:
            self.refused.append(f"{module}.{name}")
        return found

    @cython.final
    cdef object inert(self, bytes key, str module, str name):
        found = self.opaque.get(key)
        if found is None:
            self.charge(COST_OPAQUE + 4 * len(key))
            found = self.opaque[key] = _Opaque(module, name)
        return found

    @cython.final
    cdef int op_global(self) except -1:
        cdef const uint8_t *module
        cdef const uint8_t *name
        cdef Py_ssize_t n_module, n_name
        self.line(&module, &n_module)
        self.line(&name, &n_name)
        return self.push(self.find(PyBytes_FromStringAndSize(<const char *> module, n_module + n_name + 2)))

    @cython.final
    cdef int op_stack_global(self) except -1:
        self.need(2)
        name = self.pop()
        module = self.pop()
        if not PyUnicode_CheckExact(name) or not PyUnicode_CheckExact(module):
            self.wrong("expected two strings")
        return self.push(self.find(f"{module}\n{name}\n".encode("utf-8", "surrogatepass")))
