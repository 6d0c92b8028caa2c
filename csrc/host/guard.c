/* SPDX-License-Identifier: Apache-2.0 */
/* See guard.h. A slot is free, being written, or live; the handler looks at live ones only, so that no lock is needed. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "guard.h"

#include <errno.h>
#include <string.h>

#ifdef _WIN32
int tio_guard_add(const void *ptr, size_t nbytes, const char *name, size_t name_nbytes)
{
    (void)ptr, (void)nbytes, (void)name, (void)name_nbytes;
    return -1;
}

void tio_guard_remove(int slot)
{
    (void)slot;
}

int tio_guard_install(void)
{
    return ENOSYS;
}

int tio_guard_uninstall(void)
{
    return 0;
}
#else
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FREE, WRITTEN, LIVE };
enum { POPULATE_READ = 22, DIGITS = 20 };

typedef struct {
    atomic_int state;
    uintptr_t begin;
    size_t nbytes;
    size_t name_nbytes;
    char name[TIO_GUARD_NAME];
} slot_row;

static slot_row table[TIO_GUARD_SLOTS];
static atomic_int hint; /* where the search for a free slot begins */
static struct sigaction before;
static atomic_int installed;
static atomic_int handed; /* whoever was there before us has the signal */

int tio_guard_add(const void *ptr, size_t nbytes, const char *name, size_t name_nbytes)
{
    int first = atomic_load(&hint);
    for (int i = 0; i < TIO_GUARD_SLOTS; i++) {
        int at = (first + i) % TIO_GUARD_SLOTS, expected = FREE;
        slot_row *row = &table[at];
        if (!atomic_compare_exchange_strong(&row->state, &expected, WRITTEN))
            continue;
        row->begin = (uintptr_t)ptr;
        row->nbytes = nbytes;
        row->name_nbytes = name_nbytes < TIO_GUARD_NAME ? name_nbytes : TIO_GUARD_NAME;
        memcpy(row->name, name + (name_nbytes - row->name_nbytes), row->name_nbytes);
        atomic_store(&row->state, LIVE);
        atomic_store(&hint, (at + 1) % TIO_GUARD_SLOTS);
        return at;
    }
    return -1;
}

void tio_guard_remove(int slot)
{
    if (slot >= 0 && slot < TIO_GUARD_SLOTS)
        atomic_store(&table[slot].state, FREE);
}

typedef struct {
    char text[TIO_GUARD_NAME + 512];
    size_t nbytes;
} line;

static void put(line *out, const char *text, size_t nbytes)
{
    size_t room = sizeof out->text - out->nbytes;
    if (nbytes > room)
        nbytes = room;
    memcpy(out->text + out->nbytes, text, nbytes);
    out->nbytes += nbytes;
}

static void put_text(line *out, const char *text)
{
    put(out, text, strlen(text));
}

static void put_number(line *out, uint64_t value)
{
    char digits[DIGITS];
    size_t at = DIGITS;
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    put(out, digits + at, DIGITS - at);
}

static void report(const slot_row *row, uint64_t offset)
{
    line out = {.nbytes = 0};
    put_text(&out, "tensorio: ");
    put(&out, row->name, row->name_nbytes);
    put_text(
        &out,
        ": the file was cut short, or its disk failed, while it is mapped: what was at offset ");
    put_number(&out, offset);
    put_text(&out, " of ");
    put_number(&out, row->nbytes);
    put_text(&out, " bytes is gone. Load with mmap=False what others write to in place; a writer "
                   "that renames a new "
                   "file over the old one does no harm\n");
    for (size_t at = 0; at < out.nbytes;) {
        ssize_t n = write(STDERR_FILENO, out.text + at, out.nbytes - at);
        if (n <= 0)
            return;
        at += (size_t)n;
    }
}

/* Somebody's handler saw the fault first and raised the signal again, so that its address is lost: a mapping whose last
 * page can't be had is the one. */
static void report_by_size(void)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < TIO_GUARD_SLOTS; i++) {
        const slot_row *row = &table[i];
        if (atomic_load(&table[i].state) != LIVE || row->nbytes == 0)
            continue;
        uintptr_t last = (row->begin + row->nbytes - 1) & ~(page - 1);
        if (madvise((void *)last, page, POPULATE_READ) && errno == EFAULT) {
            report(row, last - row->begin);
            return;
        }
    }
}

static void on_bus(int number, siginfo_t *info, void *context)
{
    int kept = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    (void)context;
    if (info->si_code <= 0 && atomic_load(&handed)) {
        /* It came around: who was before us took us for the one before it. All have spoken. */
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    if (!atomic_load(
            &installed)) { /* closed, and somebody's predecessor all the same: nothing to say */
    } else if (info->si_code > 0) {
        for (int i = 0; i < TIO_GUARD_SLOTS; i++)
            if (atomic_load(&table[i].state) == LIVE && at - table[i].begin < table[i].nbytes)
                report(&table[i], at - table[i].begin);
    } else {
        report_by_size();
    }
    atomic_store(&handed, 1);
    sigaction(number, &before, NULL);
    atomic_store(&installed, 0);
    if (info->si_code <= 0) /* nothing faults again by itself */
        raise(number);
    errno = kept;
}

static int is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus;
}

int tio_guard_install(void)
{
    struct sigaction ours, found;
    if (atomic_exchange(&installed, 1))
        return 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_bus;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    atomic_store(&handed, 0);
    if (sigaction(SIGBUS, NULL, &found) == 0) {
        if (!is_ours(&found)) /* else somebody put us back, and who was before us is known */
            before = found;
        if (sigaction(SIGBUS, &ours, NULL) == 0)
            return 0;
    }
    atomic_store(&installed, 0);
    return errno;
}

int tio_guard_uninstall(void)
{
    struct sigaction now;
    if (!atomic_exchange(&installed, 0))
        return 0;
    if (sigaction(SIGBUS, NULL, &now))
        return errno;
    if (!is_ours(&now))
        return 0; /* whoever replaced it may have kept it as its own predecessor */
    return sigaction(SIGBUS, &before, NULL) ? errno : 0;
}
#endif
