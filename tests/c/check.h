/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole test harness of the C tests: CHECK(cond) counts and, on failure,
 * says where; main() ends with `return check_summary();`.
 *
 * A failed check does not stop the program, so that one run shows every
 * failure; a test that fails in a loop is cut off after CHECK_MAX_SHOWN lines.
 */
#ifndef TENSORIO_TESTS_CHECK_H
#define TENSORIO_TESTS_CHECK_H

#include <stdio.h>

#define CHECK_MAX_SHOWN 50

static unsigned long check_passed;
static unsigned long check_failed;

/* Count one check; returns `ok`, so that a caller may stop early or print more. */
static inline int check_one(int ok, const char *file, int line, const char *text)
{
    if (ok) {
        check_passed++;
    } else {
        check_failed++;
        if (check_failed <= CHECK_MAX_SHOWN)
            printf("%s:%d: failed: %s\n", file, line, text);
        else if (check_failed == CHECK_MAX_SHOWN + 1)
            printf("(further failures are counted, not shown)\n");
    }
    return ok;
}

#define CHECK(cond) check_one(!!(cond), __FILE__, __LINE__, #cond)

/* Print the last line, "N passed, M failed"; returns the exit code. */
static inline int check_summary(void)
{
    printf("%lu passed, %lu failed\n", check_passed, check_failed);
    return check_failed != 0;
}

#endif
