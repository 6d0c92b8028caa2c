/* SPDX-License-Identifier: Apache-2.0
 *
 * The JSON tokenizer: what it reads, and at which byte it stops reading.
 *
 * Texts are written with ' for " and ` for \, so that a caret in the line
 * below stands exactly under the byte it means. Every text is copied to a block
 * of its own size, so that a sanitizer sees a read too many.
 */
#include <stdlib.h>

#include "check.h"
#include "json.h"

#define BASE 1000 /* a file offset for the first byte: errors must count from it */

typedef struct {
    uint8_t *bytes;
    uint64_t len;
} block;

static block copy_of(const void *bytes, uint64_t len)
{
    block b = {malloc((size_t)(len ? len : 1)), len};
    if (b.bytes == NULL)
        abort();
    if (len)
        memcpy(b.bytes, bytes, (size_t)len);
    return b;
}

static block text_block(const char *written)
{
    block b = copy_of(written, strlen(written));
    uint64_t i;
    for (i = 0; i < b.len; i++) {
        if (b.bytes[i] == '\'')
            b.bytes[i] = '"';
        else if (b.bytes[i] == '`')
            b.bytes[i] = '\\';
    }
    return b;
}

/* Read to the end; 0, or the error's code. */
static int read_all(block b, tio_error *err)
{
    tio_json j;
    tio_json_token tok;
    int rc;
    memset(err, 0, sizeof *err);
    tio_json_init(&j, b.bytes, b.len, BASE);
    while ((rc = tio_json_next(&j, &tok, err)) == 1)
        ;
    return rc;
}

static void accepted(const char *written)
{
    tio_error err;
    block b = text_block(written);
    if (!CHECK(read_all(b, &err) == 0))
        printf("  refused: %s at %d: %s\n", written, (int)(err.offset - BASE), err.what);
    free(b.bytes);
}

/* `caret` is blanks and a ^ under the offending byte. */
static void refused(const char *written, const char *caret, int code)
{
    tio_error err;
    block b = text_block(written);
    int rc = read_all(b, &err);
    if (!CHECK(rc == code && err.code == code && err.offset == BASE + strlen(caret) - 1))
        printf("  %s\n  %s wanted %s, got %s at %d\n", written, caret, tio_code_name(code),
               tio_code_name(rc), (int)(err.offset - BASE));
    CHECK(err.what != NULL);
    free(b.bytes);
}

/* ---- what is read ---- */

/* One character per token; keys, strings and numbers bring their text. */
static void reads(const char *written, const char *wanted)
{
    static const char marks[] = ".{}[]:\"#tfn";
    char got[256] = "";
    size_t n = 0;
    block b = text_block(written);
    tio_json j;
    tio_json_token tok;
    tio_error err;
    int rc;
    tio_json_init(&j, b.bytes, b.len, BASE);
    while ((rc = tio_json_next(&j, &tok, &err)) == 1 && n < 200) {
        got[n++] = marks[tok.type];
        if (tok.type == TIO_JSON_KEY || tok.type == TIO_JSON_STRING ||
            tok.type == TIO_JSON_NUMBER) {
            memcpy(got + n, tok.text, (size_t)tok.text_len);
            n += (size_t)tok.text_len;
        }
        got[n++] = ' ';
    }
    if (!CHECK(rc == 0 && tok.type == TIO_JSON_END && n == strlen(wanted) &&
               memcmp(got, wanted, n) == 0))
        printf("  %s\n  wanted %s\n  got    %.*s\n", written, wanted, (int)n, got);
    free(b.bytes);
}

static void test_tokens(void)
{
    reads("{}", "{ } ");
    reads("[]", "[ ] ");
    reads("null", "n ");
    reads(" \t\r\n'x' \t\r\n", "\"x ");
    reads("{'a':1,'b':[true,false,null],'c':{'d':'e'}}", "{ :a #1 :b [ t f n ] :c { :d \"e } } ");
    reads(" { 'a' : 1 , 'b' : [ ] } ", "{ :a #1 :b [ ] } ");
    reads("[-0,0,10,-1.5e+3,0E0]", "[ #-0 #0 #10 #-1.5e+3 #0E0 ] ");
    reads("''", "\" ");
    reads("{'':''}", "{ : \" } ");
    reads("{'a':1,'a':2}", "{ :a #1 :a #2 } "); /* duplicates are the caller's */
}

static void test_token_places(void)
{
    block b = text_block("{ 'a`n' :[ 12,'x'] }");
    /*                    0 2       9 11 14      */
    static const int offsets[] = {0, 2, 9, 11, 14, 17, 19};
    tio_json j;
    tio_json_token tok;
    tio_error err;
    size_t i;
    tio_json_init(&j, b.bytes, b.len, BASE);
    for (i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        CHECK(tio_json_next(&j, &tok, &err) == 1);
        CHECK(tok.offset == BASE + (uint64_t)offsets[i]);
        if (tok.type == TIO_JSON_KEY)
            CHECK(tok.escaped && tok.text == b.bytes + 3 && tok.text_len == 3);
        if (tok.type == TIO_JSON_STRING)
            CHECK(!tok.escaped && tok.text_len == 1);
    }
    CHECK(tio_json_next(&j, &tok, &err) == 0);
    CHECK(tok.type == TIO_JSON_END && tok.offset == BASE + b.len);
    CHECK(tio_json_next(&j, &tok, &err) == 0); /* and stays there */
    free(b.bytes);
}

/* ---- what is refused ---- */

static void test_structure_refused(void)
{
    refused("}", "^", TIO_MALFORMED);
    refused("{} x", "   ^", TIO_MALFORMED);
    refused("{}{}", "  ^", TIO_MALFORMED);
    refused("1,", " ^", TIO_MALFORMED);
    refused("[1,]", "   ^", TIO_MALFORMED);
    refused("[,1]", " ^", TIO_MALFORMED);
    refused("[1 2]", "   ^", TIO_MALFORMED);
    refused("[1}", "  ^", TIO_MALFORMED);
    refused("{'a':1]", "      ^", TIO_MALFORMED);
    refused("{'a':1,}", "       ^", TIO_MALFORMED);
    refused("{,}", " ^", TIO_MALFORMED);
    refused("{a:1}", " ^", TIO_MALFORMED);
    refused("{1:1}", " ^", TIO_MALFORMED);
    refused("{'a' 1}", "     ^", TIO_MALFORMED);
    refused("{'a'}", "    ^", TIO_MALFORMED);
    refused("{'a':}", "     ^", TIO_MALFORMED);
    refused("{'a'::1}", "     ^", TIO_MALFORMED);
    refused("{'a':1 'b':2}", "       ^", TIO_MALFORMED);
    refused("[1]//", "   ^", TIO_MALFORMED);
    refused("\v[]", "^", TIO_MALFORMED);
    refused("\xEF\xBB\xBF{}", /* a byte order mark */
            "^", TIO_MALFORMED);
    refused("[\xC2\xA0]", /* a no-break space */
            " ^", TIO_MALFORMED);
}

static void test_words_refused(void)
{
    refused("nulx", "   ^", TIO_MALFORMED);
    refused("nullx", "    ^", TIO_MALFORMED);
    refused("True", "^", TIO_MALFORMED);
    refused("[trUe]", "   ^", TIO_MALFORMED);
    refused("fals ", "    ^", TIO_MALFORMED);
    refused("NaN", "^", TIO_MALFORMED);
    refused("-Infinity", " ^", TIO_MALFORMED);
}

static void test_numbers_refused(void)
{
    refused("01", " ^", TIO_MALFORMED);
    refused("-01", "  ^", TIO_MALFORMED);
    refused("[00]", "  ^", TIO_MALFORMED);
    refused("+1", "^", TIO_MALFORMED);
    refused("[-]", "  ^", TIO_MALFORMED);
    refused("--1", " ^", TIO_MALFORMED);
    refused("[.5]", " ^", TIO_MALFORMED);
    refused("[1.]", "   ^", TIO_MALFORMED);
    refused("[1.e1]", "   ^", TIO_MALFORMED);
    refused("[1e]", "   ^", TIO_MALFORMED);
    refused("[1e+]", "    ^", TIO_MALFORMED);
    refused("[1e+-1]", "    ^", TIO_MALFORMED);
    refused("[1.2.3]", "    ^", TIO_MALFORMED);
    refused("0x10", " ^", TIO_MALFORMED);
    refused("[1_000]", "  ^", TIO_MALFORMED);
}

/* Each row stands on a boundary of what serde_json 1.0.150 takes. */
static void test_number_range(void)
{
    accepted("1e308");
    accepted("1.7976931348623157e308");
    refused("[1.7976931348623158e308]", /* rounds to DBL_MAX, but not in serde */
            " ^", TIO_MALFORMED);
    accepted("17976931348623157e292");
    refused("[-17976931348623158e292]", " ^", TIO_MALFORMED);
    accepted("0.1e309");
    refused("[1e309]", " ^", TIO_MALFORMED);
    refused("[0.10e310]", " ^", TIO_MALFORMED);
    refused("[ 1e999 ]", "  ^", TIO_MALFORMED);
    refused("1e2147483647", "^", TIO_MALFORMED);
    refused("1e99999999999999999999", "^", TIO_MALFORMED);
    accepted("0e99999999999999999999");
    accepted("0.000e999");
    accepted("1e-99999999999999999999");
    accepted("18446744073709551615e288");
    refused("18446744073709551615e289", "^", TIO_MALFORMED);
    accepted("99999999999999999999e288"); /* digits past a u64 are dropped */
    accepted("1.7000000000000000000000000e308");
    accepted("1e0000000000000000000308");
}

/* A digit and `zeros` zeros, with `tail` behind them. */
static int read_long_number(unsigned zeros, const char *tail)
{
    char text[512];
    tio_error err;
    block b;
    int rc;
    text[0] = '1';
    memset(text + 1, '0', zeros);
    strcpy(text + 1 + zeros, tail);
    b = copy_of(text, strlen(text));
    rc = read_all(b, &err);
    free(b.bytes);
    return rc;
}

/* 0.00..01, with `zeros` zeros behind the point, times 10^exponent. */
static int read_small_number(unsigned zeros, unsigned exponent)
{
    size_t room = zeros + 16;
    char *text = malloc(room);
    tio_error err;
    block b;
    int rc;
    if (text == NULL)
        abort();
    memcpy(text, "0.", 2);
    memset(text + 2, '0', zeros);
    snprintf(text + 2 + zeros, room - 2 - zeros, "1e%u", exponent);
    b = copy_of(text, strlen(text));
    rc = read_all(b, &err);
    free(b.bytes);
    free(text);
    return rc;
}

static void test_long_numbers(void)
{
    CHECK(read_small_number(0, 309) == 0);
    CHECK(read_small_number(0, 310) == TIO_MALFORMED);
    CHECK(read_small_number(123456, 123456 + 309) == 0);
    CHECK(read_small_number(123456, 123456 + 310) == TIO_MALFORMED);
    CHECK(read_long_number(307, "") == 0);
    CHECK(read_long_number(308, "") == 0);
    CHECK(read_long_number(309, "") == TIO_MALFORMED);
    CHECK(read_long_number(309, ".0") == TIO_MALFORMED);
    CHECK(read_long_number(309, "e-1") == 0);
    CHECK(read_long_number(300, "e8") == 0);
    CHECK(read_long_number(300, "e9") == TIO_MALFORMED);
    CHECK(read_long_number(400, "e-92") == 0);
    CHECK(read_long_number(400, "e-91") == TIO_MALFORMED);
}

static void test_strings_refused(void)
{
    refused("'a\x1F'", "  ^", TIO_MALFORMED);
    refused("'abcdefgh\n'", "         ^", TIO_MALFORMED);
    refused("'`x'", "  ^", TIO_MALFORMED);
    refused("'`U0041'", "  ^", TIO_MALFORMED);
    refused("'`u00g0'", "     ^", TIO_MALFORMED);
    refused("'`u004'", "      ^", TIO_MALFORMED);
    refused("'ab`ud800'", "   ^", TIO_MALFORMED);
    refused("'ab`udc00'", "   ^", TIO_MALFORMED);
    refused("'`udc00`udc00'", " ^", TIO_MALFORMED);
    refused("'`ud800`n'", " ^", TIO_MALFORMED);
    refused("'`ud800x'", " ^", TIO_MALFORMED);
    refused("'`ud800`ud800'", " ^", TIO_MALFORMED);
    refused("'`ud800`u0041'", " ^", TIO_MALFORMED);
    refused("'`ud800`uzzzz'", "         ^", TIO_MALFORMED);
    refused("{'a\t':1}", "   ^", TIO_MALFORMED);
}

static void test_strings_accepted(void)
{
    accepted("'`'`` / `/ `b`f`n`r`t `u0000 `uAbCd `ud83d`ude00'");
    accepted("'\x7F'");
    accepted("'\xC2\x80 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF'");
    accepted("'\xF0\x90\x80\x80 \xF4\x8F\xBF\xBF'");
}

/* Every byte at every place of a string that spans the 8-byte steps. */
static void test_every_byte_at_every_place(void)
{
    unsigned c, at;
    for (at = 0; at < 19; at++) {
        for (c = 0; c < 256; c++) {
            uint8_t text[21];
            tio_error err;
            block b;
            int rc;
            memset(text, 'a', sizeof text);
            text[0] = text[20] = '"';
            text[1 + at] = (uint8_t)c;
            b = copy_of(text, sizeof text);
            rc = read_all(b, &err);
            if (c < 0x20 || c >= 0x80)
                CHECK(rc == TIO_MALFORMED && err.offset == BASE + 1 + at);
            else if (c == '"' || c == '\\')
                CHECK(rc < 0);
            else
                CHECK(rc == 0);
            free(b.bytes);
        }
    }
}

/* Is this UTF-8? By decoding and asking whether the shortest form of a legal
 * code point was used: another way than the tokenizer's. */
static int is_utf8(const uint8_t *p, unsigned n)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t code = p[0] & (0xFFu >> (n + 1));
    unsigned i;
    if ((p[0] & (0xFF00u >> n & 0xFF)) != (0xFF00u >> n & 0xFF) || p[0] & (0x80u >> n))
        return 0;
    for (i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (p[i] & 0x3Fu);
    }
    return code >= least[n] && code <= 0x10FFFF && !(code >= 0xD800 && code <= 0xDFFF);
}

static void check_utf8(const uint8_t *sequence, unsigned n)
{
    uint8_t text[8];
    tio_error err;
    block b;
    int rc;
    text[0] = text[n + 1] = '"';
    memcpy(text + 1, sequence, n);
    b = copy_of(text, n + 2);
    rc = read_all(b, &err);
    if (is_utf8(sequence, n))
        CHECK(rc == 0);
    else
        CHECK(rc == TIO_MALFORMED && err.offset == BASE + 1);
    free(b.bytes);
}

/* All leads with all second bytes, and the edges of the bytes behind. */
static void test_every_utf8_sequence(void)
{
    static const uint8_t edges[] = {0x22, 0x7F, 0x80, 0xBF, 0xC0};
    unsigned lead, second, i, k;
    for (lead = 0x80; lead < 256; lead++) {
        for (second = 0; second < 256; second++) {
            uint8_t s[4] = {(uint8_t)lead, (uint8_t)second, 0x80, 0x80};
            if (lead < 0xE0 && second != '"')
                check_utf8(s, 2);
            for (i = 0; i < sizeof edges && lead >= 0xE0; i++) {
                s[2] = edges[i];
                if (lead < 0xF0)
                    check_utf8(s, 3);
                for (k = 0; k < sizeof edges && lead >= 0xF0; k++) {
                    s[3] = edges[k];
                    check_utf8(s, 4);
                }
            }
        }
    }
}

/* ---- ends ---- */

static void test_cut_anywhere_is_truncated(void)
{
    block whole = text_block(" {'k`u00e9`ud83d`ude00\xF0\x9F\x98\x80' : [-1.5e+3, true, false, "
                             "null, {}, [], 'x`n']}");
    uint64_t n;
    for (n = 0; n < whole.len; n++) {
        block b = copy_of(whole.bytes, n);
        tio_error err;
        CHECK(read_all(b, &err) == TIO_TRUNCATED && err.offset == BASE + n);
        free(b.bytes);
    }
    free(whole.bytes);
    refused("", "^", TIO_TRUNCATED);
    refused("  ", "  ^", TIO_TRUNCATED);
    refused("-", " ^", TIO_TRUNCATED);
}

static block nested(int depth, char open, char close)
{
    uint8_t text[512];
    memset(text, open, (size_t)depth);
    memset(text + depth, close, (size_t)depth);
    return copy_of(text, 2 * (uint64_t)depth);
}

static void test_depth(void)
{
    tio_error err;
    block most = nested(TIO_JSON_DEPTH, '[', ']');
    block more = nested(TIO_JSON_DEPTH + 1, '[', ']');
    CHECK(TIO_JSON_DEPTH == 127);
    CHECK(read_all(most, &err) == 0);
    CHECK(read_all(more, &err) == TIO_LIMIT);
    CHECK(err.offset == BASE + TIO_JSON_DEPTH && err.want == 127 && err.got == 128);
    free(most.bytes);
    free(more.bytes);
}

/* ---- values ---- */

static void test_skip(void)
{
    block b = text_block("{'a':[1,{'b':[]}],'c':'d','e':{}}");
    static const int left[] = {TIO_JSON_KEY, TIO_JSON_KEY, TIO_JSON_KEY, TIO_JSON_OBJECT_END};
    tio_json j;
    tio_json_token tok;
    tio_error err;
    size_t i;
    tio_json_init(&j, b.bytes, b.len, BASE);
    CHECK(tio_json_next(&j, &tok, &err) == 1 && tok.type == TIO_JSON_OBJECT_BEGIN);
    for (i = 0; i < 4; i++) {
        CHECK(tio_json_next(&j, &tok, &err) == 1 && tok.type == left[i]);
        if (tok.type == TIO_JSON_KEY) {
            CHECK(tio_json_next(&j, &tok, &err) == 1);
            CHECK(tio_json_skip(&j, &tok, &err) == 0);
        }
    }
    CHECK(tio_json_next(&j, &tok, &err) == 0);
    free(b.bytes);
}

static void test_skip_checks_what_it_skips(void)
{
    block b = text_block("[[1,[01]]]");
    /*                          ^      */
    tio_json j;
    tio_json_token tok;
    tio_error err;
    tio_json_init(&j, b.bytes, b.len, BASE);
    CHECK(tio_json_next(&j, &tok, &err) == 1);
    CHECK(tio_json_skip(&j, &tok, &err) == TIO_MALFORMED && err.offset == BASE + 6);
    free(b.bytes);
}

static void unescapes(const char *written, const char *wanted, uint64_t wanted_len)
{
    block b = text_block(written);
    uint8_t *out;
    tio_json j;
    tio_json_token tok;
    tio_error err;
    tio_json_init(&j, b.bytes, b.len, BASE);
    if (CHECK(tio_json_next(&j, &tok, &err) == 1)) {
        out = copy_of(tok.text, tok.text_len).bytes; /* as large as may be needed, no more */
        CHECK(tio_json_unescape(&tok, out) == wanted_len &&
              memcmp(out, wanted, (size_t)wanted_len) == 0);
        free(out);
    }
    free(b.bytes);
}

static void test_unescape(void)
{
    unescapes("''", "", 0);
    unescapes("'plain'", "plain", 5);
    unescapes("'`'`'`'`'`'`'`''", "\"\"\"\"\"\"\"", 7);
    unescapes("'`'```/`b`f`n`r`t'", "\"\\/\b\f\n\r\t", 8);
    unescapes("'a`u0000b'", "a\0b", 3);
    unescapes("'`u007f`u0080`u07ff`u0800`uFFFF'", "\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF",
              11);
    unescapes("'`ud800`udc00`uDBFF`uDFFF'", "\xF0\x90\x80\x80\xF4\x8F\xBF\xBF", 8);
    unescapes("'\xC3\xA9`u00e9'", "\xC3\xA9\xC3\xA9", 4);
}

/* What a token may have become if its file was written to after it was checked: never read or written past its end. */
static void cut_off(const char *text, uint64_t wanted_len)
{
    uint64_t len = strlen(text);
    uint8_t *in = copy_of(text, len).bytes, *out = copy_of(text, len).bytes;
    tio_json_token tok;
    memset(&tok, 0, sizeof tok);
    tok.text = in;
    tok.text_len = len;
    CHECK(tio_json_unescape(&tok, out) == wanted_len);
    free(in);
    free(out);
}

static void test_unescape_what_changed(void)
{
    cut_off("\\", 1);
    cut_off("a\\u", 2);
    cut_off("\\u00e", 4);
    cut_off("\\ud800", 3);
    cut_off("\\ud800\\udc0", 7);
    cut_off("\\uzzzz", 4);
    cut_off("\\ud800\\uzzzz", 3);
}

static int u64_of(const char *written, uint64_t *value, tio_error *err)
{
    block b = text_block(written);
    tio_json j;
    tio_json_token tok;
    int rc;
    tio_json_init(&j, b.bytes, b.len, BASE);
    CHECK(tio_json_next(&j, &tok, err) == 1 && tok.type == TIO_JSON_NUMBER);
    rc = tio_json_u64(&j, &tok, value, err);
    free(b.bytes);
    return rc;
}

static void no_u64(const char *written, const char *caret)
{
    uint64_t value = 7;
    tio_error err;
    CHECK(u64_of(written, &value, &err) == TIO_MALFORMED);
    CHECK(value == 7 && err.offset == BASE + strlen(caret) - 1);
}

static void test_u64(void)
{
    uint64_t value;
    tio_error err;
    CHECK(u64_of("0", &value, &err) == 0 && value == 0);
    CHECK(u64_of("4096", &value, &err) == 0 && value == 4096);
    CHECK(u64_of("18446744073709551615", &value, &err) == 0 && value == UINT64_MAX);
    no_u64("18446744073709551616", "^");
    no_u64("99999999999999999999", "^");
    no_u64("100000000000000000000", "^");
    no_u64("-0", "^");
    no_u64("-1", "^");
    no_u64("12.0", "  ^");
    no_u64("12e0", "  ^");
}

static void quotes(const char *text, uint64_t len, const char *written)
{
    block in = copy_of(text, len), wanted = text_block(written);
    uint8_t *out = malloc((size_t)wanted.len);
    if (out == NULL)
        abort();
    CHECK(tio_json_quote(in.bytes, len, out) == wanted.len &&
          memcmp(out, wanted.bytes, (size_t)wanted.len) == 0);
    free(out);
    free(in.bytes);
    free(wanted.bytes);
}

static void test_quote(void)
{
    tio_error err;
    uint8_t all[0x80], out[6 * 0x80 + 2], back[6 * 0x80];
    tio_json_token tok;
    tio_json j;
    unsigned i;

    quotes("", 0, "''");
    quotes("layer.0.weight", 14, "'layer.0.weight'");
    quotes("\"\\/", 3, "'`'``/'");
    quotes("\b\t\n\f\r", 5, "'`b`t`n`f`r'");
    quotes("\0\x01\v\x1F", 4, "'`u0000`u0001`u000b`u001f'");
    quotes("\x7F\xC3\xA9\xE2\x80\xA8", 6, "'\x7F\xC3\xA9\xE2\x80\xA8'");

    for (i = 0; i < sizeof all; i++)
        all[i] = (uint8_t)i;
    tio_json_init(&j, out, tio_json_quote(all, sizeof all, out), BASE);
    CHECK(tio_json_next(&j, &tok, &err) == 1 && tok.type == TIO_JSON_STRING);
    CHECK(tio_json_unescape(&tok, back) == sizeof all && memcmp(back, all, sizeof all) == 0);
    CHECK(tio_json_next(&j, &tok, &err) == 0);
}

int main(void)
{
    test_tokens();
    test_token_places();
    test_structure_refused();
    test_words_refused();
    test_numbers_refused();
    test_number_range();
    test_long_numbers();
    test_strings_refused();
    test_strings_accepted();
    test_every_byte_at_every_place();
    test_every_utf8_sequence();
    test_cut_anywhere_is_truncated();
    test_depth();
    test_skip();
    test_skip_checks_what_it_skips();
    test_unescape();
    test_unescape_what_changed();
    test_u64();
    test_quote();
    return check_summary();
}
