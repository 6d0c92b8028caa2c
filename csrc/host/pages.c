/* SPDX-License-Identifier: Apache-2.0 */
/* See pages.h. Numbers of system calls that are younger than the headers of old systems are those of all Linux
 * architectures alike. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "pages.h"

#include <errno.h>
#include <string.h>

#ifdef _WIN32
int tio_pages_advise(const void *ptr, size_t nbytes, int advice)
{
    (void)ptr, (void)nbytes, (void)advice;
    return ENOSYS;
}

int tio_pages_map(int fd, size_t nbytes, int writable, void **ptr)
{
    (void)fd, (void)nbytes, (void)writable, (void)ptr;
    return ENOSYS;
}

void tio_pages_unmap(void *ptr, size_t nbytes)
{
    (void)ptr, (void)nbytes;
}
#else
#include <sys/mman.h>
#include <unistd.h>

static uintptr_t page_size(void)
{
    return (uintptr_t)sysconf(_SC_PAGESIZE);
}

int tio_pages_advise(const void *ptr, size_t nbytes, int advice)
{
    uintptr_t page = page_size(), begin = (uintptr_t)ptr & ~(page - 1);
    if (nbytes == 0)
        return 0;
    return madvise((void *)begin, (uintptr_t)ptr + nbytes - begin, advice) ? errno : 0;
}

int tio_pages_map(int fd, size_t nbytes, int writable, void **ptr)
{
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ, flags = MAP_SHARED;
    if (writable) {
        flags = MAP_PRIVATE;
#ifdef MAP_NORESERVE
        flags |= MAP_NORESERVE;
#endif
    }
    *ptr = mmap(NULL, nbytes, prot, flags, fd, 0);
    return *ptr == MAP_FAILED ? errno : 0;
}

void tio_pages_unmap(void *ptr, size_t nbytes)
{
    munmap(ptr, nbytes);
}
#endif

#ifdef __linux__
#include <fcntl.h>
#include <sys/syscall.h>

enum {
    RESIDENT_PAGES = 4096, /* asked about at once; a byte of stack each */
    CACHESTAT = 451,       /* asm-generic/unistd.h */
    STATX_DIO = 0x2000,    /* STATX_DIOALIGN */
    DIO_MEMORY = 152,      /* where struct statx has the two alignments, and how long it is */
    DIO_OFFSET = 156,
    STATX_BYTES = 256
};

int tio_pages_resident(const void *ptr, size_t nbytes, uint64_t *resident)
{
    unsigned char state[RESIDENT_PAGES];
    uintptr_t page = page_size(), at = (uintptr_t)ptr & ~(page - 1), end = (uintptr_t)ptr + nbytes;
    *resident = 0;
    while (at < end) {
        uintptr_t n = (end - at + page - 1) / page;
        if (n > RESIDENT_PAGES)
            n = RESIDENT_PAGES;
        if (mincore((void *)at, n * page, state))
            return errno;
        for (uintptr_t i = 0; i < n; i++)
            *resident += (state[i] & 1) * (uint64_t)page;
        at += n * page;
    }
    if (*resident > nbytes)
        *resident = nbytes;
    return 0;
}

int tio_pages_cached(int fd, uint64_t offset, uint64_t nbytes, uint64_t *cached)
{
    uint64_t range[2] = {offset, nbytes}, counts[5] = {0};
    *cached = 0;
    if (nbytes == 0)
        return 0;
    if (syscall(CACHESTAT, fd, range, counts, 0))
        return errno;
    *cached = counts[0] * (uint64_t)page_size();
    if (*cached > nbytes)
        *cached = nbytes;
    return 0;
}

int tio_pages_direct(int fd, uint32_t *memory, uint32_t *offset)
{
#ifdef SYS_statx
    unsigned char found[STATX_BYTES];
    uint32_t mask;
    memset(found, 0, sizeof found);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIO, found))
        return errno;
    memcpy(&mask, found, sizeof mask);
    if (!(mask & STATX_DIO))
        return ENOSYS;
    memcpy(memory, found + DIO_MEMORY, sizeof *memory);
    memcpy(offset, found + DIO_OFFSET, sizeof *offset);
    return 0;
#else
    (void)fd, (void)memory, (void)offset;
    return ENOSYS;
#endif
}
#else
int tio_pages_resident(const void *ptr, size_t nbytes, uint64_t *resident)
{
    (void)ptr, (void)nbytes, (void)resident;
    return ENOSYS;
}

int tio_pages_cached(int fd, uint64_t offset, uint64_t nbytes, uint64_t *cached)
{
    (void)fd, (void)offset, (void)nbytes, (void)cached;
    return ENOSYS;
}

int tio_pages_direct(int fd, uint32_t *memory, uint32_t *offset)
{
    (void)fd, (void)memory, (void)offset;
    return ENOSYS;
}
#endif

void tio_pages_copy(void *target, const void *source, size_t nbytes)
{
    memcpy(target, source, nbytes);
}
