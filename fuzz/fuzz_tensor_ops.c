/* SPDX-License-Identifier: Apache-2.0
 *
 * The matcher of one tensor's opcodes. Holds: what it found lies inside the
 * bytes; every field that the header promises is filled; it looks at no byte
 * behind the end it reports, and needs all before; spelled anew in the shortest
 * opcodes, the same tensor is found.
 */
#include "fuzz.h"
#include "tensor_ops.h"

enum { STARTS = 16 }; /* positions tried per input */

static void check_match(const uint8_t *data, uint64_t size, uint64_t at, const tio_tensor_ops *t)
{
    unsigned i;
    HOLDS(t->end > at && t->end <= size);
    HOLDS(t->rank <= TIO_TENSOR_RANK_MAX && (t->requires_grad == 0 || t->requires_grad == 1));
    HOLDS(t->numel >= 0 && t->numel <= INT32_MAX && t->offset >= 0 && t->offset <= INT32_MAX);
    for (i = 0; i < 2 * t->rank; i++)
        HOLDS(t->dims[i] >= 0 && t->dims[i] <= INT32_MAX);
    for (i = 0; i < TIO_TENSOR_PUTS; i++)
        HOLDS(t->puts[i] >= -1 && t->puts[i] <= UINT32_MAX);
    HOLDS(t->puts[1] >= 0 && t->puts[4] >= 0 && t->puts[5] >= 0);
    HOLDS((t->puts[2] >= 0) == (t->rank > 0) && (t->puts[3] >= 0) == (t->rank > 0));
    if (t->key_slot >= 0) {
        HOLDS(t->key_slot <= UINT32_MAX && t->puts[0] == -1);
        return;
    }
    HOLDS(t->key_slot == -1 && t->puts[0] >= 0);
    HOLDS(t->key_at > at && t->key_at < t->end && data[t->key_at] == 'X');
    HOLDS(t->key == data + t->key_at + 5 && t->key_len > 0 && t->key_len <= TIO_TENSOR_KEY_MAX);
    HOLDS(t->key + t->key_len <= data + t->end);
    for (i = 0; i < t->key_len; i++)
        HOLDS(t->key[i] >= '0' && t->key[i] <= '9');
}

/* The fields that are promised; the rest of `dims`, and the key in the memo, are not. */
static int same_match(const tio_tensor_ops *a, const tio_tensor_ops *b)
{
    return a->word == b->word && a->cls == b->cls && a->location == b->location &&
           a->hooks == b->hooks && a->key_slot == b->key_slot &&
           (a->key_slot >= 0 ||
            (a->key_len == b->key_len && memcmp(a->key, b->key, a->key_len) == 0)) &&
           a->requires_grad == b->requires_grad && a->rank == b->rank && a->numel == b->numel &&
           a->offset == b->offset && memcmp(a->dims, b->dims, 2 * a->rank * sizeof *a->dims) == 0 &&
           memcmp(a->puts, b->puts, sizeof a->puts) == 0;
}

/* ---- spelled anew ---- */

typedef struct {
    uint8_t *p;
    int wide; /* the long form of every opcode that has one */
} writer;

static void put_op(writer *w, int op)
{
    *w->p++ = (uint8_t)op;
}

static void put_slot(writer *w, int narrow_op, int wide_op, uint32_t slot)
{
    if (slot < 256 && !w->wide) {
        put_op(w, narrow_op);
        *w->p++ = (uint8_t)slot;
    } else {
        put_op(w, wide_op);
        tio_store32(w->p, slot);
        w->p += 4;
    }
}

static void put_get(writer *w, uint32_t slot)
{
    put_slot(w, 'h', 'j', slot);
}

static void put_put(writer *w, int64_t slot)
{
    put_slot(w, 'q', 'r', (uint32_t)slot);
}

static void put_int(writer *w, int64_t value)
{
    if (value < 256 && !w->wide) {
        put_op(w, 'K');
        *w->p++ = (uint8_t)value;
    } else if (value < 65536 && !w->wide) {
        put_op(w, 'M');
        tio_store16(w->p, (uint16_t)value);
        w->p += 2;
    } else {
        put_op(w, 'J');
        tio_store32(w->p, (uint32_t)value);
        w->p += 4;
    }
}

static void put_dims(writer *w, const int64_t *dims, unsigned rank, int64_t slot)
{
    unsigned i;
    if (rank == 0) {
        put_op(w, ')');
        return;
    }
    if (rank > 3 || w->wide)
        put_op(w, '(');
    for (i = 0; i < rank; i++)
        put_int(w, dims[i]);
    put_op(w, rank > 3 || w->wide ? 't' : 0x84 + (int)rank);
    put_put(w, slot);
}

static void spell(writer *w, const tio_tensor_ops *t)
{
    put_op(w, '(');
    put_get(w, t->word);
    put_get(w, t->cls);
    if (t->key_slot >= 0) {
        put_get(w, (uint32_t)t->key_slot);
    } else {
        put_op(w, 'X');
        tio_store32(w->p, t->key_len);
        memcpy(w->p + 4, t->key, t->key_len);
        w->p += 4 + t->key_len;
        put_put(w, t->puts[0]);
    }
    put_get(w, t->location);
    put_int(w, t->numel);
    put_op(w, 't');
    put_put(w, t->puts[1]);
    put_op(w, 'Q');
    put_int(w, t->offset);
    put_dims(w, t->dims, t->rank, t->puts[2]);
    put_dims(w, t->dims + t->rank, t->rank, t->puts[3]);
    put_op(w, t->requires_grad ? 0x88 : 0x89);
    put_get(w, t->hooks);
    put_op(w, ')');
    put_op(w, 'R');
    put_put(w, t->puts[4]);
    put_op(w, 't');
    put_put(w, t->puts[5]);
    put_op(w, 'R');
}

static void check_spelled_anew(const tio_tensor_ops *t, int wide)
{
    uint8_t *bytes = block(200 + 10 * 2 * TIO_TENSOR_RANK_MAX), *exact;
    writer w = {bytes, wide};
    tio_tensor_ops again;
    uint64_t n;
    spell(&w, t);
    n = (uint64_t)(w.p - bytes);
    exact = copy_of(bytes, n);
    memset(&again, 0x33, sizeof again);
    HOLDS(tio_tensor_ops_match(exact, n, 0, &again) == 1 && again.end == n);
    HOLDS(same_match(t, &again));
    free(exact);
    free(bytes);
}

static void try_at(const uint8_t *data, uint64_t size, uint64_t at)
{
    tio_tensor_ops a, b;
    int rc;
    uint8_t *part;
    memset(&a, 0xAA, sizeof a);
    memset(&b, 0x55, sizeof b);
    rc = tio_tensor_ops_match(data, size, at, &a);
    HOLDS(rc == tio_tensor_ops_match(data, size, at, &b));
    HOLDS(rc == 0 || rc == 1);
    if (rc == 0)
        return;
    HOLDS(a.end == b.end && same_match(&a, &b));
    check_match(data, size, at, &a);
    part = copy_of(data, a.end);
    HOLDS(tio_tensor_ops_match(part, a.end, at, &b) == 1 && b.end == a.end && same_match(&a, &b));
    HOLDS(tio_tensor_ops_match(part, a.end - 1, at, &b) == 0);
    free(part);
    check_spelled_anew(&a, 0);
    check_spelled_anew(&a, 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t i, tried = 0;
    try_at(data, size, 0);
    try_at(data, size, size);
    try_at(data, size, size + 1);
    for (i = 1; i < size && tried < STARTS; i++)
        if (data[i] == '(') {
            try_at(data, size, i);
            tried++;
        }
    return 0;
}
