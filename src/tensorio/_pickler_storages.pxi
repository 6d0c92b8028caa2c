# SPDX-License-Identifier: Apache-2.0
# The storages that go with a pickle: pieces of memory or of other files, and the tensors that share them.
# A part of _pickler.pyx, in which all names are defined.

cdef enum:
    ALONE_MAX = 256  # views of one storage that are compared with each other, in pairs
    SHARE_WORK = 10_000  # steps of NumPy's search for a byte that two views share; usual views take under ten

# Storage class of each element type; others go by UntypedStorage and a dtype (torch's rebuild_v3).
_STORAGE_NAMES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
cdef list _STORAGE_OF = [_STORAGE_NAMES.get(d.name) for d in _DTYPES]
cdef int[64] _ITEMSIZE
for _d in _DTYPES:
    _ITEMSIZE[_d.code] = _d.itemsize


# Storage class of quantized integers. Their codes, for spans only, are no rows of the table: a storage of theirs
# is never shared with one of plain integers.
_QUANTIZED = {"qint8": (63, "QInt8Storage"), "quint8": (62, "QUInt8Storage"), "qint32": (61, "QInt32Storage"),
              "quint4x2": (60, "QUInt4x2Storage"), "quint2x4": (59, "QUInt2x4Storage")}
for _code, _name in _QUANTIZED.values():
    _ITEMSIZE[_code] = 4 if _name == "QInt32Storage" else 1


cdef struct Piece:
    int64_t space    # what `lo` counts in: -1 for memory, else the index of a storage
    int64_t lo       # first byte
    int64_t nbytes


cdef struct Span:
    # The bytes that one tensor reaches, and what kind of storage they need.
    int64_t space
    int64_t lo
    int64_t hi
    int64_t group_lo  # of the group of overlapping spans it is in
    int64_t group_hi
    int32_t group
    int32_t dtype
    int32_t alone    # not 0: number of a view that shares no byte with another, and is written in C order
    bint held        # a torch tensor's, whose whole storage would be written if not for `compact`


cdef class _Storages(_Objects):
    """Pieces, which become storages, and spans: what each tensor reaches."""
    cdef readonly list keep
    cdef readonly dict made  # piece -> array that must be copied to be written
    cdef Piece *pieces
    cdef Py_ssize_t n_pieces, pieces_room
    cdef list keys          # names of the pieces, below data/
    cdef Span *spans
    cdef Py_ssize_t n_spans, spans_room
    cdef _Storages grouped
    cdef int32_t *group_pieces  # piece of each group, -1 before its first mention
    cdef bint compact
    cdef dict holed         # compact: views with holes, by number of their span; see `_elements`
    cdef dict alone_pieces  # compact: piece of each view that is alone
    cdef int64_t placed     # bytes of the pieces of spans

    def __cinit__(self, _Storages grouped, leaf, bint compact, *args):
        cdef Py_ssize_t i
        self.keep, self.keys = [], []
        self.made = {}
        self.grouped = grouped
        if grouped is not None:
            self.group_pieces = <int32_t *> PyMem_Calloc(grouped.n_spans + 1, sizeof(int32_t))
            if self.group_pieces == NULL:
                raise MemoryError()
            for i in range(grouped.n_spans):
                self.group_pieces[i] = -1
        self.compact = compact
        self.holed, self.alone_pieces = {}, {}

    def __dealloc__(self):
        PyMem_Free(self.pieces)
        PyMem_Free(self.spans)
        PyMem_Free(self.group_pieces)

    @cython.final
    cdef int32_t new_piece(self, int64_t space, int64_t lo, int64_t nbytes) except -1:
        cdef Piece *p
        cdef Py_ssize_t room
        if self.n_pieces == self.pieces_room:
            room = 2 * self.pieces_room + 64
            p = <Piece *> PyMem_Realloc(self.pieces, room * sizeof(Piece))
            if p == NULL:
                raise MemoryError()
            self.pieces, self.pieces_room = p, room
        p = &self.pieces[self.n_pieces]
        p.space, p.lo, p.nbytes = space, lo, nbytes
        self.keys.append(str(self.n_pieces))
        self.n_pieces += 1
        return <int32_t> (self.n_pieces - 1)

    @cython.final
    cdef int span(self, int64_t space, int dtype, int64_t lo, int64_t hi) except -1:
        """Note what a tensor reaches, as the span that is next, where the caller counts it."""
        cdef Span *s
        cdef Py_ssize_t room
        if self.n_spans == self.spans_room:
            room = 2 * self.spans_room + 64
            s = <Span *> PyMem_Realloc(self.spans, room * sizeof(Span))
            if s == NULL:
                raise MemoryError()
            self.spans, self.spans_room = s, room
        s = &self.spans[self.n_spans]
        s.space, s.dtype, s.lo, s.hi, s.alone, s.held = space, dtype, lo, hi, 0, False
        return 0

    @cython.final
    cdef int32_t place(self, int64_t space, int dtype, int64_t lo, int64_t hi, int64_t *first) except -1:
        """The piece of a tensor that reaches [lo, hi) of `space`, and the element of it where the tensor starts."""
        cdef const Span *found
        cdef int32_t piece
        self.span(space, dtype, lo, hi)
        first[0] = 0
        if self.grouped is None:
            piece = self.new_piece(space, lo, hi - lo)
            self.placed += hi - lo
        else:
            # Reductions are asked again, and other threads run meanwhile: the spans of both runs must correspond.
            if self.n_spans >= self.grouped.n_spans:
                raise UnsupportedError("the object changed while it was saved")
            found = &self.grouped.spans[self.n_spans]
            if found.space != space or found.dtype != dtype or found.hi - found.lo != hi - lo:
                raise UnsupportedError("the object changed while it was saved")
            # Of the first run, whose copies of odd arrays are at other places than this one's.
            first[0] = (found.lo - found.group_lo) // _ITEMSIZE[dtype]
            piece = self.group_pieces[found.group]
            if piece < 0:
                piece = self.new_piece(space, found.group_lo, found.group_hi - found.group_lo)
                self.placed += found.group_hi - found.group_lo
                self.group_pieces[found.group] = piece
        self.n_spans += 1
        return piece

    @cython.final
    cdef int32_t place_view(self, int64_t space, Tensor *t, int64_t lo, int64_t hi, object view,
                            int64_t *first) except -1:
        """The same of a strided view, whose strides change if it can be written without its holes.

        `view` is an array or leaf of its elements; None for memory.
        """
        cdef int64_t nbytes = t.itemsize
        cdef int32_t alone
        cdef int i
        if not self.compact:
            return self.place(space, t.dtype, lo, hi, first)
        for i in range(t.rank):
            nbytes *= t.shape[i]
        if self.grouped is None:
            if nbytes < hi - lo:
                self.holed[self.n_spans] = (space, lo, *_layout(t))
            return self.place(space, t.dtype, lo, hi, first)
        alone = self.grouped.spans[self.n_spans].alone if self.n_spans < self.grouped.n_spans else 0
        if not alone:
            return self.place(space, t.dtype, lo, hi, first)
        if _layout(t) != self.grouped.holed[self.n_spans][2:]:
            raise UnsupportedError("the object changed while it was saved")
        self.span(space, t.dtype, lo, hi)
        self.n_spans += 1
        first[0] = 0
        piece = self.alone_pieces.get(alone)
        if piece is None:
            piece = self.alone_pieces[alone] = self.new_piece(-1, 0, nbytes)
            self.made[piece] = _elements(-1, lo, *_layout(t)) if view is None else view
            self.placed += nbytes
        _c_order(t)
        return piece

    @cython.final
    cdef int pid(self, int32_t piece, object cls, str location, int64_t numel) except -1:
        """("storage", class, key, location, numel), as a persistent id."""
        self.op(c"(")
        self.word("storage")
        self.global_of(cls)
        self.word(<str> self.keys[piece])
        self.word(location)
        self.any_int(numel)
        self.op(c"t")
        self.put_next()
        return self.op(c"Q")


cdef void _c_order(Tensor *t) noexcept:
    """Give a tensor of a shape the strides of C order."""
    cdef int i
    cdef int64_t step = 1
    for i in range(t.rank - 1, -1, -1):
        t.strides[i] = step
        step *= max(t.shape[i], 1)


cdef tuple _layout(const Tensor *t):
    """(shape, strides in bytes, itemsize)."""
    cdef int i
    shape = tuple([t.shape[i] for i in range(t.rank)])
    return shape, tuple([t.strides[i] * t.itemsize for i in range(t.rank)]), t.itemsize


def _elements(space, lo, shape, strides, itemsize):
    """An array of a view's place in memory; for another space, of one like it, which is not to be looked at."""
    memory = _core.memory(lo if space < 0 else lo + itemsize, _reach(shape, strides, itemsize), None)
    return np.ndarray(shape, f"V{itemsize}", memory, 0, strides)


cdef int _by_place(const void *a, const void *b) noexcept nogil:
    """Order spans by what must be equal in a group, then by where they start."""
    cdef const Span *x = (<const Span **> a)[0]
    cdef const Span *y = (<const Span **> b)[0]
    cdef int64_t item = _ITEMSIZE[x.dtype]
    if x.space != y.space:
        return -1 if x.space < y.space else 1
    if x.dtype != y.dtype:
        return -1 if x.dtype < y.dtype else 1
    if x.lo % item != y.lo % item:
        return -1 if x.lo % item < y.lo % item else 1
    if x.lo != y.lo:
        return -1 if x.lo < y.lo else 1
    return -1 if x < y else 1


cdef bint _group(Span *spans, Py_ssize_t n) except -1:
    """Put spans that share bytes into groups; whether there are any.

    A group is a run of overlapping spans of one type whose distances are whole
    elements; it reaches from the lowest to the highest byte. Empty spans stay
    alone.
    """
    cdef Span **order = <Span **> PyMem_Calloc(n + 1, sizeof(Span *))
    cdef Span *s
    cdef Span *first = NULL
    cdef Py_ssize_t i, j = 0
    cdef int32_t group = -1, open_group = -1
    cdef int64_t hi = 0
    cdef bint shared = False
    if order == NULL:
        raise MemoryError()
    for i in range(n):
        order[i] = &spans[i]
    qsort(order, n, sizeof(Span *), _by_place)
    for i in range(n):
        s = order[i]
        if s.hi == s.lo or s.alone:  # shares nothing, and must not come between two that do
            group += 1
            s.group, s.group_lo, s.group_hi = group, s.lo, s.hi
            continue
        if first != NULL and s.lo < hi and s.hi > s.lo and s.space == first.space and s.dtype == first.dtype \
                and (s.lo - first.lo) % _ITEMSIZE[s.dtype] == 0:
            shared = True
        else:
            _close_group(order, j, i, hi)
            j, first, hi = i, s, s.lo
            group += 1
            open_group = group
        hi = max(hi, s.hi)
        s.group = open_group
    _close_group(order, j, n, hi)
    PyMem_Free(order)
    return shared


cdef void _close_group(Span **order, Py_ssize_t first, Py_ssize_t last, int64_t hi) noexcept:
    cdef Py_ssize_t i
    for i in range(first, last):
        if order[i].hi > order[i].lo and not order[i].alone:
            order[i].group_lo = order[first].lo
            order[i].group_hi = hi


cdef bint _find_alone(_Storages pickler) except -1:
    """Mark the views with holes that are to be written by themselves: they share no byte with another; whether any are.

    What the others reach stays from end to end, which must be less for it.
    """
    cdef Py_ssize_t i
    cdef Span *s
    groups = {pickler.spans[n].group: {} for n in pickler.holed}
    for i in range(pickler.n_spans):
        s = &pickler.spans[i]
        if s.group in groups and s.hi > s.lo:
            view = pickler.holed.get(i, (s.space, s.lo, (s.hi - s.lo,), (1,), 1))
            groups[s.group].setdefault(view, []).append(i)
    count = 0
    for views in groups.values():
        if len(views) > ALONE_MAX:
            continue
        places = {view: _elements(*view) for view in views}
        alone = [view for view, numbers in views.items() if numbers[0] in pickler.holed and not any(
                 [_share(places[view], other) for key, other in places.items() if key != view])]
        rest = _spanned([view for view in views if view not in alone])
        if rest + sum([view[4] * prod(view[2]) for view in alone]) >= _spanned(views):
            continue
        for view in alone:
            count += 1
            for n in views[view]:
                pickler.spans[n].alone = count
    return count > 0


def _spanned(views):
    """Bytes from end to end of each run of overlapping views."""
    total, end = 0, 0
    for lo, hi in sorted([(view[1], view[1] + _reach(*view[2:])) for view in views]):
        total += max(hi - max(lo, end), 0)
        end = max(end, hi)
    return total


def _reach(shape, strides, itemsize):
    """Bytes from the first element of a view to behind its last one."""
    return itemsize + sum([(n - 1) * stride for n, stride in zip(shape, strides)])


def _share(a, b):
    """Whether two views have a byte in common; where that is too hard to tell, they have."""
    try:
        return np.shares_memory(a, b, SHARE_WORK)
    except np.exceptions.TooHardError:
        return True
