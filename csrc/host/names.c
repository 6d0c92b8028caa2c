/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "names.h"

#include <errno.h>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* linux/fs.h has it, and much that clashes with stdio.h. */
#define TIO_RENAME_EXCHANGE (1u << 1)

int tio_names_exchange(const char *a, const char *b)
{
#ifdef SYS_renameat2
    /* By number: C libraries have had the function since glibc 2.28 and musl 1.2.6 only. */
    return syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, TIO_RENAME_EXCHANGE) ? errno : 0;
#else
    (void)a, (void)b;
    return ENOSYS;
#endif
}
#elif defined(__APPLE__)
#include <stdio.h>

int tio_names_exchange(const char *a, const char *b)
{
    return renamex_np(a, b, RENAME_SWAP) ? errno : 0;
}
#else
int tio_names_exchange(const char *a, const char *b)
{
    (void)a, (void)b;
    return ENOSYS;
}
#endif
