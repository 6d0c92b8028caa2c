# SPDX-License-Identifier: Apache-2.0
# Containers: tuples, lists, dicts and sets, what may be a key of them, and what is put in place of what they hold.
# A part of _unpickler.pyx, in which all names are defined.

cdef enum:
    MAX_KEY_DEPTH = 8      # tuples in tuples as a key: CPython hashes them recursively, without a cache
    MAX_KEY_NODES = 64
    MAX_TUPLE_KEYS = 4096  # per pickle: their hash is not salted, so that they can be made to collide

# |int| below this is its own hash; from here on, many ints share one (CPython's _PyHASH_MODULUS).
cdef long long _HASH_MODULUS = (1LL << 61) - 1


cdef class _Containers(_Arrays):
    """Containers of one run."""
    cdef int tuple_keys
    cdef bint bare_names  # whether names of functions of ours stand in a container by themselves

    @cython.final
    cdef bint container_op(self, uint8_t op) except -1:
        cdef Py_ssize_t i, height
        if op == 0x8f:  # EMPTY_SET
            self.charge(COST_SET)
            self.push(set())
        elif op == 0x90:  # ADDITEMS
            self.add_items(self.unmark())
        elif op == 0x91:  # FROZENSET
            height = self.unmark()
            self.charge(COST_SET + COST_ITEM * (self.sp - height))
            elements = frozenset([self.as_key(<object> self.stack[i]) for i in range(height, self.sp)])
            self.drop(height)
            self.push(elements)
        elif op == c"l":  # LIST
            self.op_list(self.unmark())
        elif op == c"d":  # DICT
            self.op_dict(self.unmark())
        else:
            return False
        return True

    @cython.final
    cdef int op_tuple(self, Py_ssize_t height) except -1:
        """Everything above `height` becomes one tuple; references move, none is made."""
        cdef Py_ssize_t i, count = self.sp - height
        cdef PyObject *t
        self.charge(COST_OBJECT + 8 * count)
        if height == self.room:  # while there is no tuple yet that an error would have to let go
            self.grow()
        t = PyTuple_New_raw(count)
        if t == NULL:
            raise MemoryError()
        for i in range(count):
            if type(<object> self.stack[height + i]) is _Global \
                    and (<_Global> <object> self.stack[height + i]).kind in (K_CALL, K_ORDERED_DICT):
                self.bare_names = True  # other kinds are arguments of torch's and NumPy's calls
            PyTuple_SET_ITEM(t, i, self.stack[height + i])
        self.sp = height
        self.stack[self.sp] = t
        self.sp += 1
        return 0

    @cython.final
    cdef int op_list(self, Py_ssize_t height) except -1:
        cdef list out
        self.charge(COST_DICT + 8 * (self.sp - height))
        out = [<object> self.stack[i] for i in range(height, self.sp)]
        self.drop(height)
        return self.push(out)

    @cython.final
    cdef int set_items(self, Py_ssize_t height) except -1:
        """Pairs above `height` go into the mapping below them; a key may come once."""
        cdef Py_ssize_t i, before
        cdef object key, target, put = None
        if height <= self.floor:
            self.wrong("there is no mapping below the items")
        if (self.sp - height) & 1:
            self.wrong("expected keys and values in pairs")
        target = <object> self.stack[height - 1]
        if type(target) is _Opaque:
            (<list> target.items).extend([(<object> self.stack[i], <object> self.stack[i + 1])
                                          for i in range(height, self.sp, 2)])
            return self.drop(height)
        if not PyDict_CheckExact(target) and not PyODict_CheckExact(target):
            put = self.setter(target)
        before = PyDict_Size(target)
        self.charge(COST_ITEM * (self.sp - height) // 2)
        for i in range(height, self.sp, 2):
            key = <object> self.stack[i]
            if type(<object> self.stack[i + 1]) is _Global:
                self.bare_names = True
            if not PyUnicode_CheckExact(key):
                key = self.as_key(key)
            if PyDict_CheckExact(target):
                PyDict_SetItem(target, key, <object> self.stack[i + 1])
            elif PyODict_CheckExact(target):
                PyODict_SetItem(target, key, <object> self.stack[i + 1])
            else:
                put(target, key, <object> self.stack[i + 1])
        if PyDict_Size(target) - before != (self.sp - height) // 2:
            self.wrong("a key that occurs twice")
        return self.drop(height)

    @cython.final
    cdef int append_items(self, Py_ssize_t height) except -1:
        cdef Py_ssize_t i
        cdef object target
        if height <= self.floor:
            self.wrong("there is no list below the items")
        target = <object> self.stack[height - 1]
        if type(target) is _Opaque:
            target = target.items
        if PyList_CheckExact(target):
            for i in range(height, self.sp):
                if type(<object> self.stack[i]) is _Global:
                    self.bare_names = True
                PyList_Append(target, <object> self.stack[i])
        else:
            append = self.appender(target)
            for i in range(height, self.sp):
                append(target, <object> self.stack[i])
        return self.drop(height)

    @cython.final
    cdef object appender(self, object target):
        """What items are appended with: never a method of an allowed class's own."""
        append = None
        if type(target) in _LISTS:
            append = type(target).append
        elif type(target) in self.allowed:
            from tensorio import allowing
            append = allowing.appender(target)
        if append is None:
            self.expected("a list", target)
        return append

    @cython.final
    cdef object setter(self, object target):
        """What items are set with: never a method of an allowed class's own."""
        put = None
        if type(target) in _DICTS:
            put = dict.__setitem__
        elif type(target) in self.allowed:
            from tensorio import allowing
            put = allowing.setter(target)
        if put is None:
            self.expected("a dict", target)
        return put

    @cython.final
    cdef int op_dict(self, Py_ssize_t height) except -1:
        """DICT: the pairs above the mark become a dict."""
        cdef Py_ssize_t i
        cdef dict out = {}
        if (self.sp - height) & 1:
            self.wrong("expected keys and values in pairs")
        self.charge(COST_DICT + COST_ITEM * (self.sp - height) // 2)
        for i in range(height, self.sp, 2):
            out[self.as_key(<object> self.stack[i])] = <object> self.stack[i + 1]
        if len(out) != (self.sp - height) // 2:
            self.wrong("a key that occurs twice")
        self.drop(height)
        return self.push(out)

    @cython.final
    cdef int add_items(self, Py_ssize_t height) except -1:
        cdef Py_ssize_t i
        if height <= self.floor:
            self.wrong("there is no set below the items")
        target = <object> self.stack[height - 1]
        if type(target) is not set:
            self.expected("a set", target)
        self.charge(COST_ITEM * (self.sp - height))
        for i in range(height, self.sp):
            (<set> target).add(self.as_key(<object> self.stack[i]))
        return self.drop(height)

    # ----------------------------------------------------------------- keys

    @cython.final
    cdef object as_key(self, object key):
        """A key, once it is known to be cheap to hash."""
        if type(key) is _Span:
            key = self.contents(<_Span> key)
        self.check_key(key)
        return key

    @cython.final
    cdef int check_key(self, object key) except -1:
        """Only keys whose hash is cheap and hard to make collide."""
        cdef int nodes = MAX_KEY_NODES
        if type(key) is tuple or isinstance(key, _Size):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                raise LimitError(f"pickle with more than {MAX_TUPLE_KEYS} tuples as keys", offset=self.at)
        self.check_key_part(key, 0, &nodes)
        return 0

    @cython.final
    cdef int check_key_part(self, object key, int depth, int *nodes) except -1:
        cdef int overflow = 0
        cdef long long value
        nodes[0] -= 1
        if depth > MAX_KEY_DEPTH or nodes[0] < 0:
            raise LimitError(f"pickle key of over {MAX_KEY_DEPTH} levels or {MAX_KEY_NODES} parts", offset=self.at)
        if PyLong_CheckExact(key):
            value = PyLong_AsLongLongAndOverflow(key, &overflow)
            if overflow or value >= _HASH_MODULUS or value <= -_HASH_MODULUS:
                raise LimitError("pickle key: an int of 61 bits or more", offset=self.at)
        elif type(key) is tuple or isinstance(key, (_Size, _Device)):
            for part in <tuple> key:
                self.check_key_part(part, depth + 1, nodes)
        elif not (isinstance(key, (str, bytes, bool, float)) or key is None
                  or _is_key(key) or type(key) is _Global or type(key) is _Opaque):
            if self.plain:
                raise _NotPlain("a key of some other sort")
            if type(key) is not Leaf or self.rules.maker is None:  # torch's tensors are keys by identity
                self.expected("a key of a plain type", key)
        return 0

    def check(self, key):
        """Refuse what is expensive to hash."""
        self.check_key(key)

    # ---------------------------------------------------------- placeholders

    cdef object resolved(self, object node):
        """What user code is given: without the marks that this machine leaves in trees until `finish`."""
        return self.spell_out(node, False) if self.spans or self.bare_names else node

    @cython.final
    cdef object spell_out(self, object root, bint whole):
        """Put arrays for storages that were saved by themselves, bytes for spans, `Opaque` for bare names.

        In everything that holds other objects, except sets; if it is the `whole` tree, a storage that is found nowhere
        is refused. Tuples are made anew, inner ones first.
        """
        cdef dict done = {}  # by id of containers that were gone through: (container, what it became)
        cdef list stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if type(node) is _StorageRef and whole:
                self.placeholders -= 1
            if isinstance(node, _FLAT) or (id(node) in done and not ready):
                continue
            if type(node) is _StorageRef:
                if whole:
                    done[id(node)] = (node, self.whole_storage(<_StorageRef> node))
            elif type(node) is _Global:
                done[id(node)] = (node, _Opaque((<_Global> node).module, (<_Global> node).name))
            elif type(node) is _Span:
                done[id(node)] = (node, self.contents(<_Span> node))
            elif ready:
                done[id(node)] = (node, _exchanged(node, done))
            else:
                inside = _inside(node)
                if inside:
                    done[id(node)] = (node, node)
                    stack.append((node, True))
                    stack.extend([(child, False) for child in inside])
        if whole and self.placeholders > 0:
            raise UnsupportedError("a storage that was saved by itself, inside a set or an unknown object")
        return done[id(root)][1] if id(root) in done else root


cdef tuple _FLAT = (str, bytes, bytearray, int, float, complex, type, Enum, Leaf, type(None))


cdef list _inside(object node):
    """What an object holds, its attributes as the dict that they are in."""
    cdef list out
    if isinstance(node, dict):
        out = list((<dict> node).values())
    elif isinstance(node, (list, tuple, deque)):
        out = list(node)
    elif type(node) is _Opaque:
        out = [node.args, node.kwargs, node.state, node.items]
    elif isinstance(node, _TensorKind):
        out = [getattr(node, name) for name in node.PARTS]
    else:
        out = []
    held = _attributes_of(node)
    if held:
        out.append(held)
    return out


cdef object _attributes_of(object node):
    try:
        held = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


cdef object _exchanged(object node, dict done):
    """A container with its children as they became; the same one, but for tuples."""
    if type(node) is tuple:
        new = tuple([done[id(child)][1] if id(child) in done else child for child in node])
        return node if all([a is b for a, b in zip(new, node)]) else new
    if isinstance(node, dict):
        for key, child in list((<dict> node).items()):
            if id(child) in done and done[id(child)][1] is not child:
                dict.__setitem__(node, key, done[id(child)][1])
    elif isinstance(node, (list, deque)):
        base = list if isinstance(node, list) else deque
        for i, child in enumerate(list(node)):
            if id(child) in done and done[id(child)][1] is not child:
                base.__setitem__(node, i, done[id(child)][1])
    elif type(node) is _Opaque or isinstance(node, _TensorKind):
        for name in ("args", "kwargs", "state") if type(node) is _Opaque else node.PARTS:
            child = getattr(node, name)
            if id(child) in done and done[id(child)][1] is not child:
                object.__setattr__(node, name, done[id(child)][1])
    return node
