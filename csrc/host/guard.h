/* SPDX-License-Identifier: Apache-2.0 */
/* A word before the end: which mapped file a bus error came from.
 *
 * Mappings of files are entered in a table of fixed size. A handler of SIGBUS, which is installed only when asked for,
 * looks the address up, writes one line to stderr, puts back the handler that was there before it, and returns: the
 * access is made again, and whoever would have seen the signal without us sees it now, as it was.
 *
 * Only calls that POSIX lets a handler make: write, signal, sigaction, raise; madvise, which is a plain system call.
 */
#ifndef TENSORIO_HOST_GUARD_H
#define TENSORIO_HOST_GUARD_H

#include <stddef.h>
#include <stdint.h>

enum {
    TIO_GUARD_SLOTS = 4096, /* mappings at once; those beyond are not told about */
    TIO_GUARD_NAME = 240    /* bytes of a name; of a longer one, its end is kept */
};

/* Enter the mapping of a whole file; returns its slot, or -1 if the table is full. */
int tio_guard_add(const void *ptr, size_t nbytes, const char *name, size_t name_nbytes);

/* Take a mapping out; before it is unmapped. */
void tio_guard_remove(int slot);

/* Install the handler, or put back what was there before (unless somebody has replaced it since): 0 or an errno. */
int tio_guard_install(void);
int tio_guard_uninstall(void);

#endif
