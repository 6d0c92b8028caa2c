/* SPDX-License-Identifier: Apache-2.0 */
/* What the system is asked about pages of memory and of files, without Python and its lock.
 *
 * All return 0 or an errno; ENOSYS where the system has no such call. None touches the bytes, except tio_pages_copy.
 */
#ifndef TENSORIO_HOST_PAGES_H
#define TENSORIO_HOST_PAGES_H

#include <stddef.h>
#include <stdint.h>

/* madvise(2) on all pages that have a byte of the range. */
int tio_pages_advise(const void *ptr, size_t nbytes, int advice);

/* How many bytes of a mapped range have their page in memory: mincore(2). */
int tio_pages_resident(const void *ptr, size_t nbytes, uint64_t *resident);

/* How many bytes of a range of a file are in the page cache: cachestat(2), Linux 6.5. */
int tio_pages_cached(int fd, uint64_t offset, uint64_t nbytes, uint64_t *cached);

/* What O_DIRECT wants offsets and addresses to be multiples of: statx(2), Linux 6.1; 0 if the file can't have it. */
int tio_pages_direct(int fd, uint32_t *memory, uint32_t *offset);

/* Map a whole file: read-only and shared, or private copy-on-write pages for which no swap is set aside. Needs no
 * descriptor afterwards. */
int tio_pages_map(int fd, size_t nbytes, int writable, void **ptr);
void tio_pages_unmap(void *ptr, size_t nbytes);

/* memcpy(3) of any size. */
void tio_pages_copy(void *target, const void *source, size_t nbytes);

#endif
