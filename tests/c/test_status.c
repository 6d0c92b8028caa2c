/* SPDX-License-Identifier: Apache-2.0
 *
 * The codes: each has a name of its own, and a failure is filled in whole.
 */
#include <string.h>

#include "check.h"
#include "status.h"

static void test_every_code_has_a_name(void)
{
    int a, b;
    for (a = TIO_OK; a >= TIO_NOSPACE; a--) {
        CHECK(strcmp(tio_code_name(a), "unknown") != 0);
        for (b = TIO_OK; b > a; b--)
            CHECK(strcmp(tio_code_name(a), tio_code_name(b)) != 0);
    }
    CHECK(strcmp(tio_code_name(TIO_NOSPACE - 1), "unknown") == 0);
    CHECK(strcmp(tio_code_name(1), "unknown") == 0);
}

static void test_failure_is_filled_in(void)
{
    tio_error err;
    memset(&err, 0xAA, sizeof err);
    CHECK(tio_fail(&err, TIO_LIMIT, 7, 8, 9, "field: rule") == TIO_LIMIT);
    CHECK(err.code == TIO_LIMIT && err.offset == 7 && err.want == 8 && err.got == 9);
    CHECK(strcmp(err.what, "field: rule") == 0);
}

int main(void)
{
    test_every_code_has_a_name();
    test_failure_is_filled_in();
    return check_summary();
}
