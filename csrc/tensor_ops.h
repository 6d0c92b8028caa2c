/* SPDX-License-Identifier: Apache-2.0
 *
 * The opcodes of one tensor in a pickle, as torch writes them, taken at once.
 *
 *   c torch._utils _rebuild_tensor_v2   (before; the caller's)
 *   (                                   (before; the caller's)
 *   ( h"storage" h<class> X<key> q  h<location> K<numel> [N] t q Q
 *   K<offset>  K<size>.. \x86 q  K<stride>.. \x86 q  \x89
 *   h<OrderedDict> ) R q  t q  R
 *
 * h and q stand for BINGET and BINPUT or their long forms, K for BININT1,
 * BININT2 or BININT, \x86 for the tuple opcode of the rank. The word, the
 * class, the location and the OrderedDict come out of the memo, which they do
 * for every tensor but the first of its kind. N is for legacy files: no view.
 * Anything else is no match: the pickle machine then goes opcode by opcode.
 *
 * Source: CPython's Lib/pickletools.py; the shape: torch 0.4 to 2.13.
 */
#ifndef TENSORIO_TENSOR_OPS_H
#define TENSORIO_TENSOR_OPS_H

#include "common.h"

#define TIO_TENSOR_RANK_MAX 64 /* dimensions; NumPy's NPY_MAXDIMS */
#define TIO_TENSOR_KEY_MAX  20 /* digits of a number of 64 bits */
#define TIO_TENSOR_PUTS                                                                            \
    6 /* memo slots that one tensor fills: key, id, size, stride, hooks, arguments */

typedef struct {
    uint32_t word, cls, location, hooks; /* memo slots that must hold what the picture says */
    int64_t key_slot;                    /* memo slot of the key, or -1 if it is spelled out */
    uint64_t key_at;                     /* spelled out: position of its BINUNICODE opcode */
    const uint8_t *key;                  /* spelled out: its bytes */
    uint32_t key_len;
    int requires_grad;
    int legacy; /* the id has a sixth part, NONE */
    unsigned rank;
    int64_t numel;                         /* of the storage */
    int64_t offset;                        /* in elements */
    int64_t dims[2 * TIO_TENSOR_RANK_MAX]; /* size[rank], stride[rank] */
    int64_t puts[TIO_TENSOR_PUTS];         /* memo slots filled; -1 for none */
    uint64_t end;                          /* first byte behind the last R */
} tio_tensor_ops;

/* 1 and *out, or 0 if the bytes at `at` (behind the first MARK) are anything
 * else or end too early. Reads nothing behind `len`. */
int tio_tensor_ops_match(const uint8_t *buf, uint64_t len, uint64_t at, tio_tensor_ops *out);

#endif
