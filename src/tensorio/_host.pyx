# SPDX-License-Identifier: Apache-2.0
"""The airlock to ``csrc/host``: what the operating system is asked for, always without Python's lock.

Functions, and a mapping. The functions return the system's errors as numbers, for the
caller to judge: 0 is success.
"""
import os as _os

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from tensorio._append cimport *

cdef extern from "host/pages.h" nogil:
    int tio_pages_map(int fd, size_t nbytes, int writable, void **ptr)
    void tio_pages_unmap(void *ptr, size_t nbytes)
    int tio_pages_advise(const void *ptr, size_t nbytes, int advice)
    int tio_pages_resident(const void *ptr, size_t nbytes, uint64_t *resident)
    int tio_pages_cached(int fd, uint64_t offset, uint64_t nbytes, uint64_t *cached)
    int tio_pages_direct(int fd, uint32_t *memory, uint32_t *offset)
    void tio_pages_copy(void *target, const void *source, size_t nbytes)

cdef extern from "host/names.h" nogil:
    int tio_names_exchange(const char *a, const char *b)

cdef extern from "host/room.h" nogil:
    int tio_room_reserve(int fd, uint64_t nbytes)

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


@cython.final
cdef class Mapping:
    """A mapping of a whole file, as a buffer; unmapped when neither it nor a view of it is left.

    Holds no descriptor, which those of the mmap module do: a process may have far more mappings than open files. The
    guard knows of it for as long as it lives; see `tensorio.guard`.

    Parameters
    ----------
    fd : int
        May be closed afterwards.
    nbytes : int
        Size of the file, not 0.
    writable : bool
        Map private copy-on-write pages instead of read-only shared ones.
    name : bytes
        For the guard's message.
    """
    cdef void *ptr
    cdef size_t nbytes
    cdef bint writable
    cdef int slot

    def __cinit__(self, int fd, size_t nbytes, bint writable, bytes name not None):
        cdef int error
        self.slot = -1
        with nogil:
            error = tio_pages_map(fd, nbytes, writable, &self.ptr)
        if error:
            self.ptr = NULL
            raise OSError(error, _os.strerror(error))
        self.nbytes, self.writable = nbytes, writable
        self.slot = tio_guard_add(self.ptr, nbytes, name, <size_t> len(name))

    def __dealloc__(self):
        cdef void *ptr = self.ptr
        cdef size_t nbytes = self.nbytes
        if ptr == NULL:
            return
        tio_guard_remove(self.slot)
        with nogil:
            tio_pages_unmap(ptr, nbytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.ptr, <Py_ssize_t> self.nbytes, not self.writable, flags)


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


def copy_runs(const int64_t[::1] targets, const int64_t[::1] sources, const int64_t[::1] sizes, Py_ssize_t first,
              Py_ssize_t end):
    """Copy many runs of bytes from place to place.

    Parameters
    ----------
    targets, sources, sizes : array of int64
        Addresses of memory that the caller keeps alive, and bytes; as long as each other.
    first, end : int
        Which of the runs.
    """
    cdef Py_ssize_t i
    if not (0 <= first <= end <= sizes.shape[0] == targets.shape[0] == sources.shape[0]):
        raise ValueError("expected columns of one length, and a range in them")
    with nogil:
        for i in range(first, end):
            if sizes[i] > 0:  # an empty array may be at NULL, which memcpy does not take even for nothing
                tio_pages_copy(<void *> <uintptr_t> targets[i], <const void *> <uintptr_t> sources[i],
                               <size_t> sizes[i])


def exchange(a, b):
    """Let two files or folders exchange their names in one step; return 0 or an errno (ENOSYS: no such call)."""
    cdef bytes first = _os.fsencode(a), second = _os.fsencode(b)
    cdef const char *one = first
    cdef const char *other = second
    cdef int error
    with nogil:
        error = tio_names_exchange(one, other)
    return error


def reserve(int fd, uint64_t nbytes):
    """Reserve room for the first bytes of a file; return 0 or an errno (ENOSYS, EOPNOTSUPP: can't be done here)."""
    cdef int error
    with nogil:
        error = tio_room_reserve(fd, nbytes)
    return error


def guard_install():
    """Have bus errors explained; return 0 or an errno."""
    return tio_guard_install()


def guard_uninstall():
    """Put back the handler that was there before; return 0 or an errno."""
    return tio_guard_uninstall()
