# SPDX-License-Identifier: Apache-2.0
"""The airlock: the only way from Python into the C core, and back.

Functions only, no state. Each gets a buffer, calls C (without the GIL where
the input may be large), turns a status into an exception, builds the result
in one batch, and releases the buffer. Rows that only C reads travel as opaque
bytearrays.

The functions are in a file per subject: `_core_bytes.pxi`, `_core_safetensors.pxi`,
`_core_zip_read.pxi` and `_core_zip_write.pxi`. What they share is here: the
buffer, and the exception for a status.
"""
cimport cython
from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memchr, memcmp, memcpy, memset

import array as _array

from tensorio import errors as _errors

from tensorio._append cimport *
from tensorio._csrc cimport *

cdef extern from "Python.h":
    str PyUnicode_DecodeUTF8(const char *s, Py_ssize_t size, const char *errors)
    const char *PyUnicode_AsUTF8AndSize(object s, Py_ssize_t *size) except NULL
    int PyBuffer_FillInfo(Py_buffer *view, object exporter, void *buf, Py_ssize_t n, int readonly, int flags) except -1

cdef enum:
    NOGIL_FROM = 32768  # bytes; below it, letting go of the GIL costs more than the work

cdef array.array _Q = _array.array("q")

tio_crc32_init()
tio_match_init()

ZIP_ALIGN = TIO_ZIP_ALIGN
ZIP_ALIGN_MAX = TIO_ZIP_ALIGN_MAX

# C status -> exception: the one table.
cdef dict _CLASSES = {
    TIO_TRUNCATED: _errors.TruncatedError,
    TIO_MALFORMED: _errors.HeaderError,
    TIO_UNSUPPORTED: _errors.UnsupportedError,
    TIO_LIMIT: _errors.LimitError,
    TIO_MISMATCH: _errors.HeaderError,
}


cdef object _fault(const tio_error *err, str record=None):
    """The exception for a status: kind, place and sentence."""
    message = err.what.decode("ascii")
    if err.want or err.got:
        message = f"{message}: expected {err.want}, found {err.got}"
    if err.code == TIO_TRUNCATED:
        message += "; the file is incomplete: copy or download it again"
    return _CLASSES.get(err.code, _errors.FormatError)(message, offset=err.offset, record=record)


cdef class _Buffer:
    """A read-only buffer held for the length of one call."""
    cdef Py_buffer raw
    cdef bint held
    cdef const uint8_t *ptr
    cdef size_t nbytes

    def __cinit__(self, obj):
        self.held = False
        PyObject_GetBuffer(obj, &self.raw, PyBUF_SIMPLE)
        self.held = True
        self.ptr = <const uint8_t *> self.raw.buf
        self.nbytes = <size_t> self.raw.len

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.raw)


include "_core_bytes.pxi"
include "_core_safetensors.pxi"
include "_core_zip_read.pxi"
include "_core_zip_write.pxi"
