/* SPDX-License-Identifier: Apache-2.0
 *
 * The opcodes of one tensor: what is taken, and that everything else is not.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "tensor_ops.h"

/* Behind the arguments' MARK, with slots 1 to 4 for the word, the class, the location and the OrderedDict. */
static const uint8_t PLAIN[] =
    "(h\x01h\x02X\x02\0\0\0"
    "17q\x05h\x03K\x0ctq\x06Q"
    "K\x02K\x02M\x03\x01\x86q\x07K\x03K\x01\x86q\x08\x89h\x04)Rq\x09tq\x0aR";
#define PLAIN_LEN (sizeof PLAIN - 1)

static int match(const uint8_t *bytes, size_t len, tio_tensor_ops *out)
{
    /* Exactly as many bytes as there are, so that a sanitizer sees every byte read too far. */
    uint8_t *copy = malloc(len ? len : 1);
    int found;
    memcpy(copy, bytes, len);
    found = tio_tensor_ops_match(copy, len, 0, out);
    free(copy);
    return found;
}

static void test_plain_tensor_is_taken(void)
{
    tio_tensor_ops t;
    CHECK(tio_tensor_ops_match(PLAIN, PLAIN_LEN, 0, &t) == 1);
    CHECK(t.word == 1 && t.cls == 2 && t.location == 3 && t.hooks == 4);
    CHECK(t.key_slot == -1 && t.key_at == 5 && t.key_len == 2 && memcmp(t.key, "17", 2) == 0);
    CHECK(t.numel == 12 && t.offset == 2 && t.rank == 2 && t.requires_grad == 0 && t.legacy == 0);
    CHECK(t.dims[0] == 2 && t.dims[1] == 0x103 && t.dims[2] == 3 && t.dims[3] == 1);
    CHECK(t.puts[0] == 5 && t.puts[1] == 6 && t.puts[2] == 7 && t.puts[3] == 8 && t.puts[4] == 9 &&
          t.puts[5] == 10);
    CHECK(t.end == PLAIN_LEN);
}

static void test_every_cut_is_no_match(void)
{
    tio_tensor_ops t;
    size_t n;
    for (n = 0; n < PLAIN_LEN; n++)
        CHECK(match(PLAIN, n, &t) == 0);
}

/* A changed byte is either no match or a match of the same length: only operands may differ. */
static void test_every_changed_byte_keeps_the_length(void)
{
    uint8_t bytes[sizeof PLAIN];
    tio_tensor_ops t;
    size_t i;
    int v, matches = 0;
    for (i = 0; i < PLAIN_LEN; i++)
        for (v = 0; v < 256; v++) {
            memcpy(bytes, PLAIN, sizeof PLAIN);
            bytes[i] = (uint8_t)v;
            if (match(bytes, PLAIN_LEN, &t)) {
                matches++;
                CHECK(t.end == PLAIN_LEN);
            }
        }
    CHECK(matches > 256 * 10);
}

static void test_id_of_a_legacy_file(void)
{
    static const uint8_t bytes[] =
        "(h\x01h\x02X\x0e\0\0\0"
        "94604321652400q\x05h\x03K\x0cNtq\x06QK\0))\x89h\x04)Rq\x09tq\x0aR";
    tio_tensor_ops t;
    size_t n;
    for (n = 0; n < sizeof bytes - 1; n++)
        CHECK(match(bytes, n, &t) == 0);
    CHECK(match(bytes, sizeof bytes - 1, &t) == 1);
    CHECK(t.legacy == 1 && t.numel == 12 && t.rank == 0);
}

static void test_key_out_of_the_memo(void)
{
    static const uint8_t bytes[] = "(h\x01h\x02j\0\x01\0\0h\x03K\x0ctr\x06\0\0\0Q"
                                   "J\x02\0\0\0))\x88h\x04)Rq\x09tq\x0aR";
    tio_tensor_ops t;
    size_t n;
    for (n = 0; n < sizeof bytes - 1; n++)
        CHECK(match(bytes, n, &t) == 0);
    CHECK(match(bytes, sizeof bytes - 1, &t) == 1);
    CHECK(t.key_slot == 256 && t.rank == 0 && t.requires_grad == 1);
    CHECK(t.puts[0] == -1 && t.puts[1] == 6 && t.puts[2] == -1 && t.puts[3] == -1);
}

static void test_odd_spellings_are_left_alone(void)
{
    static const char *const keys[] = {"1a", "a", "", "-1", "123456789012345678901"};
    uint8_t bytes[128];
    tio_tensor_ops t;
    size_t i, n;
    for (i = 0; i < sizeof keys / sizeof *keys; i++) {
        size_t len = strlen(keys[i]);
        memcpy(bytes, "(h\x01h\x02X\0\0\0\0", 10);
        bytes[6] = (uint8_t)len;
        memcpy(bytes + 10, keys[i], len);
        n = 10 + len;
        memcpy(bytes + n, PLAIN + 12, PLAIN_LEN - 12);
        CHECK(match(bytes, n + PLAIN_LEN - 12, &t) == 0);
    }
    memcpy(bytes, PLAIN, sizeof PLAIN);
    CHECK(match(bytes, PLAIN_LEN, &t) == 1);
    CHECK(match((const uint8_t *)"", 0, &t) == 0);
}

static void test_rank_is_bounded(void)
{
    uint8_t bytes[1024];
    tio_tensor_ops t;
    unsigned rank;
    for (rank = 1; rank < 100; rank++) {
        size_t n = 0, i;
        memcpy(bytes, "(h\x01h\x02h\x05h\x03K\x0ctq\x06QK\0", 17);
        n = 17;
        for (i = 0; i < 2; i++) {
            unsigned k;
            bytes[n++] = '(';
            for (k = 0; k < rank; k++) {
                bytes[n++] = 'K';
                bytes[n++] = 1;
            }
            bytes[n++] = 't';
            bytes[n++] = 'q';
            bytes[n++] = 7;
        }
        memcpy(bytes + n, "\x89h\x04)Rq\x09tq\x0aR", 11);
        n += 11;
        CHECK(match(bytes, n, &t) == (rank <= TIO_TENSOR_RANK_MAX));
    }
}

int main(void)
{
    test_plain_tensor_is_taken();
    test_every_cut_is_no_match();
    test_every_changed_byte_keeps_the_length();
    test_id_of_a_legacy_file();
    test_key_out_of_the_memo();
    test_odd_spellings_are_left_alone();
    test_rank_is_bounded();
    return check_summary();
}
