/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors header. Holds: no byte behind the header is touched; names
 * and values lie inside it; two runs agree; spaces around the tokens change
 * nothing but offsets (so the short cut and the long way agree); a table that
 * is found sound tiles the payload; what was read survives being written.
 *
 * The length field of most mutants lies, which ends them early: each input is
 * read as it is, and again with the true length in its place.
 */
#include "fuzz.h"
#include "st_header.h"

#define LENGTH_FIELD 8u

typedef struct {
    uint64_t n, digest; /* tensors; all that was handed out, but for the offsets */
    uint64_t *begin, *end, *bits;
    int rc;
    tio_error err;
} outcome;

static void release(outcome *o)
{
    free(o->begin);
    free(o->end);
    free(o->bits);
}

static void check_token(const tio_json_token *tok, const uint8_t *buf, const tio_st_reader *r)
{
    HOLDS(tok->offset >= LENGTH_FIELD && tok->offset < r->data_offset);
    HOLDS(tok->text > buf + LENGTH_FIELD && tok->text + tok->text_len < buf + r->data_offset);
    HOLDS(tok->text == buf + tok->offset + 1);
}

static uint64_t digest_token(uint64_t digest, const tio_json_token *tok)
{
    return digest_bytes(digest_u64(digest, tok->text_len), tok->text, tok->text_len);
}

/* The entry written, and read again as a header of its own. */
static void check_written(const tio_st_event *ev)
{
    uint8_t *name = block(ev->name.text_len);
    uint64_t len = tio_json_unescape(&ev->name, name);
    uint64_t room = LENGTH_FIELD + 2 + 6 * len + 21 * ev->rank + 128, n, m;
    uint8_t *file = block(room), *back;
    tio_st_reader r;
    tio_st_event again;
    tio_error err;
    n = tio_st_entry(file + LENGTH_FIELD + 1, name, len, ev->dtype, ev->shape, ev->rank, ev->begin,
                     ev->end);
    HOLDS(n <= room - LENGTH_FIELD - 2);
    file[LENGTH_FIELD] = '{';
    file[LENGTH_FIELD + 1 + n] = '}';
    tio_store64(file, n + 2);
    HOLDS(tio_st_open(&r, file, LENGTH_FIELD + n + 2, &err) == 0);
    HOLDS(tio_st_next(&r, &again, &err) == 1);
    if (len == 12 && memcmp(name, "__metadata__", 12) == 0) {
        free(name); /* can't be a tensor's name when it is read */
        free(file);
        return;
    }
    HOLDS(again.kind == TIO_ST_EV_TENSOR && again.dtype == ev->dtype && again.rank == ev->rank);
    HOLDS(memcmp(again.shape, ev->shape, ev->rank * sizeof *ev->shape) == 0);
    HOLDS(again.begin == ev->begin && again.end == ev->end);
    back = block(again.name.text_len);
    m = tio_json_unescape(&again.name, back);
    HOLDS(m == len && memcmp(back, name, (size_t)len) == 0);
    HOLDS(tio_st_next(&r, &again, &err) == 0);
    free(back);
    free(file);
    free(name);
}

static void keep_tensor(outcome *o, const tio_st_event *ev, int thorough)
{
    uint64_t bits = 0, i;
    tio_error err = blank_error(0xAA);
    int rc = tio_st_nbits(ev, &bits, &err);
    HOLDS(ev->rank <= TIO_ST_RANK_MAX && ev->dtype >= 0 && ev->dtype < TIO_ST_DTYPES);
    HOLDS(tio_st_dtype_name(ev->dtype) != NULL && tio_st_dtype_bits(ev->dtype) >= 4);
    if (rc < 0)
        check_error(rc, &err, ev->name.offset, ev->name.offset);
    o->digest = digest_u64(digest_u64(o->digest, (uint64_t)ev->dtype), ev->begin);
    o->digest = digest_u64(digest_u64(o->digest, ev->end), (uint64_t)rc);
    for (i = 0; i < ev->rank; i++)
        o->digest = digest_u64(o->digest, ev->shape[i]);
    o->begin = realloc(o->begin, (size_t)(o->n + 1) * sizeof *o->begin);
    o->end = realloc(o->end, (size_t)(o->n + 1) * sizeof *o->end);
    o->bits = realloc(o->bits, (size_t)(o->n + 1) * sizeof *o->bits);
    o->begin[o->n] = ev->begin;
    o->end[o->n] = ev->end;
    o->bits[o->n++] = rc < 0 ? 1 : bits;
    if (thorough)
        check_written(ev);
}

/* Read all events of the header at buf, of which only the header is there. */
static outcome read_all(const uint8_t *buf, uint64_t len, int thorough)
{
    outcome o = {0, DIGEST_START, NULL, NULL, NULL, 0, {0, 0, 0, 0, NULL}};
    tio_st_reader r;
    tio_st_event ev;
    o.err = blank_error(thorough ? 0xAA : 0x55);
    o.rc = tio_st_open(&r, buf, len, &o.err);
    if (o.rc < 0) {
        check_error(o.rc, &o.err, 0, len);
        return o;
    }
    HOLDS(o.rc == 0 && r.data_offset == LENGTH_FIELD + r.header_len && r.data_offset <= len);
    while ((o.rc = tio_st_next(&r, &ev, &o.err)) == 1) {
        HOLDS(ev.kind >= TIO_ST_EV_TENSOR && ev.kind <= TIO_ST_EV_META_EMPTY);
        o.digest = digest_u64(o.digest, (uint64_t)ev.kind);
        if (ev.kind == TIO_ST_EV_TENSOR || ev.kind == TIO_ST_EV_META) {
            check_token(&ev.name, buf, &r);
            o.digest = digest_token(o.digest, &ev.name);
        }
        if (ev.kind == TIO_ST_EV_META) {
            check_token(&ev.value, buf, &r);
            o.digest = digest_token(o.digest, &ev.value);
        }
        if (ev.kind == TIO_ST_EV_TENSOR)
            keep_tensor(&o, &ev, thorough);
    }
    if (o.rc < 0) {
        check_error(o.rc, &o.err, LENGTH_FIELD, r.data_offset);
        HOLDS(o.rc != TIO_TRUNCATED);
    } else {
        HOLDS(tio_st_next(&r, &ev, &o.err) == 0);
    }
    return o;
}

/* Whether the spans, in that order, tile [0, data_len) and hold what the shapes need. */
static int tiles(const outcome *o, const uint32_t *order, uint64_t data_len)
{
    uint64_t i, at = 0;
    for (i = 0; i < o->n; i++) {
        uint32_t t = order[i];
        if (o->begin[t] != at || o->end[t] < at || o->bits[t] % 8 != 0 ||
            o->bits[t] / 8 != o->end[t] - at)
            return 0;
        at = o->end[t];
    }
    return at == data_len;
}

static void check_table(const outcome *o, uint64_t data_len)
{
    uint32_t *order = block(o->n * sizeof *order);
    uint8_t *seen = block(o->n);
    uint64_t bad = ~0u, i;
    tio_error err = blank_error(0xAA);
    int rc = tio_st_check(o->begin, o->end, o->bits, order, o->n, data_len, &bad, &err);
    memset(seen, 0, (size_t)o->n);
    for (i = 0; i < o->n; i++) {
        HOLDS(order[i] < o->n && !seen[order[i]]);
        seen[order[i]] = 1;
        HOLDS(i == 0 || o->begin[order[i - 1]] <= o->begin[order[i]]);
    }
    HOLDS((rc == 0) == tiles(o, order, data_len));
    if (rc < 0) {
        HOLDS(err.code == rc && err.what != NULL && err.offset == 0 && bad <= o->n);
    }
    free(seen);
    free(order);
}

/* The same header with a space in front of every mark outside strings. */
static void check_spaced(const uint8_t *buf, uint64_t header_len, uint64_t len, const outcome *want)
{
    uint8_t *spaced = block(LENGTH_FIELD + 2 * header_len), *exact;
    uint64_t i, n = LENGTH_FIELD;
    int in_string = 0;
    outcome got;
    for (i = LENGTH_FIELD; i < LENGTH_FIELD + header_len; i++) {
        uint8_t c = buf[i];
        if (!in_string && memchr(",:[]{}\"", c, 7) != NULL)
            spaced[n++] = ' ';
        spaced[n++] = c;
        if (c == '"')
            in_string = !in_string;
        else if (c == '\\' && in_string && i + 1 < LENGTH_FIELD + header_len)
            spaced[n++] = buf[++i];
    }
    tio_store64(spaced, n - LENGTH_FIELD);
    exact = copy_of(spaced, n);
    got = read_all(exact, n + (len - LENGTH_FIELD - header_len), 0);
    HOLDS(got.rc == want->rc && got.n == want->n && got.digest == want->digest);
    HOLDS(got.rc == 0 || got.err.what == want->err.what);
    release(&got);
    free(exact);
    free(spaced);
}

/* Only the header's bytes are in memory, whatever length the file is said to have. */
static void try_file(const uint8_t *data, uint64_t header_len, uint64_t len)
{
    uint8_t *head = copy_of(data, LENGTH_FIELD + header_len);
    outcome a, b;
    uint64_t last = 0, i;
    tio_store64(head, header_len);
    a = read_all(head, len, 1);
    b = read_all(head, len, 0);
    HOLDS(a.rc == b.rc && a.n == b.n && a.digest == b.digest);
    HOLDS(a.rc == 0 || same_error(&a.err, &b.err));
    check_spaced(head, header_len, len, &a);
    for (i = 0; i < a.n; i++)
        last = a.end[i] > last ? a.end[i] : last;
    check_table(&a, len - LENGTH_FIELD - header_len);
    check_table(&a, last);
    release(&a);
    release(&b);
    free(head);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    outcome o = read_all(data, size, 0);
    release(&o);
    if (size < LENGTH_FIELD)
        return 0;
    if (tio_load64(data) <= size - LENGTH_FIELD)
        try_file(data, tio_load64(data), size);
    try_file(data, size - LENGTH_FIELD, (uint64_t)1 << 40);
    return 0;
}
