/* SPDX-License-Identifier: Apache-2.0 */
/* Room for a file that is to be written. Returns 0 or an errno. */
#ifndef TENSORIO_HOST_ROOM_H
#define TENSORIO_HOST_ROOM_H

#include <stdint.h>

/* Reserve blocks for the first nbytes of a file and make it that long, in one step: fallocate(2) of Linux 2.6.23, and
 * nothing but it: posix_fallocate(3) of glibc writes a byte to each block where the filesystem can't do it, which costs
 * more than the file itself. EOPNOTSUPP: the filesystem can't; ENOSYS: the system can't; EINTR: a signal came, try
 * again. */
int tio_room_reserve(int fd, uint64_t nbytes);

#endif
