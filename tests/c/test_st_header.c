/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors header: the frame, each entry, the rules between entries,
 * and entries written.
 *
 * Headers are written with ' for " and ` for \, so that a caret in the line
 * below stands exactly under the byte it means. The block behind each reader
 * ends with the header, not with the payload: a sanitizer sees any touch of
 * the bytes behind it.
 */
#include <stdlib.h>

#include "check.h"
#include "st_header.h"

#define FRAME 8 /* bytes of the length field */

typedef struct {
    uint8_t *bytes;
    uint64_t len;
} block;

static block make_block(uint64_t len)
{
    block b = {malloc((size_t)(len ? len : 1)), len};
    if (b.bytes == NULL)
        abort();
    return b;
}

static block file_of(const void *json, uint64_t len)
{
    block b = make_block(FRAME + len);
    tio_store64(b.bytes, len);
    if (len)
        memcpy(b.bytes + FRAME, json, (size_t)len);
    return b;
}

static block written_file(const char *written)
{
    block b = file_of(written, strlen(written));
    uint64_t i;
    for (i = FRAME; i < b.len; i++) {
        if (b.bytes[i] == '\'')
            b.bytes[i] = '"';
        else if (b.bytes[i] == '`')
            b.bytes[i] = '\\';
    }
    return b;
}

/* Read to the end; 0 or the error's code. The last tensor stays in *ev. */
static int read_file(block b, tio_st_event *ev, tio_error *err)
{
    tio_st_reader r;
    int rc = tio_st_open(&r, b.bytes, b.len, err);
    if (rc < 0)
        return rc;
    while ((rc = tio_st_next(&r, ev, err)) == 1)
        ;
    return rc;
}

/* ---- what is read ---- */

static char *print_token(char *p, const tio_json_token *tok)
{
    p += tio_json_unescape(tok, (uint8_t *)p);
    *p++ = ' ';
    return p;
}

static char *print_event(char *p, const tio_st_event *ev)
{
    unsigned i;
    switch (ev->kind) {
    case TIO_ST_EV_META:
        return print_token(print_token(p + sprintf(p, "meta "), &ev->name), &ev->value);
    case TIO_ST_EV_META_NULL: return p + sprintf(p, "meta-null ");
    case TIO_ST_EV_META_EMPTY: return p + sprintf(p, "meta-empty ");
    default:
        p = print_token(p, &ev->name);
        p += sprintf(p, "%s [", tio_st_dtype_name(ev->dtype));
        for (i = 0; i < ev->rank; i++)
            p += sprintf(p, i ? ",%llu" : "%llu", (unsigned long long)ev->shape[i]);
        return p + sprintf(p, "] %llu:%llu ", (unsigned long long)ev->begin,
                           (unsigned long long)ev->end);
    }
}

static void reads(const char *written, const char *wanted)
{
    char got[1024], *p = got;
    block b = written_file(written);
    tio_st_reader r;
    tio_st_event ev;
    tio_error err = {0, 0, 0, 0, ""};
    int rc;
    CHECK(tio_st_open(&r, b.bytes, b.len, &err) == 0);
    while ((rc = tio_st_next(&r, &ev, &err)) == 1)
        p = print_event(p, &ev);
    *p = '\0';
    CHECK(tio_st_next(&r, &ev, &err) == rc); /* the end stays the end */
    if (!CHECK(rc == 0 && strcmp(got, wanted) == 0))
        printf("  %s\n  wanted %s\n  got    %s (%s)\n", written, wanted, got, err.what);
    free(b.bytes);
}

#define ENTRY "{'dtype':'F32','shape':[2,3],'data_offsets':[0,24]}"
#define READ  "F32 [2,3] 0:24 "

static void test_entries(void)
{
    reads("{}", "");
    reads(" \n{ } \t\r", "");
    reads("{'a':" ENTRY "}", "a " READ);
    reads("{'a':" ENTRY ",'b.c':" ENTRY "}   ", "a " READ "b.c " READ);
    reads("{'':" ENTRY "}", " " READ);
    reads("{'a`u0062`n':" ENTRY "}", "ab\n " READ);
    reads("{'a':" ENTRY ",'a':" ENTRY "}", "a " READ "a " READ); /* the caller's to refuse */
    reads("{'a':{'dtype':'BOOL','shape':[],'data_offsets':[7,8]}}", "a BOOL [] 7:8 ");
    reads("{'a':{'dtype':'F8_E4M3FNUZ','shape':[0],'data_offsets':[0,18446744073709551615]}}",
          "a F8_E4M3FNUZ [0] 0:18446744073709551615 ");
}

static void test_entry_spellings(void)
{
    reads("{'a':{'data_offsets':[0,24],'shape':[2,3],'dtype':'F32'}}", "a " READ);
    reads("{ 'a' : { 'dtype' : 'F32' , 'shape' : [ 2 , 3 ] , 'data_offsets' : [ 0 , 24 ] } }",
          "a " READ);
    reads("{'a':['F32',[2,3],[0,24]]}", "a " READ);
    reads("{'a':{'dtype':{'F32':null},'shape':[2,3],'data_offsets':[0,24]}}", "a " READ);
    reads("{'a':[{'F`u00332':null},[2,3],[0,24]]}", "a " READ);
    reads("{'a':{'`u0064type':'F`u0033`u0032','shap`u0065':[2,3],'data`u005foffsets':[0,24]}}",
          "a " READ);
    reads("{'a':{'dtype':'F32','shape':[2,3],'data_offsets':[0,24],'x':{'dtype':[1e3,null]}}}",
          "a " READ);
    reads("{'a':{'x':1,'x':2,'dtype':'F32','':'`ud83d`ude00','shape':[2,3],"
          "'data_offsets':[0,24]}}",
          "a " READ);
}

static void test_metadata(void)
{
    reads("{'__metadata__':{'format':'pt'}}", "meta format pt ");
    reads("{'__metadata__':{'a':'`t','a':''},'t':" ENTRY "}", "meta a \t meta a  t " READ);
    reads("{'t':" ENTRY ",'__metadata__':{'dtype':'F32'}}", "t " READ "meta dtype F32 ");
    reads("{'__metadata__':null}", "meta-null ");
    reads("{'__metadata__':{ },'t':" ENTRY "}", "meta-empty t " READ);
    reads("{'`u005f`u005f`u006d`u0065`u0074`u0061`u0064`u0061`u0074`u0061`u005f`u005f':null}",
          "meta-null ");
    reads("{'__metadata':" ENTRY ",'__metadata__ ':" ENTRY "}",
          "__metadata " READ "__metadata__  " READ);
    reads("{'__metadata__':{'__metadata__':'x'}}", "meta __metadata__ x ");
}

/* ---- what is refused ---- */

/* `caret` is blanks and a ^ under the offending byte; `about` begins `what`. */
static void refused(const char *written, const char *caret, int code, const char *about)
{
    block b = written_file(written);
    tio_st_event ev;
    tio_error err = {0, 0, 0, 0, ""};
    int rc = read_file(b, &ev, &err);
    if (!CHECK(rc == code && err.code == code && err.offset == FRAME + strlen(caret) - 1 &&
               strncmp(err.what, about, strlen(about)) == 0))
        printf("  %s\n  %s wanted %s %s\n  got %s at %d: %s\n", written, caret, tio_code_name(code),
               about, tio_code_name(rc), (int)err.offset - FRAME, err.what);
    free(b.bytes);
}

static void test_header_refused(void)
{
    refused("[]", "^", TIO_MALFORMED, "header: expected an object");
    refused("null", "^", TIO_MALFORMED, "header: expected an object");
    refused("{} {}", "   ^", TIO_MALFORMED, "JSON text: bytes behind");
    refused("{}\x01", "  ^", TIO_MALFORMED, "JSON text: bytes behind");
    refused("{'a':1}", "     ^", TIO_MALFORMED, "tensor entry: expected an object");
    refused("{'a':null}", "     ^", TIO_MALFORMED, "tensor entry: expected an object");
    refused("{'\xED\xA0\x80':" ENTRY "}", /* a surrogate as UTF-8 */
            "  ^", TIO_MALFORMED, "JSON string: expected UTF-8");
    refused("{'a':['F32',[1],[0,4]],}", "                       ^", TIO_MALFORMED,
            "JSON object: expected a member's name");
}

/* The header is as long as N says: a text that ends early is not truncated. */
static void test_header_cut_short(void)
{
    refused("", "^", TIO_MALFORMED, "JSON text: ends");
    refused("   ", "   ^", TIO_MALFORMED, "JSON text: ends");
    refused("{'a':{'dtype':'F32'", "                   ^", TIO_MALFORMED, "JSON text: ends");
    refused("{'a':{'x':[[1,", "              ^", TIO_MALFORMED, "JSON text: ends");
    refused("{'__metadata__':{'a':'b'", "                        ^", TIO_MALFORMED,
            "JSON text: ends");
}

/* Every header, cut anywhere, ends where it is cut, in every part of every spelling. */
static void test_every_cut_is_malformed(void)
{
    static const char *const headers[] = {
        "{'a':" ENTRY ",'b':['F32',[2,3],[0,24]]}",
        "{'a':[{'F32':null},[2],[0,8]],'b':{'dtype':{'F32':null},'x':[{}],'shape':[],"
        "'data_offsets':[0,4]}}",
        "{'__metadata__':null,'a':" ENTRY "}",
        "{'__metadata__':{},'a':" ENTRY "}",
        "{'__metadata__':{'k':'v','l':'`u0041'},'a':" ENTRY "}",
    };
    size_t i, cut;
    for (i = 0; i < sizeof headers / sizeof *headers; i++)
        for (cut = 0; cut < strlen(headers[i]); cut++) {
            block whole = written_file(headers[i]), part = file_of(whole.bytes + FRAME, cut);
            tio_st_event ev;
            tio_error err;
            CHECK(read_file(part, &ev, &err) == TIO_MALFORMED && err.code == TIO_MALFORMED);
            CHECK(err.offset == part.len && strstr(err.what, "JSON text: ends") != NULL);
            free(part.bytes);
            free(whole.bytes);
        }
}

static void test_dtype_refused(void)
{
    refused("{'a':{'dtype':'F33','shape':[],'data_offsets':[0,4]}}", "              ^",
            TIO_UNSUPPORTED, "tensor entry: dtype: unknown");
    refused("{'a':{'dtype':'f32','shape':[],'data_offsets':[0,4]}}", "              ^",
            TIO_UNSUPPORTED, "tensor entry: dtype: unknown");
    refused("{'a':{'dtype':'','shape':[],'data_offsets':[0,4]}}", "              ^",
            TIO_UNSUPPORTED, "tensor entry: dtype: unknown");
    refused("{'a':{'dtype':'F32 which is far too long to be the name of a dtype`n'}}",
            "              ^", TIO_UNSUPPORTED, "tensor entry: dtype: unknown");
    refused("{'a':{'dtype':{'F33':null}}}", "               ^", TIO_UNSUPPORTED,
            "tensor entry: dtype: unknown");
    refused("{'a':{'dtype':32}}", "              ^", TIO_MALFORMED,
            "tensor entry: dtype: expected a string");
    refused("{'a':{'dtype':['F32']}}", "              ^", TIO_MALFORMED,
            "tensor entry: dtype: expected a string");
    refused("{'a':{'dtype':{}}}", "               ^", TIO_MALFORMED,
            "tensor entry: dtype: as an object");
    refused("{'a':{'dtype':{'F32':{}}}}", "                     ^", TIO_MALFORMED,
            "tensor entry: dtype: as an object");
    refused("{'a':{'dtype':{'F32':null,'F32':null}}}", "                          ^", TIO_MALFORMED,
            "tensor entry: dtype: as an object");
}

static void test_shape_refused(void)
{
    static const char plain[] = "tensor entry: shape: expected a plain unsigned decimal";
    refused("{'a':{'shape':3}}", "              ^", TIO_MALFORMED,
            "tensor entry: shape: expected an array");
    refused("{'a':{'shape':'3'}}", "              ^", TIO_MALFORMED,
            "tensor entry: shape: expected an array");
    refused("{'a':{'shape':[2,-0]}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,-1]}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,3.0]}}", "                  ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,3e0]}}", "                  ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,18446744073709551616]}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,'3']}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,[]]}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,true]}}", "                 ^", TIO_MALFORMED, plain);
    refused("{'a':{'shape':[2,03]}}", "                  ^", TIO_MALFORMED,
            "JSON number: leading zero");
    refused("{'a':{'shape':[2,]}}", "                 ^", TIO_MALFORMED,
            "JSON text: expected a value");
}

static void test_offsets_refused(void)
{
    static const char plain[] = "tensor entry: data_offsets: expected a plain unsigned decimal";
    refused("{'a':{'data_offsets':0}}", "                     ^", TIO_MALFORMED,
            "tensor entry: data_offsets: expected an a");
    refused("{'a':{'data_offsets':{'begin':0}}}", "                     ^", TIO_MALFORMED,
            "tensor entry: data_offsets: expected an a");
    refused("{'a':{'data_offsets':[]}}", "                      ^", TIO_MALFORMED, plain);
    refused("{'a':{'data_offsets':[0]}}", "                       ^", TIO_MALFORMED, plain);
    refused("{'a':{'data_offsets':[0,null]}}", "                        ^", TIO_MALFORMED, plain);
    refused("{'a':{'data_offsets':[0,4.5]}}", "                         ^", TIO_MALFORMED, plain);
    refused("{'a':{'data_offsets':[0,4,8]}}", "                          ^", TIO_MALFORMED,
            "tensor entry: data_offsets: expected exactly two numbers");
}

static void test_fields_refused(void)
{
    refused("{'a':{}}", "      ^", TIO_MALFORMED, "tensor entry: dtype: missing");
    refused("{'a':{'dtype':'U8','data_offsets':[0,1]}}", "                                       ^",
            TIO_MALFORMED, "tensor entry: shape: missing");
    refused("{'a':{'dtype':'U8','shape':[]}}", "                             ^", TIO_MALFORMED,
            "tensor entry: data_offsets: missing");
    refused("{'a':{'dtype':'U8','shape':[],'d`u0074ype':'U8'}}", "                              ^",
            TIO_MALFORMED, "tensor entry: dtype: given twice");
    refused("{'a':{'shape':[],'shape':[]}}", "                 ^", TIO_MALFORMED,
            "tensor entry: shape: given twice");
    refused("{'a':{'dtype':'U8','shape':[1],'data_offsets':[0,1],'data_offsets':[0,1]}}",
            "                                                    ^", TIO_MALFORMED,
            "tensor entry: data_offsets: given twice");
    refused("{'a':[]}", "      ^", TIO_MALFORMED, "tensor entry: dtype: missing");
    refused("{'a':['F32',[1]]}", "               ^", TIO_MALFORMED,
            "tensor entry: data_offsets: missing");
    refused("{'a':['F32',[1],[0,4],0]}", "                      ^", TIO_MALFORMED,
            "tensor entry: as an array");
    refused("{'a':[[1],'F32',[0,4]]}", "      ^", TIO_MALFORMED,
            "tensor entry: dtype: expected a string");
}

/* Fields that nobody reads are JSON all the same. */
static void test_ignored_fields_are_validated(void)
{
    refused("{'a':{'x':1e999}}", "          ^", TIO_MALFORMED, "JSON number: out of range");
    refused("{'a':{'x':{'y':01}}}", "                ^", TIO_MALFORMED,
            "JSON number: leading zero");
    refused("{'a':{'x':'`ud800'}}", "           ^", TIO_MALFORMED,
            "JSON string: \\u escape: surrogate");
    refused("{'a':{'x':[1,]}}", "             ^", TIO_MALFORMED, "JSON text: expected a value");
}

static void test_metadata_refused(void)
{
    refused("{'__metadata__':[]}", "                ^", TIO_MALFORMED,
            "__metadata__: expected an object or null");
    refused("{'__metadata__':'x'}", "                ^", TIO_MALFORMED,
            "__metadata__: expected an object or null");
    refused("{'__metadata__':{'a':1}}", "                     ^", TIO_MALFORMED,
            "__metadata__: expected a string");
    refused("{'__metadata__':{'a':'b','c':null}}", "                             ^", TIO_MALFORMED,
            "__metadata__: expected a string");
    refused("{'__metadata__':{'a':{}}}", "                     ^", TIO_MALFORMED,
            "__metadata__: expected a string");
    refused("{'__metadata__':null,'__metadata__':null}", "                     ^", TIO_MALFORMED,
            "__metadata__: given twice");
    refused("{'__metadata__':{},'_`u005fmetadata__':{'a':'b'}}", "                   ^",
            TIO_MALFORMED, "__metadata__: given twice");
}

/* An entry whose shape is `rank` times 1, with `gap` behind its '{'. */
static block ranked_file(unsigned rank, const char *gap)
{
    char json[512], *p = json;
    unsigned i;
    p += sprintf(p, "{\"a\":{%s\"dtype\":\"U8\",\"shape\":[", gap);
    for (i = 0; i < rank; i++)
        p += sprintf(p, i ? ",1" : "1");
    p += sprintf(p, "],\"data_offsets\":[0,1]}}");
    return file_of(json, (uint64_t)(p - json));
}

static void test_rank_limit(void)
{
    static const char *const gaps[] = {"", " "}; /* the short cut, the long way */
    const uint64_t head = sizeof "{'a':{'dtype':'U8','shape':[" - 1;
    size_t i;
    for (i = 0; i < 2; i++) {
        block most = ranked_file(TIO_ST_RANK_MAX, gaps[i]);
        block more = ranked_file(TIO_ST_RANK_MAX + 1, gaps[i]);
        tio_st_event ev;
        tio_error err;
        CHECK(read_file(most, &ev, &err) == 0);
        CHECK(ev.rank == TIO_ST_RANK_MAX && ev.shape[TIO_ST_RANK_MAX - 1] == 1);
        CHECK(read_file(more, &ev, &err) == TIO_LIMIT);
        CHECK(err.want == 64 && err.got == 65 && err.offset == FRAME + i + head + 2 * 64);
        free(most.bytes);
        free(more.bytes);
    }
}

/* ---- the short cut agrees with the long way ---- */

typedef struct {
    int rc;
    tio_st_event ev;
    tio_error err;
} outcome;

static int same_tensor(const tio_st_event *a, const tio_st_event *b)
{
    return a->dtype == b->dtype && a->rank == b->rank && a->begin == b->begin && a->end == b->end &&
           memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0;
}

/* Read `{"a":{` gap members `}}`. */
static outcome read_members(const char *gap, const uint8_t *members, uint64_t len)
{
    outcome o = {0, {0}, {0, 0, 0, 0, ""}};
    uint8_t json[256];
    uint64_t n = (uint64_t)sprintf((char *)json, "{\"a\":{%s", gap);
    tio_st_reader r;
    block b;
    memcpy(json + n, members, (size_t)len);
    memcpy(json + n + len, "}}", 2);
    b = file_of(json, n + len + 2);
    CHECK(tio_st_open(&r, b.bytes, b.len, &o.err) == 0);
    o.rc = tio_st_next(&r, &o.ev, &o.err);
    if (o.rc == 1) {
        tio_st_event end;
        CHECK(tio_st_next(&r, &end, &o.err) <= 0);
    }
    free(b.bytes);
    return o;
}

/* A blank behind the '{' is all it takes to turn the short cut down. */
static void agree(const uint8_t *members, uint64_t len)
{
    outcome cut = read_members("", members, len);
    outcome way = read_members(" ", members, len);
    int same = cut.rc == way.rc && cut.err.code == way.err.code;
    if (same && cut.rc == 1)
        same = same_tensor(&cut.ev, &way.ev);
    if (same && cut.err.code < 0)
        same = cut.err.offset + 1 == way.err.offset && strcmp(cut.err.what, way.err.what) == 0;
    if (!CHECK(same))
        printf("  %.*s: %s at %d, %s at %d\n", (int)len, (const char *)members, cut.err.what,
               (int)cut.err.offset, way.err.what, (int)way.err.offset);
}

/* The members as they are, and edited at each place. */
static void agree_when_edited(const char *usual)
{
    uint64_t len = strlen(usual), i;
    uint8_t edited[128];
    unsigned c;

    agree((const uint8_t *)usual, len);
    for (i = 0; i < len; i++) {
        for (c = 0; c < 256; c++) { /* each byte replaced by each */
            memcpy(edited, usual, len);
            edited[i] = (uint8_t)c;
            agree(edited, len);
        }
        memcpy(edited, usual, i); /* each byte removed */
        memcpy(edited + i, usual + i + 1, len - i - 1);
        agree(edited, len - 1);
        memcpy(edited, usual, i + 1); /* each byte doubled */
        memcpy(edited + i + 1, usual + i, len - i);
        agree(edited, len + 1);
        agree((const uint8_t *)usual, i); /* cut short */
    }
}

static void test_short_cut_agrees(void)
{
    agree_when_edited("\"dtype\":\"F32\",\"shape\":[10,0,7],\"data_offsets\":[1024,2048]");
    agree_when_edited("\"dtype\":\"F8_E4M3FNUZ\",\"shape\":[],\"data_offsets\":[0,1]");
    /* 19 digits, the most of the short cut, and 20 */
    agree_when_edited("\"dtype\":\"I8\",\"shape\":[9999999999999999999],"
                      "\"data_offsets\":[0,9999999999999999999]");
    agree_when_edited("\"dtype\":\"U8\",\"shape\":[18446744073709551615],"
                      "\"data_offsets\":[0,18446744073709551615]");
}

static void test_short_cut_of_all_dtypes(void)
{
    int dtype;
    for (dtype = 0; dtype < TIO_ST_DTYPES; dtype++) {
        char members[128];
        int len = sprintf(members, "\"dtype\":\"%s\",\"shape\":[],\"data_offsets\":[3,9999999999]",
                          tio_st_dtype_name(dtype));
        outcome o = read_members("", (const uint8_t *)members, (uint64_t)len);
        CHECK(o.rc == 1 && o.ev.dtype == dtype && o.ev.rank == 0);
        CHECK(o.ev.begin == 3 && o.ev.end == 9999999999u);
        agree((const uint8_t *)members, (uint64_t)len);
    }
}

/* ---- the frame ---- */

static int open_frame(uint64_t n, uint64_t given, uint64_t len, tio_error *err)
{
    uint8_t field[FRAME];
    block b = make_block(given);
    tio_st_reader r;
    int rc;
    tio_store64(field, n);
    if (given)
        memcpy(b.bytes, field, (size_t)(given < FRAME ? given : FRAME));
    rc = tio_st_open(&r, b.bytes, len, err);
    if (rc == 0)
        CHECK(r.header_len == n && r.data_offset == FRAME + n && r.file_len == len);
    free(b.bytes);
    return rc;
}

static void test_frame(void)
{
    tio_error err;
    uint64_t len;

    CHECK(tio_st_open(&(tio_st_reader){0}, NULL, 0, &err) == TIO_TRUNCATED);
    for (len = 0; len < FRAME; len++) {
        CHECK(open_frame(2, len, len, &err) == TIO_TRUNCATED);
        CHECK(err.want == 8 && err.got == len && err.offset == len);
    }
    CHECK(open_frame(0, FRAME, FRAME, &err) == 0);
    CHECK(open_frame(1, FRAME, FRAME, &err) == TIO_TRUNCATED);
    CHECK(err.want == 9 && err.got == 8 && err.offset == 8);
    CHECK(open_frame(100000000, FRAME, 100000008, &err) == 0);
    CHECK(open_frame(100000000, FRAME, 100000007, &err) == TIO_TRUNCATED);
    CHECK(err.want == 100000008 && err.got == 100000007);
    CHECK(open_frame(100000001, FRAME, 100000009, &err) == TIO_LIMIT);
    CHECK(err.want == 100000000 && err.got == 100000001 && err.offset == 0);
    CHECK(open_frame(UINT64_MAX, FRAME, FRAME, &err) == TIO_LIMIT);
    CHECK(err.got == UINT64_MAX);
}

/* The payload is claimed, not there: it must not be touched. */
static void test_payload_is_not_touched(void)
{
    block b = written_file("{'a':" ENTRY "}");
    tio_st_reader r;
    tio_st_event ev;
    tio_error err;
    CHECK(tio_st_open(&r, b.bytes, b.len + 24, &err) == 0);
    CHECK(tio_st_next(&r, &ev, &err) == 1);
    CHECK(ev.name.offset == FRAME + 1);
    CHECK(tio_st_next(&r, &ev, &err) == 0);
    free(b.bytes);
}

/* ---- between entries ---- */

#define TENSORS_MAX 8

typedef struct {
    uint64_t begin, end, bits;
} span;

static int check_spans(const span *spans, uint64_t n, uint64_t data_len, uint32_t *order,
                       uint64_t *bad, tio_error *err)
{
    uint64_t begin[TENSORS_MAX], end[TENSORS_MAX], bits[TENSORS_MAX], i;
    for (i = 0; i < n; i++) {
        begin[i] = spans[i].begin;
        end[i] = spans[i].end;
        bits[i] = spans[i].bits;
    }
    memset(err, 0, sizeof *err);
    *bad = 99;
    return tio_st_check(begin, end, bits, order, n, data_len, bad, err);
}

static void covers(const span *spans, uint64_t n, uint64_t data_len, const uint32_t *wanted)
{
    uint32_t order[TENSORS_MAX];
    uint64_t bad;
    tio_error err;
    CHECK(check_spans(spans, n, data_len, order, &bad, &err) == 0);
    CHECK(memcmp(order, wanted, n * sizeof *order) == 0);
}

static void test_cover_accepted(void)
{
    uint32_t none[1];
    uint64_t bad;
    tio_error err;
    CHECK(check_spans(NULL, 0, 0, none, &bad, &err) == 0);
    covers((span[]){{0, 4, 32}, {4, 5, 8}}, 2, 5, (uint32_t[]){0, 1});
    covers((span[]){{4, 5, 8}, {0, 4, 32}}, 2, 5, (uint32_t[]){1, 0});
    covers((span[]){{0, 1, 8}, {1, 1, 0}, {1, 1, 0}, {1, 2, 8}}, 4, 2, (uint32_t[]){0, 1, 2, 3});
    /* the empty one listed late sorts before the one that begins where it stands */
    covers((span[]){{1, 2, 8}, {0, 1, 8}, {1, 1, 0}, {0, 0, 0}, {1, 1, 0}, {2, 2, 0}}, 6, 2,
           (uint32_t[]){3, 1, 2, 4, 0, 5});
}

static void faulty(const span *spans, uint64_t n, uint64_t data_len, int code, uint64_t at,
                   uint64_t want, uint64_t got)
{
    uint32_t order[TENSORS_MAX];
    uint64_t bad;
    tio_error err;
    CHECK(check_spans(spans, n, data_len, order, &bad, &err) == code);
    CHECK(err.code == code && err.offset == 0 && err.what != NULL);
    CHECK(bad == at && err.want == want && err.got == got);
}

static void test_cover_refused(void)
{
    const uint64_t huge = UINT64_MAX;
    /* a hole at the start, in the middle; an overlap; the same bytes twice */
    faulty((span[]){{1, 2, 8}}, 1, 2, TIO_MALFORMED, 0, 0, 1);
    faulty((span[]){{0, 1, 8}, {2, 3, 8}}, 2, 3, TIO_MALFORMED, 1, 1, 2);
    faulty((span[]){{3, 8, 40}, {0, 4, 32}}, 2, 8, TIO_MALFORMED, 0, 4, 3);
    faulty((span[]){{0, 4, 32}, {0, 4, 32}}, 2, 8, TIO_MALFORMED, 1, 4, 0);
    /* end before begin, which sorts before its place's rightful owner */
    faulty((span[]){{0, 4, 32}, {4, 2, 0}, {4, 8, 32}}, 3, 8, TIO_MALFORMED, 1, 4, 2);
    /* half a byte; a size that differs from the shape's */
    faulty((span[]){{0, 1, 4}}, 1, 1, TIO_MALFORMED, 0, 0, 4);
    faulty((span[]){{0, 5, 32}}, 1, 5, TIO_MISMATCH, 0, 4, 5);
    faulty((span[]){{0, huge, 8}}, 1, 1, TIO_MISMATCH, 0, 1, huge);
    /* the payload's end */
    faulty((span[]){{0, 4, 32}}, 1, 3, TIO_TRUNCATED, 1, 4, 3);
    faulty((span[]){{0, 4, 32}}, 1, 5, TIO_MALFORMED, 1, 4, 5);
    faulty(NULL, 0, 1, TIO_MALFORMED, 0, 0, 1);
    faulty((span[]){{0, huge / 8, huge - 7}}, 1, 0, TIO_TRUNCATED, 1, huge / 8, 0);
}

/* Sizes 0 .. 3 in an order of ours, spread over the header by `step`. */
static void check_spread(uint32_t n, uint32_t step)
{
    uint64_t *rows = malloc(3 * n * sizeof *rows), *begin = rows, *end = rows + n;
    uint64_t *bits = rows + 2 * (size_t)n, offset = 0, bad;
    uint32_t *order = malloc(n * sizeof *order), i, at = 0;
    tio_error err;
    if (rows == NULL || order == NULL)
        abort();
    for (i = 0; i < n; i++, at = (at + step) % n) {
        begin[at] = offset;
        offset += i % 4;
        end[at] = offset;
        bits[at] = i % 4 * 8;
    }
    CHECK(tio_st_check(begin, end, bits, order, n, offset, &bad, &err) == 0);
    for (i = 1; i < n; i++) {
        uint32_t a = order[i - 1], b = order[i];
        CHECK(begin[a] < begin[b] || (begin[a] == begin[b] && end[a] < end[b]) ||
              (begin[a] == begin[b] && end[a] == end[b] && a < b));
    }
    free(rows);
    free(order);
}

static void test_order_of_many(void)
{
    uint32_t n;
    for (n = 1; n < 40; n++)
        check_spread(n, n > 1 ? n - 1 : 1); /* backwards */
    check_spread(4999, 1);
    check_spread(4999, 4998);
    check_spread(4999, 1999); /* 4999 is prime: each place is met once */
}

static void test_nbits(void)
{
    tio_st_event ev = {0};
    uint64_t bits = 1;
    tio_error err;
    ev.name.offset = 77;

    ev.dtype = TIO_ST_F32;
    CHECK(tio_st_nbits(&ev, &bits, &err) == 0 && bits == 32);
    ev.rank = 3;
    memcpy(ev.shape, (uint64_t[]){2, 3, 5}, 24);
    CHECK(tio_st_nbits(&ev, &bits, &err) == 0 && bits == 30 * 32);
    memcpy(ev.shape, (uint64_t[]){0, 1ull << 32, 1ull << 32}, 24);
    CHECK(tio_st_nbits(&ev, &bits, &err) == 0 && bits == 0);
    memcpy(ev.shape, (uint64_t[]){1ull << 32, 1ull << 32, 0}, 24); /* overflows on the way */
    CHECK(tio_st_nbits(&ev, &bits, &err) == TIO_MALFORMED && err.offset == 77);
    memcpy(ev.shape, (uint64_t[]){1ull << 58, 1, 2}, 24); /* fits in elements, not in bits */
    CHECK(tio_st_nbits(&ev, &bits, &err) == TIO_MALFORMED);
    ev.dtype = TIO_ST_F4;
    memcpy(ev.shape, (uint64_t[]){1ull << 61, 1, 1}, 24);
    CHECK(tio_st_nbits(&ev, &bits, &err) == 0 && bits == 1ull << 63);
}

static void test_dtypes(void)
{
    static const struct {
        const char *name;
        unsigned bits;
    } wanted[] = {{"U64", 64},        {"I64", 64},    {"F64", 64},    {"C64", 64},
                  {"F32", 32},        {"U32", 32},    {"I32", 32},    {"BF16", 16},
                  {"F16", 16},        {"U16", 16},    {"I16", 16},    {"F8_E5M2FNUZ", 8},
                  {"F8_E4M3FNUZ", 8}, {"F8_E8M0", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8},
                  {"I8", 8},          {"U8", 8},      {"F6_E3M2", 6}, {"F6_E2M3", 6},
                  {"F4", 4},          {"BOOL", 8}};
    int i;
    CHECK(TIO_ST_DTYPES == sizeof wanted / sizeof *wanted);
    for (i = 0; i < TIO_ST_DTYPES; i++)
        CHECK(strcmp(tio_st_dtype_name(i), wanted[i].name) == 0 &&
              tio_st_dtype_bits(i) == wanted[i].bits);
    CHECK(tio_st_dtype_name(-1) == NULL && tio_st_dtype_name(TIO_ST_DTYPES) == NULL);
    CHECK(tio_st_dtype_bits(-1) == 0 && tio_st_dtype_bits(TIO_ST_DTYPES) == 0);
}

/* ---- writing ---- */

static void test_entry_written(void)
{
    static const char wanted[] =
        "\"a\\n\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}";
    static const char scalar[] = "\"\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[9,10]}";
    uint8_t out[256];
    CHECK(tio_st_entry(out, (const uint8_t *)"a\n", 2, TIO_ST_F32, (uint64_t[]){2, 3}, 2, 0, 24) ==
          sizeof wanted - 1);
    CHECK(memcmp(out, wanted, sizeof wanted - 1) == 0);
    CHECK(tio_st_entry(out, NULL, 0, TIO_ST_BOOL, NULL, 0, 9, 10) == sizeof scalar - 1);
    CHECK(memcmp(out, scalar, sizeof scalar - 1) == 0);
}

/* The longest of everything stays within the promised size, and reads back. */
static void test_longest_entry(void)
{
    static const uint8_t name[] = {1, 2, 3, 0x1F};
    uint64_t shape[TIO_ST_RANK_MAX], n;
    block b = make_block(FRAME + 2 + 6 * sizeof name + 21 * TIO_ST_RANK_MAX + 128);
    tio_st_event ev;
    tio_error err;
    memset(shape, 0xFF, sizeof shape);
    n = tio_st_entry(b.bytes + FRAME + 1, name, sizeof name, TIO_ST_F8_E4M3FNUZ, shape,
                     TIO_ST_RANK_MAX, UINT64_MAX, UINT64_MAX);
    CHECK(n <= b.len - FRAME - 2);
    b.bytes[FRAME] = '{';
    b.bytes[FRAME + 1 + n] = '}';
    b.len = FRAME + n + 2;
    tio_store64(b.bytes, n + 2);
    CHECK(read_file(b, &ev, &err) == 0);
    CHECK(ev.dtype == TIO_ST_F8_E4M3FNUZ && ev.rank == TIO_ST_RANK_MAX);
    CHECK(memcmp(ev.shape, shape, sizeof shape) == 0);
    CHECK(ev.begin == UINT64_MAX && ev.end == UINT64_MAX);
    free(b.bytes);
}

int main(void)
{
    test_entries();
    test_entry_spellings();
    test_metadata();
    test_header_refused();
    test_header_cut_short();
    test_every_cut_is_malformed();
    test_dtype_refused();
    test_shape_refused();
    test_offsets_refused();
    test_fields_refused();
    test_ignored_fields_are_validated();
    test_metadata_refused();
    test_rank_limit();
    test_short_cut_agrees();
    test_short_cut_of_all_dtypes();
    test_frame();
    test_payload_is_not_touched();
    test_cover_accepted();
    test_cover_refused();
    test_order_of_many();
    test_nbits();
    test_dtypes();
    test_entry_written();
    test_longest_entry();
    return check_summary();
}
