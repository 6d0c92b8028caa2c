# SPDX-License-Identifier: Apache-2.0
"""The airlock to ``csrc/host``: what the operating system is asked for, always without Python's lock.

Functions only. The system's errors come back as numbers, for the caller to judge:
0 is success.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "host/pages.h" nogil:
    int tio_pages_advise(const void *ptr, size_t nbytes, int advice)
    int tio_pages_resident(const void *ptr, size_t nbytes, uint64_t *resident)
    int tio_pages_cached(int fd, uint64_t offset, uint64_t nbytes, uint64_t *cached)
    int tio_pages_direct(int fd, uint32_t *memory, uint32_t *offset)
    void tio_pages_copy(void *target, const void *source, size_t nbytes)

cdef extern from "host/guard.h" nogil:
    int tio_guard_add(const void *ptr, size_t nbytes, const char *name, size_t name_nbytes)
    void tio_guard_remove(int slot)
    int tio_guard_install()
    int tio_guard_uninstall()


cdef class _Held:
    """A buffer, held for the length of one call."""
    cdef Py_buffer raw
    cdef bint held

    def __cinit__(self, buffer, bint writable=False):
        self.held = False
        PyObject_GetBuffer(buffer, &self.raw, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.raw)


def advise(buffer, int advice):
    """Call madvise(2) on the pages of a buffer; return 0 or an errno."""
    cdef _Held data = _Held(buffer)
    cdef int error
    with nogil:
        error = tio_pages_advise(data.raw.buf, <size_t> data.raw.len, advice)
    return error


def resident(buffer):
    """Return how many bytes of a buffer over a mapped file are in memory, or -1 if the system does not tell."""
    cdef _Held data = _Held(buffer)
    cdef uint64_t found = 0
    cdef int error
    with nogil:
        error = tio_pages_resident(data.raw.buf, <size_t> data.raw.len, &found)
    return -1 if error else found


def cached(int fd, uint64_t offset, uint64_t nbytes):
    """Return how many bytes of a range of a file are in the page cache, or -1 if the system does not tell."""
    cdef uint64_t found = 0
    cdef int error
    with nogil:
        error = tio_pages_cached(fd, offset, nbytes, &found)
    return -1 if error else found


def direct_alignment(int fd):
    """Return what addresses and offsets of O_DIRECT must be multiples of, in bytes, or None if the system is silent.

    ``(0, 0)``: the file can't be read that way.
    """
    cdef uint32_t memory = 0, offset = 0
    cdef int error
    with nogil:
        error = tio_pages_direct(fd, &memory, &offset)
    return None if error else (memory, offset)


def copy(target, source):
    """Copy all bytes of one buffer to another of the same size."""
    cdef _Held to = _Held(target, True)
    cdef _Held what = _Held(source)
    if to.raw.len != what.raw.len:
        raise ValueError(f"expected {to.raw.len} bytes, found {what.raw.len}")
    with nogil:
        tio_pages_copy(to.raw.buf, what.raw.buf, <size_t> to.raw.len)


def guard_add(buffer, bytes name):
    """Enter the mapping of a whole file into the guard's table; return its slot, -1 if it is full."""
    cdef _Held data = _Held(buffer)
    return tio_guard_add(data.raw.buf, <size_t> data.raw.len, name, <size_t> len(name))


def guard_remove(int slot):
    """Take a mapping out of the guard's table."""
    tio_guard_remove(slot)


def guard_install():
    """Have bus errors explained; return 0 or an errno."""
    return tio_guard_install()


def guard_uninstall():
    """Put back the handler that was there before; return 0 or an errno."""
    return tio_guard_uninstall()
