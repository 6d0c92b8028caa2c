/* SPDX-License-Identifier: Apache-2.0
 *
 * A tokenizer that is a small state machine: `state` says what the grammar
 * allows next, `kinds` which containers are open, and each call consumes one
 * token with the separator that belongs to it. Strings and numbers are checked
 * where they stand; decoding is left to the caller who wants the value.
 *
 * A text that breaks the grammar is malformed at the offending byte. A text
 * that ends while every byte so far was right is truncated, at its end.
 *
 * Sources: RFC 8259; where it leaves a choice (range of numbers, depth, lone
 * surrogates), serde_json 1.0.150.
 */
#include "json.h"

#include <float.h>

enum {
    STATE_VALUE = 0,  /* a value: at the start, behind ':' and behind ',' in an array */
    STATE_FIRST_ITEM, /* a value or ']' */
    STATE_FIRST_KEY,  /* a member's name or '}' */
    STATE_KEY,        /* a member's name: behind ',' in an object */
    STATE_VALUE_DONE  /* ',', the closing bracket or, at depth 0, the end */
};

#define END_OF_TEXT (-1) /* what peek() sees behind the last byte */

void tio_json_init(tio_json *j, const uint8_t *buf, uint64_t len, uint64_t base)
{
    j->in = tio_cursor_at(buf, len, 0);
    j->base = base;
    j->depth = 0;
    j->state = STATE_VALUE;
}

static inline int peek(const tio_cursor *in)
{
    return in->pos < in->len ? in->buf[in->pos] : END_OF_TEXT;
}

static int fail_at(const tio_json *j, uint64_t pos, const char *what, tio_error *err)
{
    return tio_fail(err, TIO_MALFORMED, j->base + pos, 0, 0, what);
}

/* The byte under the cursor is not what `what` asks for, or is missing. */
static int fail_here(const tio_json *j, const char *what, tio_error *err)
{
    if (j->in.pos == j->in.len)
        return tio_fail(err, TIO_TRUNCATED, j->base + j->in.len, 0, 0,
                        "JSON text: ends before its value is complete");
    return fail_at(j, j->in.pos, what, err);
}

static void skip_space(tio_cursor *in)
{
    for (;;) {
        int c = peek(in);
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return;
        in->pos++;
    }
}

static inline int is_digit(int c)
{
    return c >= '0' && c <= '9';
}

/* ---- strings ---- */

/* A byte that stands for itself in a string and is a whole character. */
static inline int is_plain(uint8_t c)
{
    return c >= 0x20 && c < 0x80 && c != '"' && c != '\\';
}

/* Mark, in bit 7 of each byte of `word`, the bytes that are not plain. Borrows
 * of the subtractions run only upwards from bytes that are marked themselves,
 * so the lowest mark is exact; the ones above it may not be. */
static inline uint64_t mark_not_plain(uint64_t word)
{
    const uint64_t each = 0x0101010101010101u;
    uint64_t control = word - each * 0x20;
    uint64_t quote = (word ^ each * '"') - each;
    uint64_t backslash = (word ^ each * '\\') - each;
    return (word | control | quote | backslash) & each * 0x80;
}

/* The number of plain bytes at the head of p[0 .. n). */
static inline uint64_t plain_run(const uint8_t *p, uint64_t n)
{
    uint64_t i = 0;
    while (n - i >= 8) {
        uint64_t marks = mark_not_plain(tio_load64(p + i));
        if (marks) {
#if defined(__GNUC__) || defined(__clang__)
            return i + (uint64_t)__builtin_ctzll(marks) / 8;
#else
            break;
#endif
        }
        i += 8;
    }
    while (i < n && is_plain(p[i]))
        i++;
    return i;
}

/* Bytes in the UTF-8 sequence that `lead` (>= 0x80) begins; 0 if none does. */
static unsigned utf8_length(uint8_t lead)
{
    if (lead < 0xC2 || lead > 0xF4) /* continuation, overlong; above U+10FFFF */
        return 0;
    return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* May `c` be byte i (1, 2 or 3) of the sequence that `lead` begins? The second
 * byte carries the bounds: no overlongs, no surrogates, nothing above U+10FFFF
 * (Unicode 15, table 3-7). */
static int utf8_continues(uint8_t lead, unsigned i, uint8_t c)
{
    uint8_t low = 0x80, high = 0xBF;
    if (i == 1) {
        low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : low;
        high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : high;
    }
    return c >= low && c <= high;
}

static int scan_utf8(tio_json *j, tio_error *err)
{
    static const char what[] = "JSON string: expected UTF-8";
    uint64_t start = j->in.pos;
    uint8_t lead = j->in.buf[start];
    unsigned i, length = utf8_length(lead);

    if (length == 0)
        return fail_at(j, start, what, err);
    for (i = 1; i < length; i++) {
        int c;
        j->in.pos = start + i;
        c = peek(&j->in);
        if (c == END_OF_TEXT)
            return fail_here(j, what, err);
        if (!utf8_continues(lead, i, (uint8_t)c))
            return fail_at(j, start, what, err);
    }
    j->in.pos = start + length;
    return 0;
}

static int hex_digit(int c)
{
    if (is_digit(c))
        return c - '0';
    c |= 0x20; /* to lower case; END_OF_TEXT stays negative */
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The four digits behind \u. */
static int scan_hex4(tio_json *j, unsigned *unit, tio_error *err)
{
    int i;
    *unit = 0;
    for (i = 0; i < 4; i++) {
        int digit = hex_digit(peek(&j->in));
        if (digit < 0)
            return fail_here(j, "JSON string: \\u escape: expected four hex digits", err);
        *unit = *unit << 4 | (unsigned)digit;
        j->in.pos++;
    }
    return 0;
}

static inline int is_surrogate(unsigned unit)
{
    return unit >= 0xD800 && unit <= 0xDFFF;
}

/* What \u introduces: one unit, or a high and a low surrogate in two escapes.
 * `start` is the backslash, the place to blame for a surrogate on its own. */
static int scan_unicode_escape(tio_json *j, uint64_t start, tio_error *err)
{
    static const char what[] = "JSON string: \\u escape: surrogate without its pair";
    static const char prefix[] = "\\u";
    unsigned unit, low, i;
    int rc = scan_hex4(j, &unit, err);

    if (rc < 0 || !is_surrogate(unit))
        return rc;
    if (unit >= 0xDC00)
        return fail_at(j, start, what, err);
    for (i = 0; i < 2; i++, j->in.pos++) {
        int c = peek(&j->in);
        if (c == END_OF_TEXT)
            return fail_here(j, what, err);
        if (c != prefix[i])
            return fail_at(j, start, what, err);
    }
    rc = scan_hex4(j, &low, err);
    if (rc == 0 && (low < 0xDC00 || low > 0xDFFF))
        return fail_at(j, start, what, err);
    return rc;
}

static int scan_escape(tio_json *j, tio_error *err)
{
    uint64_t start = j->in.pos++;
    switch (peek(&j->in)) {
    case '"':
    case '\\':
    case '/':
    case 'b':
    case 'f':
    case 'n':
    case 'r':
    case 't': j->in.pos++; return 0;
    case 'u': j->in.pos++; return scan_unicode_escape(j, start, err);
    default: return fail_here(j, "JSON string: unknown escape", err);
    }
}

/* From the opening quote (known to be there) to behind the closing one. */
static int scan_string(tio_json *j, tio_json_token *tok, tio_error *err)
{
    tio_cursor *in = &j->in;
    uint64_t start = ++in->pos;
    tok->escaped = 0;
    for (;;) {
        int c, rc;
        in->pos += plain_run(in->buf + in->pos, in->len - in->pos);
        c = peek(in);
        if (TIO_LIKELY(c == '"'))
            break;
        if (c == '\\') {
            tok->escaped = 1;
            rc = scan_escape(j, err);
        } else if (c >= 0x80) {
            rc = scan_utf8(j, err);
        } else {
            return fail_here(j, "JSON string: control byte below 0x20", err);
        }
        if (rc < 0)
            return rc;
    }
    tok->text = in->buf + start;
    tok->text_len = in->pos++ - start;
    return 0;
}

/* ---- numbers ---- */

/* Put one more decimal digit behind a number; 0 if it would not fit. */
static inline int append_digit(uint64_t *number, uint8_t digit)
{
    uint64_t longer;
    if (!tio_mul(*number, 10, &longer) || !tio_add(longer, (uint64_t)(digit - '0'), &longer))
        return 0;
    *number = longer;
    return 1;
}

#define DOUBLE_DIGITS 308 /* this many decimal digits are always below DBL_MAX */

/* digits * 10^scale in range of a double? serde_json multiplies a u64 by a
 * rounded power of ten and refuses infinity, so 1.7976931348623158e308, which
 * a correctly rounding parser still takes, is out. Below 10^289 no u64 can
 * reach DBL_MAX. */
static int product_is_finite(uint64_t digits, int64_t scale)
{
    static const double power[] = {1e289, 1e290, 1e291, 1e292, 1e293, 1e294, 1e295,
                                   1e296, 1e297, 1e298, 1e299, 1e300, 1e301, 1e302,
                                   1e303, 1e304, 1e305, 1e306, 1e307, 1e308};
    double product;
    if (digits == 0 || scale < 289)
        return 1;
    if (scale > 308)
        return 0;
    product = (double)digits * power[scale - 289];
    return product <= DBL_MAX;
}

/* The exponent's digits with their sign, held within an int32. */
static int64_t exponent_value(const uint8_t *p, const uint8_t *end)
{
    int negative = p < end && *p == '-';
    int64_t value = 0;
    if (p < end && (*p == '-' || *p == '+'))
        p++;
    for (; p < end && value < INT32_MAX; p++)
        value = value * 10 + (*p - '0');
    if (value > INT32_MAX)
        value = INT32_MAX;
    return negative ? -value : value;
}

/* Does this number, valid in form, fit a double as serde_json reads it? It
 * gathers leading digits while they fit a u64 and drops the rest. */
static int number_in_range(const uint8_t *p, const uint8_t *end)
{
    uint64_t digits = 0;
    int64_t scale = 0;
    int full = 0, fraction = 0;

    if (*p == '-')
        p++;
    for (; p < end && *p != 'e' && *p != 'E'; p++) {
        if (*p == '.') {
            fraction = 1;
        } else if (!full && append_digit(&digits, *p)) {
            scale -= fraction;
        } else {
            full = 1;
            scale += !fraction;
        }
    }
    if (p < end)
        scale += exponent_value(p + 1, end);
    return product_is_finite(digits, scale);
}

/* At least one digit, and all that follow. */
static int scan_digits(tio_json *j, const char *what, tio_error *err)
{
    if (!is_digit(peek(&j->in)))
        return fail_here(j, what, err);
    do
        j->in.pos++;
    while (is_digit(peek(&j->in)));
    return 0;
}

static int scan_integer(tio_json *j, tio_error *err)
{
    if (peek(&j->in) != '0')
        return scan_digits(j, "JSON number: expected a digit", err);
    j->in.pos++;
    if (is_digit(peek(&j->in)))
        return fail_here(j, "JSON number: leading zero", err);
    return 0;
}

static int scan_fraction(tio_json *j, tio_error *err)
{
    if (peek(&j->in) != '.')
        return 0;
    j->in.pos++;
    return scan_digits(j, "JSON number: expected a digit behind the point", err);
}

static int scan_exponent(tio_json *j, int *present, tio_error *err)
{
    int c = peek(&j->in);
    *present = c == 'e' || c == 'E';
    if (!*present)
        return 0;
    j->in.pos++;
    c = peek(&j->in);
    if (c == '+' || c == '-')
        j->in.pos++;
    return scan_digits(j, "JSON number: expected a digit in the exponent", err);
}

static int scan_number(tio_json *j, tio_json_token *tok, tio_error *err)
{
    uint64_t start = j->in.pos;
    int has_exponent, rc;

    if (peek(&j->in) == '-')
        j->in.pos++;
    if ((rc = scan_integer(j, err)) < 0 || (rc = scan_fraction(j, err)) < 0 ||
        (rc = scan_exponent(j, &has_exponent, err)) < 0)
        return rc;

    tok->type = TIO_JSON_NUMBER;
    tok->text = j->in.buf + start;
    tok->text_len = j->in.pos - start;
    if ((has_exponent || tok->text_len > DOUBLE_DIGITS) &&
        !number_in_range(tok->text, tok->text + tok->text_len))
        return fail_at(j, start, "JSON number: out of range of a double", err);
    return 1;
}

/* ---- structure ---- */

/* `word` is "true", "false" or "null", whose first letter has been seen. */
static int scan_word(tio_json *j, const char *word, int type, tio_json_token *tok, tio_error *err)
{
    for (; *word; word++, j->in.pos++)
        if (peek(&j->in) != *word)
            return fail_here(j, "JSON value: expected true, false or null", err);
    tok->type = type;
    return 1;
}

static int open_container(tio_json *j, uint8_t kind, tio_json_token *tok, tio_error *err)
{
    if (j->depth == TIO_JSON_DEPTH)
        return tio_fail(err, TIO_LIMIT, j->base + j->in.pos, TIO_JSON_DEPTH, TIO_JSON_DEPTH + 1,
                        "JSON text: nested containers");
    j->in.pos++;
    j->kinds[j->depth++] = kind;
    j->state = kind == '{' ? STATE_FIRST_KEY : STATE_FIRST_ITEM;
    tok->type = kind == '{' ? TIO_JSON_OBJECT_BEGIN : TIO_JSON_ARRAY_BEGIN;
    return 1;
}

static inline int in_object(const tio_json *j)
{
    return j->kinds[j->depth - 1] == '{';
}

static inline int at_closing_bracket(const tio_json *j)
{
    return peek(&j->in) == (in_object(j) ? '}' : ']');
}

static int close_container(tio_json *j, tio_json_token *tok)
{
    tok->type = in_object(j) ? TIO_JSON_OBJECT_END : TIO_JSON_ARRAY_END;
    j->in.pos++;
    j->depth--;
    j->state = STATE_VALUE_DONE;
    return 1;
}

/* A member's name, with the ':' that follows. */
static int scan_key(tio_json *j, tio_json_token *tok, tio_error *err)
{
    int rc;
    if (peek(&j->in) != '"')
        return fail_here(j, "JSON object: expected a member's name", err);
    if ((rc = scan_string(j, tok, err)) < 0)
        return rc;
    skip_space(&j->in);
    if (peek(&j->in) != ':')
        return fail_here(j, "JSON object: expected ':'", err);
    j->in.pos++;
    j->state = STATE_VALUE;
    tok->type = TIO_JSON_KEY;
    return 1;
}

static int scan_value(tio_json *j, tio_json_token *tok, tio_error *err)
{
    int rc, c = peek(&j->in);
    j->state = STATE_VALUE_DONE;
    switch (c) {
    case '{':
    case '[': return open_container(j, (uint8_t)c, tok, err);
    case '"':
        tok->type = TIO_JSON_STRING;
        rc = scan_string(j, tok, err);
        return rc < 0 ? rc : 1;
    case 't': return scan_word(j, "true", TIO_JSON_TRUE, tok, err);
    case 'f': return scan_word(j, "false", TIO_JSON_FALSE, tok, err);
    case 'n': return scan_word(j, "null", TIO_JSON_NULL, tok, err);
    default:
        if (c == '-' || is_digit(c))
            return scan_number(j, tok, err);
        return fail_here(j, "JSON text: expected a value", err);
    }
}

/* Behind the outermost value nothing may follow. */
static int scan_end(tio_json *j, tio_json_token *tok, tio_error *err)
{
    if (j->in.pos != j->in.len)
        return fail_here(j, "JSON text: bytes behind its value", err);
    tok->type = TIO_JSON_END;
    return 0;
}

int tio_json_next(tio_json *j, tio_json_token *tok, tio_error *err)
{
    skip_space(&j->in);
    tok->offset = j->base + j->in.pos;

    if (j->state == STATE_VALUE_DONE) {
        if (j->depth == 0)
            return scan_end(j, tok, err);
        if (at_closing_bracket(j))
            return close_container(j, tok);
        if (peek(&j->in) != ',')
            return fail_here(j,
                             in_object(j) ? "JSON object: expected ',' or '}'"
                                          : "JSON array: expected ',' or ']'",
                             err);
        j->in.pos++;
        j->state = in_object(j) ? STATE_KEY : STATE_VALUE;
        skip_space(&j->in);
        tok->offset = j->base + j->in.pos;
    } else if (j->state == STATE_FIRST_KEY || j->state == STATE_FIRST_ITEM) {
        if (at_closing_bracket(j))
            return close_container(j, tok);
    }
    if (j->state == STATE_KEY || j->state == STATE_FIRST_KEY)
        return scan_key(j, tok, err);
    return scan_value(j, tok, err);
}

int tio_json_skip(tio_json *j, const tio_json_token *tok, tio_error *err)
{
    int outside = j->depth - 1;
    tio_json_token inner;
    if (tok->type != TIO_JSON_OBJECT_BEGIN && tok->type != TIO_JSON_ARRAY_BEGIN)
        return 0;
    while (j->depth > outside) {
        int rc = tio_json_next(j, &inner, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- values ---- */

static uint64_t put_utf8(uint8_t *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (uint8_t)(0xC0 | code >> 6);
        out[1] = (uint8_t)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (uint8_t)(0xE0 | code >> 12);
        out[1] = (uint8_t)(0x80 | (code >> 6 & 0x3F));
        out[2] = (uint8_t)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | code >> 18);
    out[1] = (uint8_t)(0x80 | (code >> 12 & 0x3F));
    out[2] = (uint8_t)(0x80 | (code >> 6 & 0x3F));
    out[3] = (uint8_t)(0x80 | (code & 0x3F));
    return 4;
}

static uint32_t hex4_value(const uint8_t *p)
{
    uint32_t value = 0;
    int i;
    for (i = 0; i < 4; i++)
        value = value << 4 | (uint32_t)hex_digit(p[i]);
    return value;
}

/* The code point of the \u escape (or pair of them) at p, whose length goes
 * to *used; at least 6 bytes are left. */
static uint32_t unicode_escape_value(const uint8_t *p, uint64_t left, uint64_t *used)
{
    uint32_t unit = hex4_value(p + 2);
    *used = 6;
    if (!is_surrogate(unit) || left < 12)
        return unit;
    *used = 12;
    return 0x10000 + ((unit - 0xD800) << 10) + (hex4_value(p + 8) - 0xDC00);
}

static uint8_t short_escape_value(uint8_t letter)
{
    switch (letter) {
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    default: return letter; /* '"', '\\', '/' */
    }
}

uint64_t tio_json_unescape(const tio_json_token *tok, uint8_t *out)
{
    const uint8_t *p = tok->text;
    uint64_t i = 0, n = 0, left, used;
    /* The text was checked, but in a mapped file another process may have written since: an escape that is cut off
     * by the end of the token is taken as it stands, and none becomes longer than it is. */
    while (i < tok->text_len) {
        left = tok->text_len - i;
        if (p[i] != '\\' || left < 2) {
            out[n++] = p[i++];
        } else if (p[i + 1] != 'u' || left < 6) {
            out[n++] = short_escape_value(p[i + 1]);
            i += 2;
        } else {
            n += put_utf8(out + n, unicode_escape_value(p + i, left, &used));
            i += used;
        }
    }
    return n;
}

int tio_json_u64(const tio_json *j, const tio_json_token *tok, uint64_t *value, tio_error *err)
{
    uint64_t i, sum = 0;
    (void)j; /* the token's offset already counts from the file's start */
    for (i = 0; i < tok->text_len; i++) {
        uint8_t c = tok->text[i];
        if (!is_digit(c))
            return tio_fail(err, TIO_MALFORMED, tok->offset + i, 0, 0,
                            "JSON number: expected a plain unsigned decimal");
        if (!append_digit(&sum, c))
            return tio_fail(err, TIO_MALFORMED, tok->offset, 0, 0,
                            "JSON number: expected a plain unsigned decimal below 2^64");
    }
    *value = sum;
    return 0;
}

static uint64_t put_escape(uint8_t *out, uint8_t c)
{
    static const char letters[] = "btn?fr"; /* from '\b' (8) on; 11 has none */
    static const char hex[] = "0123456789abcdef";
    out[0] = '\\';
    if (c == '"' || c == '\\') {
        out[1] = c;
        return 2;
    }
    if (c >= '\b' && c <= '\r' && c != '\v') {
        out[1] = (uint8_t)letters[c - '\b'];
        return 2;
    }
    memcpy(out + 1, "u00", 3);
    out[4] = (uint8_t)hex[c >> 4];
    out[5] = (uint8_t)hex[c & 15];
    return 6;
}

uint64_t tio_json_quote(const uint8_t *text, uint64_t len, uint8_t *out)
{
    uint64_t i = 0, n = 0, run;
    out[n++] = '"';
    while (i < len) {
        run = plain_run(text + i, len - i);
        memcpy(out + n, text + i, (size_t)run);
        n += run;
        i += run;
        if (i == len)
            break;
        if (text[i] >= 0x80)
            out[n++] = text[i];
        else
            n += put_escape(out + n, text[i]);
        i++;
    }
    out[n++] = '"';
    return n;
}
