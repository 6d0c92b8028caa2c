# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t, uint8_t

cdef class Lease:
    cdef uint8_t *ptr      # first byte
    cdef Py_ssize_t nbytes
    cdef bint writable
    cdef Py_buffer buffer
    cdef bint held
