/* SPDX-License-Identifier: Apache-2.0 */
/* Names of files, where the C library of Python has no call. Returns 0 or an errno; ENOSYS where there is none. */
#ifndef TENSORIO_HOST_NAMES_H
#define TENSORIO_HOST_NAMES_H

/* Let two files or folders of one filesystem exchange their names in one step: renameat2(2) with RENAME_EXCHANGE,
 * Linux 3.15; renamex_np(2) with RENAME_SWAP, macOS 10.12. EINVAL or ENOTSUP: the filesystem can't. */
int tio_names_exchange(const char *a, const char *b);

#endif
