/* SPDX-License-Identifier: Apache-2.0 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#endif
#include "room.h"

#include <errno.h>

#if defined(__linux__)
#include <fcntl.h>

int tio_room_reserve(int fd, uint64_t nbytes)
{
    if (nbytes > INT64_MAX)
        return EFBIG;
    return fallocate(fd, 0, 0, (off_t)nbytes) ? errno : 0;
}
#else
int tio_room_reserve(int fd, uint64_t nbytes)
{
    (void)fd, (void)nbytes;
    return ENOSYS;
}
#endif
