/* The spill file on disks that are full, slow to promise room, limited or broken.
 * Linked with --wrap for the system calls, so that they fail as they are told to. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(ok)                                                     \
    do {                                                              \
        if (!(ok)) {                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #ok);  \
            exit(1);                                                  \
        }                                                             \
    } while (0)

enum { BYTES = 300000 };

static int promise_error, promises, interrupts; /* of fallocate */
static int64_t disk = INT64_MAX; /* bytes that pwrite takes before ENOSPC */
static bool broken; /* pread and pwrite give EIO */

int __real_fallocate(int file, int mode, off_t at, off_t bytes);
ssize_t __real_pwrite(int file, const void *from, size_t n, off_t at);
ssize_t __real_pread(int file, void *to, size_t n, off_t at);

int __wrap_fallocate(int file, int mode, off_t at, off_t bytes) {
    promises++;
    errno = interrupts > 0 ? EINTR : promise_error;
    if (interrupts > 0) return interrupts--, -1;
    return promise_error ? -1 : __real_fallocate(file, mode, at, bytes);
}

ssize_t __wrap_pwrite(int file, const void *from, size_t n, off_t at) {
    errno = broken ? EIO : ENOSPC;
    if (broken || at >= disk) return -1;
    if ((int64_t)n > 7777) n = 7777; /* writes may be short */
    return __real_pwrite(file, from, n, at);
}

ssize_t __wrap_pread(int file, void *to, size_t n, off_t at) {
    errno = EIO;
    return broken ? -1 : __real_pread(file, to, n > 5555 ? 5555 : n, at);
}

static char memory[BYTES];

static plt_frame frame(plt_model *m, plt_entry *plan) {
    plt_frame f = {.model = m, .plan = plan, .file = -1};
    f.call.arena = memory;
    return f;
}

static void round_trip(plt_model *m, plt_entry *plan) {
    plt_frame f = frame(m, plan);
    CHECK(plt_spill_reserve(&f));
    struct stat found;
    CHECK(fstat(f.file, &found) == 0 && found.st_size == BYTES);
    CHECK(found.st_nlink == 0 && found.st_blocks * 512 >= BYTES);
    plt_extra e = {PLT_TO_FILE, 0, 0, BYTES, 0};
    for (int i = 0; i < BYTES; i++) memory[i] = (char)(i * 31);
    CHECK(plt_spill_write(&f, &e));
    memset(memory, 0, sizeof memory);
    CHECK(plt_spill_read(&f, &e));
    for (int i = 0; i < BYTES; i++) CHECK(memory[i] == (char)(i * 31));
    CHECK(f.file_error == 0);
    plt_spill_close(&f);
    CHECK(f.file == -1);
}

static void refused(plt_model *m, plt_entry *plan, int error) {
    plt_frame f = frame(m, plan);
    CHECK(!plt_spill_reserve(&f) && f.file_error == error);
    plt_spill_close(&f);
}

static void later_failure(plt_model *m, plt_entry *plan) {
    plt_frame f = frame(m, plan);
    plt_extra e = {PLT_TO_FILE, 0, 0, BYTES, 0};
    CHECK(plt_spill_reserve(&f));
    broken = true;
    CHECK(!plt_spill_write(&f, &e) && f.file_error == EIO);
    f.file_error = 0;
    CHECK(!plt_spill_read(&f, &e) && f.file_error == EIO);
    broken = false;
    plt_spill_close(&f);
}

int main(int count, char **given) {
    CHECK(count == 2);
    plt_model m = {.spill_folder = given[1]};
    plt_entry plan = {.file_bytes = BYTES};
    plt_entry none = {0};
    plt_frame f = frame(&m, &none);
    CHECK(plt_spill_reserve(&f) && f.file == -1 && promises == 0);
    round_trip(&m, &plan);
    CHECK(promises == 1);
    interrupts = 3;
    round_trip(&m, &plan);
    promise_error = ENOSPC;
    refused(&m, &plan, ENOSPC);
    promise_error = EOPNOTSUPP; /* the room is taken by writing */
    round_trip(&m, &plan);
    disk = BYTES / 2;
    refused(&m, &plan, ENOSPC);
    disk = INT64_MAX;
    promise_error = 0;
    later_failure(&m, &plan);
    struct rlimit before, most;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    most = (struct rlimit){BYTES - 1, before.rlim_max};
    CHECK(setrlimit(RLIMIT_FSIZE, &most) == 0);
    refused(&m, &plan, EFBIG); /* and no signal has ended this process */
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    m.spill_folder = "/no/such/folder";
    refused(&m, &plan, ENOENT);
    puts("ok");
    return 0;
}
