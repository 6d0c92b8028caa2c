/* SPDX-License-Identifier: Apache-2.0
 *
 * One function per part of the picture in tensor_ops.h; each returns 0 as soon
 * as the bytes differ from it.
 */
#include "tensor_ops.h"

enum {
    OP_MARK = '(',
    OP_TUPLE = 't',
    OP_EMPTY_TUPLE = ')',
    OP_TUPLE0 = 0x84, /* TUPLE1 to TUPLE3 are this plus the length */
    OP_REDUCE = 'R',
    OP_BINPERSID = 'Q',
    OP_BINUNICODE = 'X',
    OP_BINGET = 'h',
    OP_LONG_BINGET = 'j',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_BININT1 = 'K',
    OP_BININT2 = 'M',
    OP_BININT = 'J',
    OP_NONE = 'N',
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89
};

static int take_op(tio_cursor *in, uint8_t op)
{
    if (in->pos >= in->len || in->buf[in->pos] != op)
        return 0;
    in->pos++;
    return 1;
}

/* A memo opcode of one byte or of four. */
static int take_slot(tio_cursor *in, uint8_t short_op, uint8_t long_op, uint32_t *slot)
{
    const uint8_t *p;
    if (take_op(in, short_op)) {
        p = tio_take(in, 1);
        if (p != NULL)
            *slot = *p;
        return p != NULL;
    }
    if (!take_op(in, long_op))
        return 0;
    p = tio_take(in, 4);
    if (p != NULL)
        *slot = tio_load32(p);
    return p != NULL;
}

static int take_get(tio_cursor *in, uint32_t *slot)
{
    return take_slot(in, OP_BINGET, OP_LONG_BINGET, slot);
}

static int take_put(tio_cursor *in, int64_t *slot)
{
    uint32_t found = 0;
    int rc = take_slot(in, OP_BINPUT, OP_LONG_BINPUT, &found);
    *slot = found;
    return rc;
}

/* A non-negative int of up to 31 bits; larger ones are left to the slow path. */
static int take_int(tio_cursor *in, int64_t *value)
{
    const uint8_t *p;
    uint32_t word;
    if (take_op(in, OP_BININT1)) {
        p = tio_take(in, 1);
        if (p != NULL)
            *value = *p;
        return p != NULL;
    }
    if (take_op(in, OP_BININT2)) {
        p = tio_take(in, 2);
        if (p != NULL)
            *value = tio_load16(p);
        return p != NULL;
    }
    if (!take_op(in, OP_BININT))
        return 0;
    p = tio_take(in, 4);
    if (p == NULL)
        return 0;
    word = tio_load32(p);
    *value = word;
    return word <= INT32_MAX;
}

/* Keys that torch makes: a count, or the address of a C structure, in decimal. */
static int is_key(const uint8_t *p, uint32_t len)
{
    uint32_t i;
    if (len == 0 || len > TIO_TENSOR_KEY_MAX)
        return 0;
    for (i = 0; i < len; i++)
        if (p[i] < '0' || p[i] > '9')
            return 0;
    return 1;
}

/* The key: spelled out and put, or out of the memo. */
static int take_key(tio_cursor *in, tio_tensor_ops *out)
{
    const uint8_t *p;
    uint32_t slot;
    out->key_slot = -1;
    out->puts[0] = -1;
    out->key_at = in->pos;
    if (!take_op(in, OP_BINUNICODE)) {
        if (!take_get(in, &slot))
            return 0;
        out->key_slot = slot;
        return 1;
    }
    p = tio_take(in, 4);
    if (p == NULL)
        return 0;
    out->key_len = tio_load32(p);
    out->key = tio_take(in, out->key_len);
    return out->key != NULL && is_key(out->key, out->key_len) && take_put(in, &out->puts[0]);
}

/* ("storage", class, key, location, numel[, None]) as a persistent id. */
static int take_storage(tio_cursor *in, tio_tensor_ops *out)
{
    if (!take_op(in, OP_MARK) || !take_get(in, &out->word) || !take_get(in, &out->cls) ||
        !take_key(in, out) || !take_get(in, &out->location) || !take_int(in, &out->numel))
        return 0;
    out->legacy = take_op(in, OP_NONE);
    return take_op(in, OP_TUPLE) && take_put(in, &out->puts[1]) && take_op(in, OP_BINPERSID);
}

/* A tuple of ints, of any length in *rank; the empty one is not put. */
static int take_dims(tio_cursor *in, int64_t *dims, unsigned *rank, int64_t *put)
{
    unsigned n = 0, most = 3;
    *put = -1;
    *rank = 0;
    if (take_op(in, OP_EMPTY_TUPLE))
        return 1;
    if (take_op(in, OP_MARK))
        most = TIO_TENSOR_RANK_MAX;
    while (n < most && take_int(in, &dims[n]))
        n++;
    *rank = n;
    if (n == 0 || !take_op(in, most == 3 ? (uint8_t)(OP_TUPLE0 + n) : (uint8_t)OP_TUPLE))
        return 0;
    return take_put(in, put);
}

static int take_geometry(tio_cursor *in, tio_tensor_ops *out)
{
    unsigned strides;
    return take_int(in, &out->offset) && take_dims(in, out->dims, &out->rank, &out->puts[2]) &&
           take_dims(in, out->dims + out->rank, &strides, &out->puts[3]) && strides == out->rank;
}

static int take_rest(tio_cursor *in, tio_tensor_ops *out)
{
    out->requires_grad = take_op(in, OP_NEWTRUE);
    return (out->requires_grad || take_op(in, OP_NEWFALSE)) && take_get(in, &out->hooks) &&
           take_op(in, OP_EMPTY_TUPLE) && take_op(in, OP_REDUCE) && take_put(in, &out->puts[4]) &&
           take_op(in, OP_TUPLE) && take_put(in, &out->puts[5]) && take_op(in, OP_REDUCE);
}

int tio_tensor_ops_match(const uint8_t *buf, uint64_t len, uint64_t at, tio_tensor_ops *out)
{
    tio_cursor in = tio_cursor_at(buf, len, at);
    if (!take_storage(&in, out) || !take_geometry(&in, out) || !take_rest(&in, out))
        return 0;
    out->end = in.pos;
    return 1;
}
