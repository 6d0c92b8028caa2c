# SPDX-License-Identifier: Apache-2.0
# The bottom of the pickler: the bytes that it writes, its memo, and values that hold no others.
# A part of _pickler.pyx, in which all names are defined.


cdef class _Output:
    """The pickle so far, and the objects in it by identity."""
    cdef char *out
    cdef Py_ssize_t n, room
    cdef PyObject **slots   # open addressing: object, index
    cdef uint32_t *numbers
    cdef Py_ssize_t mask, used
    cdef uint32_t next_index

    def __cinit__(self, *args):
        self.mask = 1023
        self.slots = <PyObject **> PyMem_Calloc(self.mask + 1, sizeof(PyObject *))
        self.numbers = <uint32_t *> PyMem_Calloc(self.mask + 1, sizeof(uint32_t))
        if self.slots == NULL or self.numbers == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.slots != NULL:
            for i in range(self.mask + 1):
                if self.slots[i] != NULL:
                    Py_DECREF(<object> self.slots[i])
        PyMem_Free(self.slots)
        PyMem_Free(self.numbers)
        PyMem_Free(self.out)

    # ---------------------------------------------------------------- output

    @cython.final
    cdef inline char *reserve(self, Py_ssize_t count) except NULL:
        cdef char *p
        cdef Py_ssize_t room
        if self.n + count > self.room:
            room = 2 * self.room + count + 4096
            p = <char *> PyMem_Realloc(self.out, room)
            if p == NULL:
                raise MemoryError()
            self.out, self.room = p, room
        p = self.out + self.n
        self.n += count
        return p

    @cython.final
    cdef inline int write(self, const char *p, Py_ssize_t count) except -1:
        memcpy(self.reserve(count), p, count)
        return 0

    @cython.final
    cdef inline int op(self, char c) except -1:
        self.reserve(1)[0] = c
        return 0

    @cython.final
    cdef inline int op1(self, char c, uint8_t value) except -1:
        cdef char *p = self.reserve(2)
        p[0] = c
        p[1] = <char> value
        return 0

    @cython.final
    cdef inline int op4(self, char c, uint32_t value) except -1:
        cdef char *p = self.reserve(5)
        p[0] = c
        p[1] = <char> (value & 0xFF)
        p[2] = <char> (value >> 8 & 0xFF)
        p[3] = <char> (value >> 16 & 0xFF)
        p[4] = <char> (value >> 24)
        return 0

    # ------------------------------------------------------------------ memo

    @cython.final
    cdef inline int put_next(self) except -1:
        """Write the put of an object that nobody can refer to again."""
        if self.next_index < 256:
            self.op1(c"q", <uint8_t> self.next_index)
        else:
            self.op4(c"r", self.next_index)
        self.next_index += 1
        return 0

    @cython.final
    cdef int memoize(self, object obj) except -1:
        """Remember an object by identity, keep it alive (its id must not be used again), and write its put."""
        cdef Py_ssize_t i
        if 2 * self.used > self.mask:
            self.rehash()
        i = self.slot_of(<PyObject *> obj)
        Py_INCREF(obj)
        self.slots[i] = <PyObject *> obj
        self.numbers[i] = self.next_index
        self.used += 1
        return self.put_next()

    @cython.final
    cdef inline Py_ssize_t slot_of(self, PyObject *obj) noexcept:
        """The slot that holds `obj`, or the free one where it belongs."""
        cdef Py_ssize_t i = <Py_ssize_t> ((<uintptr_t> obj >> 4) * 0x9E3779B97F4A7C15ULL >> 24) & self.mask
        while self.slots[i] != NULL and self.slots[i] != obj:
            i = (i + 1) & self.mask
        return i

    @cython.final
    cdef int rehash(self) except -1:
        cdef PyObject **old = self.slots
        cdef uint32_t *old_numbers = self.numbers
        cdef Py_ssize_t i, j, count = self.mask + 1
        cdef PyObject **slots = <PyObject **> PyMem_Calloc(4 * count, sizeof(PyObject *))
        cdef uint32_t *numbers = <uint32_t *> PyMem_Calloc(4 * count, sizeof(uint32_t))
        if slots == NULL or numbers == NULL:
            PyMem_Free(slots)
            PyMem_Free(numbers)
            raise MemoryError()
        self.slots, self.numbers, self.mask = slots, numbers, 4 * count - 1
        for i in range(count):
            if old[i] != NULL:
                j = self.slot_of(old[i])
                self.slots[j] = old[i]
                self.numbers[j] = old_numbers[i]
        PyMem_Free(old)
        PyMem_Free(old_numbers)
        return 0

    @cython.final
    cdef inline bint recall(self, object obj) except -1:
        """Write a get if the object was written before."""
        cdef Py_ssize_t i = self.slot_of(<PyObject *> obj)
        if self.slots[i] == NULL:
            return False
        if self.numbers[i] < 256:
            self.op1(c"h", <uint8_t> self.numbers[i])
        else:
            self.op4(c"j", self.numbers[i])
        return True

    # ------------------------------------------------------ numbers and text

    @cython.final
    cdef int save_int(self, object obj) except -1:
        cdef int overflow = 0
        cdef long long value = PyLong_AsLongLongAndOverflow(obj, &overflow)
        if not overflow and -0x80000000LL <= value <= 0x7FFFFFFFLL:
            return self.small_int(value)
        data = _long_bytes(obj)
        if len(data) < 256:
            self.op1(<char> 0x8a, <uint8_t> len(data))
        else:
            self.op4(<char> 0x8b, <uint32_t> len(data))
        return self.write(data, len(data))

    @cython.final
    cdef inline int small_int(self, int64_t value) except -1:
        """An int of 32 bits: BININT1, BININT2 or BININT."""
        cdef char *p
        if 0 <= value < 256:
            return self.op1(c"K", <uint8_t> value)
        if 0 <= value < 65536:
            p = self.reserve(3)
            p[0] = c"M"
            p[1] = <char> (value & 0xFF)
            p[2] = <char> (value >> 8)
            return 0
        return self.op4(c"J", <uint32_t> (value & 0xFFFFFFFF))

    @cython.final
    cdef inline int any_int(self, int64_t value) except -1:
        if -0x80000000LL <= value <= 0x7FFFFFFFLL:
            return self.small_int(value)
        return self.save_int(value)

    @cython.final
    cdef int save_float(self, double value) except -1:
        cdef char *p = self.reserve(9)
        p[0] = c"G"
        tio_store_double(<uint8_t *> p + 1, value)
        return 0

    @cython.final
    cdef int save_str(self, str obj) except -1:
        cdef Py_ssize_t count
        cdef const char *p
        cdef bytes odd
        try:
            p = PyUnicode_AsUTF8AndSize(obj, &count)
        except UnicodeEncodeError:  # lone surrogates: written as CPython does
            odd = obj.encode("utf-8", "surrogatepass")
            p, count = odd, len(odd)
        if count > 0xFFFFFFFF:
            raise UnsupportedError("a string of over 4 GiB does not fit a pickle of protocol 2")
        self.op4(c"X", <uint32_t> count)
        self.write(p, count)
        return self.memoize(obj)

    @cython.final
    cdef inline int word(self, str obj) except -1:
        """A string that was probably written before."""
        return 0 if self.recall(obj) else self.save_str(obj)


cdef bytes _long_bytes(object value):
    """Two's complement, little-endian, no byte more than needed."""
    count = (value.bit_length() >> 3) + 1
    data = value.to_bytes(count, "little", signed=True)
    if value < 0 and count > 1 and data[count - 1] == 0xFF and data[count - 2] & 0x80:
        data = data[:count - 1]
    return data
