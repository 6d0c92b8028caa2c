/* SPDX-License-Identifier: Apache-2.0
 *
 * The header of a safetensors file: the frame around its JSON, the walk over
 * its entries, the rules between entries, and one entry written.
 *
 * Checks run outside in, as in the reference: the length field, the JSON text,
 * each entry by itself (here), then all of them together (tio_st_check). N says
 * that the whole header is there, so a JSON text that ends early is malformed;
 * only a file shorter than N or than its tensors is truncated.
 *
 * Entries spelled exactly as the reference writes them take a short cut past
 * the tokenizer. It recognises a subset of what the long way accepts, stores
 * the same values, and leaves everything else, errors included, to it.
 *
 * Source: safetensors 0.8.0 (see st_header.h).
 */
#include "st_header.h"

#define LENGTH_BYTES 8 /* of the field N at offset 0 */

enum {
    PHASE_START = 0, /* the outermost object has not been opened */
    PHASE_ENTRIES,   /* between its members */
    PHASE_METADATA,  /* between the members of "__metadata__" */
    PHASE_DONE
};

/* ---- dtypes ---- */

#define WORD_MAX 12 /* bytes of the longest known word, "__metadata__" or "data_offsets" */

#define DTYPE(name, bits) {name, sizeof(name) - 1, bits}

static const struct {
    const char *name;
    unsigned char len;
    unsigned char bits;
} dtypes[TIO_ST_DTYPES] = {
    [TIO_ST_U64] = DTYPE("U64", 64),
    [TIO_ST_I64] = DTYPE("I64", 64),
    [TIO_ST_F64] = DTYPE("F64", 64),
    [TIO_ST_C64] = DTYPE("C64", 64),
    [TIO_ST_F32] = DTYPE("F32", 32),
    [TIO_ST_U32] = DTYPE("U32", 32),
    [TIO_ST_I32] = DTYPE("I32", 32),
    [TIO_ST_BF16] = DTYPE("BF16", 16),
    [TIO_ST_F16] = DTYPE("F16", 16),
    [TIO_ST_U16] = DTYPE("U16", 16),
    [TIO_ST_I16] = DTYPE("I16", 16),
    [TIO_ST_F8_E5M2FNUZ] = DTYPE("F8_E5M2FNUZ", 8),
    [TIO_ST_F8_E4M3FNUZ] = DTYPE("F8_E4M3FNUZ", 8),
    [TIO_ST_F8_E8M0] = DTYPE("F8_E8M0", 8),
    [TIO_ST_F8_E4M3] = DTYPE("F8_E4M3", 8),
    [TIO_ST_F8_E5M2] = DTYPE("F8_E5M2", 8),
    [TIO_ST_I8] = DTYPE("I8", 8),
    [TIO_ST_U8] = DTYPE("U8", 8),
    [TIO_ST_F6_E3M2] = DTYPE("F6_E3M2", 6),
    [TIO_ST_F6_E2M3] = DTYPE("F6_E2M3", 6),
    [TIO_ST_F4] = DTYPE("F4", 4),
    [TIO_ST_BOOL] = DTYPE("BOOL", 8),
};

const char *tio_st_dtype_name(int dtype)
{
    return dtype >= 0 && dtype < TIO_ST_DTYPES ? dtypes[dtype].name : NULL;
}

unsigned tio_st_dtype_bits(int dtype)
{
    return dtype >= 0 && dtype < TIO_ST_DTYPES ? dtypes[dtype].bits : 0;
}

/* The dtype of this name, or -1. */
static int find_dtype(const uint8_t *name, uint64_t len)
{
    int i;
    for (i = 0; i < TIO_ST_DTYPES; i++)
        if (dtypes[i].len == len && memcmp(dtypes[i].name, name, dtypes[i].len) == 0)
            return i;
    return -1;
}

/* ---- words of the format ---- */

/* A string token without its escapes, as far as it can be a known word. */
typedef struct {
    const uint8_t *text;
    uint64_t len;
    uint8_t unescaped[6 * WORD_MAX]; /* \uXXXX: at most 6 bytes per byte of a word */
} word;

static void read_word(const tio_json_token *tok, word *w)
{
    w->text = tok->text;
    w->len = tok->text_len;
    if (!tok->escaped || w->len > sizeof w->unescaped)
        return; /* a text this long is no known word, escaped or not */
    w->len = tio_json_unescape(tok, w->unescaped);
    w->text = w->unescaped;
}

static int is_word(const word *w, const char *known, uint64_t len)
{
    return w->len == len && memcmp(w->text, known, (size_t)len) == 0;
}

static int is_metadata_key(const tio_json_token *tok)
{
    static const char known[] = "__metadata__";
    word w;
    if (!tok->escaped) /* every tensor's name comes by here */
        return tok->text_len == sizeof known - 1 && memcmp(tok->text, known, sizeof known - 1) == 0;
    read_word(tok, &w);
    return is_word(&w, known, sizeof known - 1);
}

static int dtype_of(const tio_json_token *tok)
{
    word w;
    read_word(tok, &w);
    return find_dtype(w.text, w.len);
}

/* ---- one entry, the long way ---- */

static int fail(const tio_json_token *tok, const char *what, tio_error *err)
{
    return tio_fail(err, TIO_MALFORMED, tok->offset, 0, 0, what);
}

static int read_u64(tio_st_reader *r, const tio_json_token *tok, uint64_t *value, const char *what,
                    tio_error *err)
{
    int rc;
    if (tok->type != TIO_JSON_NUMBER)
        return fail(tok, what, err);
    rc = tio_json_u64(&r->json, tok, value, err);
    if (rc < 0)
        err->what = what;
    return rc;
}

/* The serde spelling of a dtype, {"F32":null}; `name` receives the key. */
static int read_dtype_object(tio_st_reader *r, tio_json_token *name, tio_error *err)
{
    static const char what[] = "tensor entry: dtype: as an object: expected one name with null";
    tio_json_token tok;
    int rc = tio_json_next(&r->json, name, err);
    if (rc < 0)
        return rc;
    if (name->type != TIO_JSON_KEY)
        return fail(name, what, err);
    rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (tok.type != TIO_JSON_NULL)
        return fail(&tok, what, err);
    rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    return tok.type == TIO_JSON_OBJECT_END ? 0 : fail(&tok, what, err);
}

static int read_dtype(tio_st_reader *r, const tio_json_token *tok, tio_st_event *ev, tio_error *err)
{
    tio_json_token name = *tok;
    int rc = tok->type == TIO_JSON_OBJECT_BEGIN ? read_dtype_object(r, &name, err) : 0;
    if (rc < 0)
        return rc;
    if (name.type != TIO_JSON_STRING && name.type != TIO_JSON_KEY)
        return fail(tok, "tensor entry: dtype: expected a string", err);
    ev->dtype = dtype_of(&name);
    if (ev->dtype < 0)
        return tio_fail(err, TIO_UNSUPPORTED, name.offset, 0, 0, "tensor entry: dtype: unknown");
    return 0;
}

static int read_shape(tio_st_reader *r, const tio_json_token *tok, tio_st_event *ev, tio_error *err)
{
    tio_json_token item;
    ev->rank = 0;
    if (tok->type != TIO_JSON_ARRAY_BEGIN)
        return fail(tok, "tensor entry: shape: expected an array", err);
    for (;;) {
        int rc = tio_json_next(&r->json, &item, err);
        if (rc < 0)
            return rc;
        if (item.type == TIO_JSON_ARRAY_END)
            return 0;
        if (ev->rank == TIO_ST_RANK_MAX)
            return tio_fail(err, TIO_LIMIT, item.offset, TIO_ST_RANK_MAX, TIO_ST_RANK_MAX + 1,
                            "tensor entry: shape: dimensions");
        rc = read_u64(r, &item, &ev->shape[ev->rank],
                      "tensor entry: shape: expected a plain unsigned decimal below 2^64", err);
        if (rc < 0)
            return rc;
        ev->rank++;
    }
}

static int read_offset(tio_st_reader *r, uint64_t *value, tio_error *err)
{
    static const char what[] =
        "tensor entry: data_offsets: expected a plain unsigned decimal below 2^64";
    tio_json_token tok;
    int rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    return read_u64(r, &tok, value, what, err);
}

static int read_offsets(tio_st_reader *r, const tio_json_token *tok, tio_st_event *ev,
                        tio_error *err)
{
    tio_json_token last;
    int rc;
    if (tok->type != TIO_JSON_ARRAY_BEGIN)
        return fail(tok, "tensor entry: data_offsets: expected an array", err);
    if ((rc = read_offset(r, &ev->begin, err)) < 0 || (rc = read_offset(r, &ev->end, err)) < 0 ||
        (rc = tio_json_next(&r->json, &last, err)) < 0)
        return rc;
    if (last.type != TIO_JSON_ARRAY_END)
        return fail(&last, "tensor entry: data_offsets: expected exactly two numbers", err);
    return 0;
}

/* The members of an entry, in the order of its array spelling. */
#define FIELDS     3
#define FIELDS_ALL ((1u << FIELDS) - 1)

static const struct {
    const char *name;
    uint64_t len;
    int (*read)(tio_st_reader *, const tio_json_token *, tio_st_event *, tio_error *);
    const char *missing, *twice;
} fields[FIELDS] = {
    {"dtype", 5, read_dtype, "tensor entry: dtype: missing", "tensor entry: dtype: given twice"},
    {"shape", 5, read_shape, "tensor entry: shape: missing", "tensor entry: shape: given twice"},
    {"data_offsets", 12, read_offsets, "tensor entry: data_offsets: missing",
     "tensor entry: data_offsets: given twice"},
};

/* The number of the field that this key names; FIELDS for any other. */
static unsigned field_of(const tio_json_token *key)
{
    unsigned i;
    word w;
    read_word(key, &w);
    for (i = 0; i < FIELDS; i++)
        if (is_word(&w, fields[i].name, fields[i].len))
            break;
    return i;
}

/* One member, whose key has just been read; `seen` has a bit per field. */
static int read_member(tio_st_reader *r, const tio_json_token *key, unsigned *seen,
                       tio_st_event *ev, tio_error *err)
{
    tio_json_token tok;
    unsigned field = field_of(key);
    int rc;
    if (field < FIELDS && *seen & 1u << field)
        return fail(key, fields[field].twice, err);
    rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (field == FIELDS)
        return tio_json_skip(&r->json, &tok, err);
    *seen |= 1u << field;
    return fields[field].read(r, &tok, ev, err);
}

/* ["F32",[1],[0,4]], the serde spelling of an entry, behind its '['. */
static int read_entry_array(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    tio_json_token tok;
    unsigned i;
    int rc;
    for (i = 0; i < FIELDS; i++) {
        rc = tio_json_next(&r->json, &tok, err);
        if (rc < 0)
            return rc;
        if (tok.type == TIO_JSON_ARRAY_END)
            return fail(&tok, fields[i].missing, err);
        rc = fields[i].read(r, &tok, ev, err);
        if (rc < 0)
            return rc;
    }
    rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (tok.type != TIO_JSON_ARRAY_END)
        return fail(&tok, "tensor entry: as an array: expected exactly three items", err);
    return 0;
}

/* ---- one entry, the short cut ---- */

static inline int take_text(tio_cursor *c, const char *text, uint64_t len)
{
    const uint8_t *p = tio_take(c, len);
    return p != NULL && memcmp(p, text, (size_t)len) == 0;
}

#define TAKE(c, literal) take_text(c, literal, sizeof(literal) - 1)

static inline int take_char(tio_cursor *c, char wanted)
{
    if (c->pos == c->len || c->buf[c->pos] != wanted)
        return 0;
    c->pos++;
    return 1;
}

/* A plain decimal of up to 19 digits, which always fits; longer ones leave a
 * digit behind, where the caller wants something else. */
static inline int take_u64(tio_cursor *c, uint64_t *value)
{
    const uint8_t *p = c->buf + c->pos;
    uint64_t left = c->len - c->pos, n = 0, sum = 0;
    while (n < left && n < 19 && p[n] >= '0' && p[n] <= '9')
        sum = sum * 10 + (uint64_t)(p[n++] - '0');
    c->pos += n;
    *value = sum;
    return n == 1 || (n > 1 && p[0] != '0');
}

/* The name and its closing quote. */
static inline int take_dtype(tio_cursor *c, int *dtype)
{
    const uint8_t *p = c->buf + c->pos;
    uint64_t left = c->len - c->pos, n = 0;
    while (n < left && n < WORD_MAX && p[n] != '"')
        n++;
    c->pos += n;
    *dtype = find_dtype(p, n);
    return *dtype >= 0 && take_char(c, '"');
}

/* The dimensions and the closing bracket. */
static inline int take_shape(tio_cursor *c, tio_st_event *ev)
{
    unsigned rank = 0;
    ev->rank = 0;
    if (take_char(c, ']'))
        return 1;
    do {
        if (rank == TIO_ST_RANK_MAX || !take_u64(c, &ev->shape[rank]))
            return 0;
        rank++;
    } while (take_char(c, ','));
    ev->rank = rank;
    return take_char(c, ']');
}

/* All members of an entry, behind its '{', in the reference writer's spelling.
 * Returns 1 with the cursor on the '}', where the tokenizer goes on as if the
 * object were empty; or 0 with the cursor unmoved. */
static int take_members(tio_cursor *in, tio_st_event *ev)
{
    tio_cursor c = *in;
    if (!(TAKE(&c, "\"dtype\":\"") && take_dtype(&c, &ev->dtype) && TAKE(&c, ",\"shape\":[") &&
          take_shape(&c, ev) && TAKE(&c, ",\"data_offsets\":[") && take_u64(&c, &ev->begin) &&
          take_char(&c, ',') && take_u64(&c, &ev->end) && take_char(&c, ']')))
        return 0;
    if (c.pos == c.len || c.buf[c.pos] != '}')
        return 0;
    in->pos = c.pos;
    return 1;
}

/* ---- the walk ---- */

/* Behind the '{' of an entry, up to and including its '}'. */
static int read_entry_object(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    unsigned i, seen = take_members(&r->json.in, ev) ? FIELDS_ALL : 0;
    tio_json_token tok;
    for (;;) {
        int rc = tio_json_next(&r->json, &tok, err);
        if (rc < 0)
            return rc;
        if (tok.type == TIO_JSON_OBJECT_END)
            break;
        rc = read_member(r, &tok, &seen, ev, err);
        if (rc < 0)
            return rc;
    }
    for (i = 0; i < FIELDS; i++)
        if (!(seen & 1u << i))
            return fail(&tok, fields[i].missing, err);
    return 0;
}

/* The entry whose name stands in ev->name. */
static int read_entry(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    tio_json_token tok;
    int rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (tok.type == TIO_JSON_OBJECT_BEGIN)
        rc = read_entry_object(r, ev, err);
    else if (tok.type == TIO_JSON_ARRAY_BEGIN)
        rc = read_entry_array(r, ev, err);
    else
        rc = fail(&tok, "tensor entry: expected an object", err);
    if (rc < 0)
        return rc;
    ev->kind = TIO_ST_EV_TENSOR;
    return 1;
}

/* The value behind the key in ev->name. */
static int read_metadata_pair(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    int rc = tio_json_next(&r->json, &ev->value, err);
    if (rc < 0)
        return rc;
    if (ev->value.type != TIO_JSON_STRING)
        return fail(&ev->value, "__metadata__: expected a string as value", err);
    ev->kind = TIO_ST_EV_META;
    return 1;
}

/* Behind the key "__metadata__": null, or an object with its first pair. */
static int begin_metadata(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    tio_json_token tok;
    int rc;
    if (r->seen_metadata)
        return fail(&ev->name, "__metadata__: given twice", err);
    r->seen_metadata = 1;
    rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (tok.type == TIO_JSON_NULL) {
        ev->kind = TIO_ST_EV_META_NULL;
        return 1;
    }
    if (tok.type != TIO_JSON_OBJECT_BEGIN)
        return fail(&tok, "__metadata__: expected an object or null", err);
    rc = tio_json_next(&r->json, &ev->name, err);
    if (rc < 0)
        return rc;
    if (ev->name.type == TIO_JSON_OBJECT_END) {
        ev->kind = TIO_ST_EV_META_EMPTY;
        return 1;
    }
    r->phase = PHASE_METADATA;
    return read_metadata_pair(r, ev, err);
}

static int begin_header(tio_st_reader *r, tio_error *err)
{
    tio_json_token tok;
    int rc = tio_json_next(&r->json, &tok, err);
    if (rc < 0)
        return rc;
    if (tok.type != TIO_JSON_OBJECT_BEGIN)
        return fail(&tok, "header: expected an object", err);
    r->phase = PHASE_ENTRIES;
    return 0;
}

/* Behind the closing brace of the outermost object. */
static int finish_header(tio_st_reader *r, tio_error *err)
{
    tio_json_token tok;
    int rc = tio_json_next(&r->json, &tok, err);
    if (rc == 0)
        r->phase = PHASE_DONE;
    return rc;
}

static int next_event(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    int rc;
    if (r->phase == PHASE_DONE)
        return 0;
    if (r->phase == PHASE_START && (rc = begin_header(r, err)) < 0)
        return rc;
    for (;;) {
        rc = tio_json_next(&r->json, &ev->name, err);
        if (rc < 0)
            return rc;
        if (ev->name.type == TIO_JSON_KEY)
            break;
        if (r->phase == PHASE_ENTRIES)
            return finish_header(r, err);
        r->phase = PHASE_ENTRIES; /* "__metadata__" is over */
    }
    if (r->phase == PHASE_METADATA)
        return read_metadata_pair(r, ev, err);
    if (is_metadata_key(&ev->name))
        return begin_metadata(r, ev, err);
    return read_entry(r, ev, err);
}

int tio_st_open(tio_st_reader *r, const uint8_t *buf, uint64_t len, tio_error *err)
{
    tio_cursor in = tio_cursor_at(buf, len, 0);
    const uint8_t *field = tio_take(&in, LENGTH_BYTES);
    uint64_t n;
    if (field == NULL)
        return tio_fail(err, TIO_TRUNCATED, len, LENGTH_BYTES, len,
                        "header length: the file ends before it does");
    n = tio_load64(field);
    if (n > TIO_ST_HEADER_MAX)
        return tio_fail(err, TIO_LIMIT, 0, TIO_ST_HEADER_MAX, n, "header length");
    if (n > len - LENGTH_BYTES)
        return tio_fail(err, TIO_TRUNCATED, len, LENGTH_BYTES + n, len,
                        "header: the file ends before it does");
    tio_json_init(&r->json, buf + LENGTH_BYTES, n, LENGTH_BYTES);
    r->header_len = n;
    r->data_offset = LENGTH_BYTES + n;
    r->file_len = len;
    r->phase = PHASE_START;
    r->seen_metadata = 0;
    return 0;
}

int tio_st_next(tio_st_reader *r, tio_st_event *ev, tio_error *err)
{
    int rc = next_event(r, ev, err);
    if (rc == TIO_TRUNCATED) /* the text's end, which N put there */
        rc = err->code = TIO_MALFORMED;
    return rc;
}

/* ---- the rules between entries ---- */

typedef struct {
    const uint64_t *begin;
    const uint64_t *end;
} spans;

/* A total order: by begin, then end, then place in the header. */
static inline int is_before(const spans *s, uint32_t a, uint32_t b)
{
    if (s->begin[a] != s->begin[b])
        return s->begin[a] < s->begin[b];
    if (s->end[a] != s->end[b])
        return s->end[a] < s->end[b];
    return a < b;
}

/* Let order[root] sink in the heap order[0 .. n), the last in order on top. */
static void sift_down(const spans *s, uint32_t *order, uint64_t root, uint64_t n)
{
    uint32_t sinking = order[root];
    uint64_t child;
    while ((child = 2 * root + 1) < n) {
        if (child + 1 < n && is_before(s, order[child], order[child + 1]))
            child++;
        if (!is_before(s, sinking, order[child]))
            break;
        order[root] = order[child];
        root = child;
    }
    order[root] = sinking;
}

/* Heapsort: in place and never worse than n log n, whatever the file says. */
static void heap_sort(const spans *s, uint32_t *order, uint64_t n)
{
    uint64_t i;
    for (i = n / 2; i-- > 0;)
        sift_down(s, order, i, n);
    for (i = n; i-- > 1;) {
        uint32_t last = order[0];
        order[0] = order[i];
        order[i] = last;
        sift_down(s, order, 0, i);
    }
}

static void sort_by_span(const spans *s, uint32_t *order, uint64_t n)
{
    int sorted = 1;
    uint64_t i;
    for (i = 0; i < n; i++) {
        order[i] = (uint32_t)i;
        if (i > 0 && !is_before(s, order[i - 1], order[i]))
            sorted = 0;
    }
    if (!sorted)
        heap_sort(s, order, n);
}

/* One tensor, `before` being the end of its predecessor in the payload. */
static int check_span(uint64_t begin, uint64_t end, uint64_t bits, uint64_t before, tio_error *err)
{
    if (begin < before)
        return tio_fail(err, TIO_MALFORMED, 0, before, begin,
                        "tensor entry: data_offsets: overlaps the tensor before it");
    if (begin > before)
        return tio_fail(err, TIO_MALFORMED, 0, before, begin,
                        "tensor entry: data_offsets: hole behind the tensor before it");
    if (end < begin)
        return tio_fail(err, TIO_MALFORMED, 0, begin, end,
                        "tensor entry: data_offsets: end before begin");
    if (bits % 8 != 0)
        return tio_fail(err, TIO_MALFORMED, 0, 0, bits,
                        "tensor entry: shape: bits do not fill whole bytes");
    if (bits / 8 != end - begin)
        return tio_fail(err, TIO_MISMATCH, 0, bits / 8, end - begin,
                        "tensor entry: data_offsets: size differs from shape times dtype");
    return 0;
}

int tio_st_check(const uint64_t *begin, const uint64_t *end, const uint64_t *bits, uint32_t *order,
                 uint64_t n, uint64_t data_len, uint64_t *bad, tio_error *err)
{
    const spans s = {begin, end};
    uint64_t i, last = 0;

    sort_by_span(&s, order, n);
    for (i = 0; i < n; i++) {
        uint32_t t = order[i];
        int rc = check_span(begin[t], end[t], bits[t], last, err);
        if (rc < 0) {
            *bad = t;
            return rc;
        }
        last = end[t];
    }
    if (last == data_len)
        return 0;
    *bad = n;
    if (last > data_len)
        return tio_fail(err, TIO_TRUNCATED, 0, last, data_len,
                        "payload: the file ends before the last tensor does");
    return tio_fail(err, TIO_MALFORMED, 0, last, data_len, "payload: bytes behind the last tensor");
}

int tio_st_nbits(const tio_st_event *ev, uint64_t *bits, tio_error *err)
{
    uint64_t product = 1;
    unsigned i;
    for (i = 0; i < ev->rank; i++)
        if (!tio_mul(product, ev->shape[i], &product))
            break;
    if (i < ev->rank || !tio_mul(product, tio_st_dtype_bits(ev->dtype), &product))
        return tio_fail(err, TIO_MALFORMED, ev->name.offset, 0, 0,
                        "tensor entry: shape: size in bits exceeds 64 bits");
    *bits = product;
    return 0;
}

/* ---- writing ---- */

static uint64_t put_text(uint8_t *out, const char *text, uint64_t len)
{
    memcpy(out, text, (size_t)len);
    return len;
}

#define PUT(out, literal) put_text(out, literal, sizeof(literal) - 1)

static uint64_t put_u64(uint8_t *out, uint64_t value)
{
    uint8_t digits[20]; /* of 2^64 - 1 */
    uint64_t n = 0, i;
    do {
        digits[n++] = (uint8_t)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    for (i = 0; i < n; i++)
        out[i] = digits[n - 1 - i];
    return n;
}

uint64_t tio_st_entry(uint8_t *out, const uint8_t *name, uint64_t name_len, int dtype,
                      const uint64_t *shape, unsigned rank, uint64_t begin, uint64_t end)
{
    uint8_t *p = out;
    unsigned i;
    p += tio_json_quote(name, name_len, p);
    p += PUT(p, ":{\"dtype\":\"");
    p += put_text(p, dtypes[dtype].name, dtypes[dtype].len);
    p += PUT(p, "\",\"shape\":[");
    for (i = 0; i < rank; i++) {
        if (i > 0)
            *p++ = ',';
        p += put_u64(p, shape[i]);
    }
    p += PUT(p, "],\"data_offsets\":[");
    p += put_u64(p, begin);
    *p++ = ',';
    p += put_u64(p, end);
    p += PUT(p, "]}");
    return (uint64_t)(p - out);
}
