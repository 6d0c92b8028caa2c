# SPDX-License-Identifier: Apache-2.0
# Storages as the pickle mentions them: which record each is, proven to hold what is said of it.
# A part of _unpickler.pyx, in which all names are defined.

cdef enum:
    COST_RECORD = 512  # bytes: what a storage that was not known before takes, twice over for growing tables


@cython.final
@cython.freelist(64)
cdef class _StorageRef:
    """One mention of a storage: the record it names, which part of it, and as what."""
    cdef Py_ssize_t record
    cdef int64_t first, nbytes  # of the part, in bytes, from the record's start
    cdef int dtype, itemsize
    cdef _Global cls
    cdef bint moves  # see `_Storages`
    cdef object location


cdef struct Seen:
    int64_t numel
    void *cls  # the storage class as which a record was mentioned first; borrowed from the table of globals


cdef struct Extent:
    int64_t storage
    int64_t offset
    int64_t nbytes


cdef class _Storages(_Names):
    """Storages of one run.

    Parameters
    ----------
    records : Records or None
        See `loads`.
    """
    cdef dict keys
    cdef object numbers_owner
    cdef const int64_t *numbers
    cdef Py_ssize_t n_numbers
    cdef Extent *extents
    cdef Seen *seen
    cdef Py_ssize_t n_records, records_room
    cdef list mentioned  # what is asked of storages that were not known before; None if all are
    cdef bint legacy  # ids may have the parts that they had before zip
    # Where the tensors are not NumPy's:
    cdef bint moves  # whether the storage at hand goes to another device
    cdef object here  # a location whose storages do not
    cdef object location

    def __cinit__(self, pickle, Py_ssize_t start, rules, bint sweep, records, *args):
        cdef const int64_t[::1] cells
        self.keys = {} if records is None else records.keys
        self.mentioned = [] if records is None else None
        self.legacy = rules.legacy
        if records is not None and len(records.numbers):
            self.numbers_owner = records.numbers
            cells = records.numbers
            self.numbers = &cells[0]
            self.n_numbers = len(records.numbers)
        if records is not None and len(records.extents):
            cells = records.extents
            self.n_records = len(cells) // 3
        self.grow_records(self.n_records)
        if self.n_records:
            memcpy(self.extents, &cells[0], self.n_records * sizeof(Extent))

    def __dealloc__(self):
        PyMem_Free(self.extents)
        PyMem_Free(self.seen)

    @cython.final
    cdef int op_binpersid(self, bint legacy) except -1:
        """("storage", class, key, location, numel[, view]) becomes a `_StorageRef`."""
        cdef object pid, cls, key, view
        cdef _StorageRef ref
        cdef const char *text
        cdef Py_ssize_t count
        cdef int64_t numel
        pid = <object> self.stack[self.sp - 1]
        cls = <object> PyTuple_GET_ITEM(pid, 1)
        key = <object> PyTuple_GET_ITEM(pid, 2)
        if type(cls) is not _Global or ((<_Global> cls).kind != K_STORAGE and (<_Global> cls).kind != K_UNTYPED):
            self.expected("a storage class in a persistent id", cls)
        if type(key) is bytes:  # how Python 2 wrote it
            key = (<bytes> key).decode("latin-1")
        if legacy and PyLong_CheckExact(key):  # and so did torch 0.1
            key = str(self.whole(key, "a storage key"))
        if not PyUnicode_CheckExact(key):
            self.expected("a storage key (str)", key)
        text = self.key_text(key, &count)
        numel = self.whole(<object> PyTuple_GET_ITEM(pid, 4), "the number of elements of a storage")
        ref = _StorageRef()
        ref.cls = <_Global> cls
        ref.dtype, ref.itemsize = ref.cls.dtype, ref.cls.itemsize
        ref.record = self.mention(<const uint8_t *> text, count, ref.cls, numel, <object> PyTuple_GET_ITEM(pid, 3))
        ref.first, ref.nbytes = 0, self.extents[ref.record].nbytes
        ref.moves, ref.location = self.moves, self.location
        if PyTuple_GET_SIZE(pid) == 6:
            view = <object> PyTuple_GET_ITEM(pid, 5)
            if view is not None:
                if self.maker is not None:
                    raise _NotPlain("a storage that is a part of another")
                self.narrow(ref, view, numel)
        self.placeholders += 1
        self.drop(self.sp - 1)
        return self.push(ref)

    @cython.final
    cdef const char *key_text(self, object key, Py_ssize_t *count) except NULL:
        try:
            return PyUnicode_AsUTF8AndSize(key, count)
        except UnicodeEncodeError:
            self.wrong("expected a storage key that is UTF-8")

    @cython.final
    cdef int narrow(self, _StorageRef ref, object view, int64_t numel) except -1:
        """Legacy files: a part of a root storage, (key, first element, number of elements)."""
        cdef int64_t first, count
        if not PyTuple_CheckExact(view) or PyTuple_GET_SIZE(view) != 3:
            self.expected("a storage view of 3 parts", view)
        first = self.whole(view[1], "the first element of a storage view")
        count = self.whole(view[2], "the number of elements of a storage view")
        if first > numel or count > numel - first:
            self.wrong(f"a storage view of {count} elements at {first} leaves its storage of {numel}")
        ref.first, ref.nbytes = first * ref.itemsize, count * ref.itemsize
        return 0

    @cython.final
    cdef Py_ssize_t mention(self, const uint8_t *key, Py_ssize_t count, _Global cls, int64_t numel,
                            object location) except -1:
        """The record of a storage key, proven to hold exactly what the pickle says, each time in the same words."""
        cdef Py_ssize_t record = self.find_record(key, count)
        cdef Seen *seen
        cdef uint64_t want
        if record < 0 and self.mentioned is not None:
            record = self.new_record(key, count, cls, numel, location)
        if record < 0:
            self.wrong(f"storage {self.shown(key, count)} has no record in the archive")
        if self.maker is not None:
            self.locate(cls, location)
        seen = &self.seen[record]
        # Elements of one type have several classes: 8-bit floats are in an untyped storage, as plain bytes may be.
        if seen.cls != NULL and (<_Global> seen.cls).dtype == cls.dtype and seen.numel == numel:
            return record
        if seen.cls != NULL and (numel or seen.numel):  # storages without bytes may be of any type
            self.wrong(f"storage {self.shown(key, count)} is mentioned twice, with different types or sizes")
        if not tio_mul(<uint64_t> numel, <uint64_t> cls.itemsize, &want) \
                or want != <uint64_t> self.extents[record].nbytes:
            raise HeaderError(
                f"storage {self.shown(key, count)}: expected {numel} elements of {cls.itemsize} bytes, found a record "
                f"of {self.extents[record].nbytes} bytes", offset=self.at)
        seen.cls = <void *> cls
        seen.numel = numel
        return record

    @cython.final
    cdef inline int locate(self, _Global cls, object location) except -1:
        """Note where the maker puts a storage."""
        if cls.name[0] == "Q":
            raise _NotPlain("quantized elements")
        self.moves = False
        if location is not self.here or location is None:
            self.location = location
            self.moves = self.maker.moves(location)
            if not self.moves:
                self.here = location
        return 0

    @cython.final
    cdef Py_ssize_t new_record(self, const uint8_t *key, Py_ssize_t count, _Global cls, int64_t numel,
                               object location) except -1:
        """A storage whose place in the file is not known yet."""
        cdef uint64_t nbytes
        cdef Py_ssize_t record = self.n_records
        cdef str text = PyUnicode_DecodeUTF8(<const char *> key, count, NULL)
        if not tio_mul(<uint64_t> numel, <uint64_t> cls.itemsize, &nbytes) or nbytes >> 63:
            self.wrong(f"storage {self.shown(key, count)} of over 2^63 - 1 bytes")
        self.charge(COST_RECORD + 2 * count)
        if self.n_records == self.records_room:
            self.grow_records(2 * self.n_records + 64)
        self.extents[record].storage, self.extents[record].offset = record, 0
        self.extents[record].nbytes = <int64_t> nbytes
        self.n_records += 1
        self.keys[text] = record
        where = location if type(location) is str else ""
        # What the class does, without its own function around it: half the cost of a storage.
        self.mentioned.append(_new_tuple(_Mentioned, (text, <int64_t> nbytes, cls.itemsize, where)))
        return record

    @cython.final
    cdef int grow_records(self, Py_ssize_t room) except -1:
        cdef void *p = PyMem_Realloc(self.extents, (room + 1) * sizeof(Extent))
        if p == NULL:
            raise MemoryError()
        self.extents = <Extent *> p
        p = PyMem_Realloc(self.seen, (room + 1) * sizeof(Seen))
        if p == NULL:
            raise MemoryError()
        self.seen = <Seen *> p
        memset(self.seen + self.records_room, 0, (room + 1 - self.records_room) * sizeof(Seen))
        self.records_room = room
        return 0

    @cython.final
    cdef Py_ssize_t find_record(self, const uint8_t *key, Py_ssize_t count) except -2:
        """The record of a storage key; -1 if there is none."""
        cdef int64_t number = tio_decimal(key, count)
        cdef object found
        if 0 <= number < self.n_numbers:
            return self.numbers[number]
        found = self.keys.get(PyUnicode_DecodeUTF8(<const char *> key, count, NULL))
        return -1 if found is None else <Py_ssize_t> found

    @cython.final
    cdef str shown(self, const uint8_t *key, Py_ssize_t count):
        return escaped(PyBytes_FromStringAndSize(<const char *> key, min(count, 100)))

    @cython.final
    cdef int64_t whole(self, object value, str what) except -1:
        """A non-negative int below 2^63."""
        cdef int overflow = 0
        cdef long long n
        if not PyLong_CheckExact(value):
            self.expected(f"an int as {what}", value)
        n = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow or n < 0:
            self.wrong(f"{what} is negative or over 2^63 - 1")
        return n
