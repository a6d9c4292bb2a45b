/* The file of spilled buffers. It is created without a name before the first kernel of
 * a call that spills, and disappears with the call. Its blocks are allocated when it is
 * created, so that a full disk, a quota or a limit on file sizes fails the call before
 * it has changed anything. Only an I/O error can fail it later. */
#define _GNU_SOURCE
#include "internal.h"

#ifndef PLT_NO_FILES

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#define PLT_LONGEST_PATH 4096

static bool fail(plt_frame *f) {
    f->file_error = errno ? errno : EIO;
    return false;
}

static bool open_file(plt_frame *f) {
    char path[PLT_LONGEST_PATH];
    const char *folder = f->model->spill_folder;
#ifdef O_TMPFILE
    f->file = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (f->file >= 0) return true;
#endif
    int length = snprintf(path, sizeof path, "%s/pliant-spill-XXXXXX", folder);
    if (length < 0 || length >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return fail(f);
    }
    f->file = mkstemp(path);
    if (f->file < 0) return fail(f);
    fcntl(f->file, F_SETFD, FD_CLOEXEC);
    unlink(path);
    return true;
}

int plt_folder_in_memory(const char *folder) {
#ifdef __linux__
    struct statfs found;
    if (statfs(folder, &found) != 0) return 0;
    switch ((uint32_t)found.f_type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case HUGETLBFS_MAGIC: return 1;
    default: return 0;
    }
#else
    (void)folder;
    return 0;
#endif
}

/* Writes zeros, to allocate blocks on file systems without fallocate. */
static bool fill(int file, int64_t bytes) {
    static const char zeros[1 << 16];
    for (int64_t done = 0; done < bytes;) {
        int64_t left = bytes - done;
        size_t part = left < (int64_t)sizeof zeros ? (size_t)left : sizeof zeros;
        ssize_t n = pwrite(file, zeros, part, (off_t)done);
        if (n > 0) {
            done += n;
        } else if (n == 0 || errno != EINTR) {
            if (n == 0) errno = ENOSPC;
            return false;
        }
    }
    return true;
}

static bool take_room(int file, int64_t bytes) {
#ifdef __linux__
    while (fallocate(file, 0, 0, (off_t)bytes) != 0) {
        if (errno == EOPNOTSUPP || errno == ENOSYS) return fill(file, bytes);
        if (errno != EINTR) return false;
    }
    return true;
#else
    return fill(file, bytes);
#endif
}

bool plt_spill_reserve(plt_frame *f) {
    int64_t bytes = f->plan->file_bytes;
    if (bytes == 0) return true;
    /* Checked first, because exceeding it raises a signal that ends most processes. */
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY &&
        most.rlim_cur < (uint64_t)bytes) {
        errno = EFBIG;
        return fail(f);
    }
    return open_file(f) && (take_room(f->file, bytes) || fail(f));
}

bool plt_spill_write(plt_frame *f, const plt_extra *e) {
    const char *from = f->call.arena + e->offset;
    for (int64_t done = 0; done < e->bytes;) {
        size_t left = (size_t)(e->bytes - done);
        ssize_t n = pwrite(f->file, from + done, left, (off_t)(e->at + done));
        if (n > 0) {
            done += n;
        } else if (n == 0 || errno != EINTR) {
            if (n == 0) errno = ENOSPC;
            return fail(f);
        }
    }
    return true;
}

bool plt_spill_read(plt_frame *f, const plt_extra *e) {
    char *to = f->call.arena + e->offset;
    for (int64_t done = 0; done < e->bytes;) {
        size_t left = (size_t)(e->bytes - done);
        ssize_t n = pread(f->file, to + done, left, (off_t)(e->at + done));
        if (n > 0) {
            done += n;
        } else if (n == 0 || errno != EINTR) {
            if (n == 0) errno = EIO;
            return fail(f);
        }
    }
    return true;
}

void plt_spill_close(plt_frame *f) {
    if (f->file >= 0) close(f->file);
    f->file = -1;
}

#else /* plans of this build never spill */

int plt_folder_in_memory(const char *folder) {
    (void)folder;
    return 0;
}

bool plt_spill_reserve(plt_frame *f) {
    f->file_error = f->plan->file_bytes != 0;
    return !f->file_error;
}

bool plt_spill_write(plt_frame *f, const plt_extra *e) {
    (void)e;
    f->file_error = 1;
    return false;
}

bool plt_spill_read(plt_frame *f, const plt_extra *e) { return plt_spill_write(f, e); }

void plt_spill_close(plt_frame *f) { (void)f; }

#endif
