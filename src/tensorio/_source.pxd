# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

cdef enum:
    MAX_RANK = 64  # NumPy's NPY_MAXDIMS; torch has the same limit

cdef struct Tensor:
    int dtype         # code of the row in tensorio.dtypes; -1 if there is none
    int rank
    int itemsize
    int flags         # TIO_ROW_ bits
    int64_t address   # of the element [0, 0, ...]
    int64_t reach     # bytes from there to behind the last element; -1 if an element lies before it, or strides are odd
    int64_t numel
    int64_t[64] shape
    int64_t[64] strides  # in elements

cdef int of_array(object array, Tensor *t) except -1
cdef int of_torch(object tensor, Tensor *t) except -1
cdef bint is_contiguous(const Tensor *t) noexcept nogil
