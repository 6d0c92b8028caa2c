/* SPDX-License-Identifier: Apache-2.0 */
/* A library to be loaded before the C library (LD_PRELOAD): it counts the system calls that change files under one
 * folder, and lets the k-th of them fail, or ends the process there, or cuts the power of its filesystem.
 *
 * cc -shared -fPIC -O1 -o shim.so shim.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, KILL = -2, CUT = -3 }; /* instead of an errno */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define GO_DOWN 0x8004587dUL /* FS_IOC_SHUTDOWN of xfs_fs.h, which ext4 has, too */

static char folder[PATH_MAX]; /* empty: nothing is watched */
static int failing, sticky, cut_flag;
static long at, count;
static char fired[32];

/* From now on, let the k-th call (all later ones, too, if `forever`) fail with an errno, or in another way. */
__attribute__((visibility("default"))) void shim_arm(const char *path, long k, int how, int forever,
                                                     int flag)
{
    at = k, failing = how, sticky = forever, cut_flag = flag, count = 0;
    fired[0] = 0;
    snprintf(folder, sizeof folder, "%s", path);
}

__attribute__((visibility("default"))) void shim_disarm(void)
{
    folder[0] = 0;
}

/* How many calls were counted since. */
__attribute__((visibility("default"))) long shim_count(void)
{
    return count;
}

/* Which call it was that failed first; empty if none did. */
__attribute__((visibility("default"))) const char *shim_fired(void)
{
    return fired;
}

static int is_watched(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int is_watched_at(int dirfd, const char *path)
{
    char name[40], full[2 * PATH_MAX];
    ssize_t length;
    if (!folder[0] || !path)
        return 0;
    if (path[0] == '/')
        return is_watched(path);
    if (dirfd == AT_FDCWD)
        snprintf(name, sizeof name, "/proc/self/cwd");
    else
        snprintf(name, sizeof name, "/proc/self/fd/%d", dirfd);
    length = readlink(name, full, PATH_MAX);
    if (length <= 0)
        return 0;
    snprintf(full + length, sizeof full - (size_t)length, "/%s", path);
    return is_watched(full);
}

static int is_watched_fd(int fd)
{
    return folder[0] && fd >= 0 && is_watched_at(fd, "");
}

/* End the filesystem of the watched folder, then this process. */
__attribute__((visibility("default"))) void shim_cut(void)
{
    int fd = REAL(open)(folder, O_RDONLY);
    ioctl(fd, GO_DOWN, &cut_flag);
    kill(getpid(), SIGKILL);
}

/* Count a call; return whether it is to fail, with errno set. */
static int fails(const char *name)
{
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    int goes_on = sticky && at && now > at && strcmp(name, "unlink") && strcmp(name, "rmdir");
    if (now != at && !goes_on) /* a full or broken disk still lets go of files */
        return 0;
    if (!fired[0])
        snprintf(fired, sizeof fired, "%s", name);
    if (failing == KILL)
        kill(getpid(), SIGKILL);
    if (failing == CUT)
        shim_cut();
    errno = failing > 0 ? failing : 0;
    return 1;
}

/* The call proper, unless it is one that is to fail: with -1, if there is an errno to fail with. */
#define PASS_OR_FAIL(watched, name, call)                                                          \
    do {                                                                                           \
        if ((watched) && fails(name) && failing > 0)                                               \
            return -1;                                                                             \
        return call;                                                                               \
    } while (0)

static int is_writing(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || (flags & O_DIRECTORY);
}

#define OPEN(name, parameters, dirfd, ...)                                                         \
    int name parameters                                                                            \
    {                                                                                              \
        mode_t mode = 0;                                                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                       \
            va_list rest;                                                                          \
            va_start(rest, flags);                                                                 \
            mode = va_arg(rest, mode_t);                                                           \
            va_end(rest);                                                                          \
        }                                                                                          \
        PASS_OR_FAIL(is_writing(flags) && is_watched_at(dirfd, path), "open",                      \
                     REAL(name)(__VA_ARGS__));                                                     \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
OPEN(openat, (int dirfd, const char *path, int flags, ...), dirfd, dirfd, path, flags, mode)
OPEN(openat64, (int dirfd, const char *path, int flags, ...), dirfd, dirfd, path, flags, mode)

FILE *fopen64(const char *path, const char *mode)
{
    if (is_watched_at(AT_FDCWD, path) && mode[0] != 'r' && fails("open") && failing > 0)
        return NULL;
    return REAL(fopen64)(path, mode);
}

FILE *fopen(const char *path, const char *mode)
{
    if (is_watched_at(AT_FDCWD, path) && mode[0] != 'r' && fails("open") && failing > 0)
        return NULL;
    return REAL(fopen)(path, mode);
}

/* A write that fails, or takes half of what it is given. */
#define WRITE(name, parameters, ...)                                                               \
    ssize_t name parameters                                                                        \
    {                                                                                              \
        if (is_watched_fd(fd) && fails("write")) {                                                 \
            if (failing > 0)                                                                       \
                return -1;                                                                         \
            if (failing == SHORT && nbytes > 1)                                                    \
                nbytes /= 2;                                                                       \
        }                                                                                          \
        return REAL(name)(__VA_ARGS__);                                                            \
    }

WRITE(write, (int fd, const void *data, size_t nbytes), fd, data, nbytes)
WRITE(pwrite, (int fd, const void *data, size_t nbytes, off_t offset), fd, data, nbytes, offset)
WRITE(pwrite64, (int fd, const void *data, size_t nbytes, off64_t offset), fd, data, nbytes, offset)

ssize_t writev(int fd, const struct iovec *parts, int n)
{
    if (is_watched_fd(fd) && fails("write")) {
        if (failing > 0)
            return -1;
        if (failing == SHORT && n && parts[0].iov_len > 1)
            return REAL(write)(fd, parts[0].iov_base, parts[0].iov_len / 2);
    }
    return REAL(writev)(fd, parts, n);
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t nbytes)
{
    extern ssize_t sendfile64(int, int, off64_t *, size_t);
    PASS_OR_FAIL(is_watched_fd(to), "write", REAL(sendfile64)(to, from, offset, nbytes));
}

ssize_t copy_file_range(int from, off64_t *at_from, int to, off64_t *at_to, size_t nbytes,
                        unsigned flags)
{
    PASS_OR_FAIL(is_watched_fd(to), "write",
                 REAL(copy_file_range)(from, at_from, to, at_to, nbytes, flags));
}

int ftruncate(int fd, off_t nbytes)
{
    PASS_OR_FAIL(is_watched_fd(fd), "ftruncate", REAL(ftruncate)(fd, nbytes));
}
int ftruncate64(int fd, off64_t nbytes)
{
    PASS_OR_FAIL(is_watched_fd(fd), "ftruncate", REAL(ftruncate64)(fd, nbytes));
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
    PASS_OR_FAIL(is_watched_fd(fd), "fallocate", REAL(fallocate)(fd, mode, offset, nbytes));
}

int fallocate64(int fd, int mode, off64_t offset, off64_t nbytes)
{
    PASS_OR_FAIL(is_watched_fd(fd), "fallocate", REAL(fallocate64)(fd, mode, offset, nbytes));
}

/* Returns the errno. */
#define POSIX_FALLOCATE(name, type)                                                                \
    int name(int fd, type offset, type nbytes)                                                     \
    {                                                                                              \
        if (is_watched_fd(fd) && fails("posix_fallocate") && failing > 0)                          \
            return failing;                                                                        \
        return REAL(name)(fd, offset, nbytes);                                                     \
    }

POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

int fsync(int fd)
{
    PASS_OR_FAIL(is_watched_fd(fd), "fsync", REAL(fsync)(fd));
}
int fdatasync(int fd)
{
    PASS_OR_FAIL(is_watched_fd(fd), "fsync", REAL(fdatasync)(fd));
}
int fchmod(int fd, mode_t mode)
{
    PASS_OR_FAIL(is_watched_fd(fd), "fchmod", REAL(fchmod)(fd, mode));
}

int chmod(const char *path, mode_t mode)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, path), "chmod", REAL(chmod)(path, mode));
}

/* Closed all the same, as Linux does it. What was only read has nothing to fail with. */
int close(int fd)
{
    int writes = folder[0] && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    int failed = writes && is_watched_fd(fd) && fails("close") && failing > 0;
    int result = REAL(close)(fd);
    if (failed) {
        errno = failing;
        return -1;
    }
    return result;
}

int rename(const char *a, const char *b)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, b), "rename", REAL(rename)(a, b));
}

int renameat(int from, const char *a, int to, const char *b)
{
    PASS_OR_FAIL(is_watched_at(to, b), "rename", REAL(renameat)(from, a, to, b));
}

int renameat2(int from, const char *a, int to, const char *b, unsigned flags)
{
    PASS_OR_FAIL(is_watched_at(to, b), "rename", REAL(renameat2)(from, a, to, b, flags));
}

int link(const char *a, const char *b)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, b), "link", REAL(link)(a, b));
}

int linkat(int from, const char *a, int to, const char *b, int flags)
{
    PASS_OR_FAIL(is_watched_at(to, b), "link", REAL(linkat)(from, a, to, b, flags));
}

int mkdir(const char *path, mode_t mode)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, path), "mkdir", REAL(mkdir)(path, mode));
}

int unlink(const char *path)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, path), "unlink", REAL(unlink)(path));
}

int unlinkat(int dirfd, const char *path, int flags)
{
    PASS_OR_FAIL(is_watched_at(dirfd, path), "unlink", REAL(unlinkat)(dirfd, path, flags));
}

int rmdir(const char *path)
{
    PASS_OR_FAIL(is_watched_at(AT_FDCWD, path), "rmdir", REAL(rmdir)(path));
}

/* Calls by number: the exchange of two names is one. */
long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_renameat2 && is_watched_at((int)a[2], (const char *)a[3]) &&
        fails("rename") && failing > 0)
        return -1;
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
