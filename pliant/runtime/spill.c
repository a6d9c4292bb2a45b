/* The file of spilled buffers: made when a call first spills, without a name, and gone
 * with the call. */
#define _GNU_SOURCE
#include "internal.h"

#ifndef PLT_NO_FILES

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

bool plt_spill_write(plt_frame *f, const plt_extra *e) {
    if (f->file < 0 && !open_file(f)) return false;
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

bool plt_spill_write(plt_frame *f, const plt_extra *e) {
    (void)e;
    f->file_error = 1;
    return false;
}

bool plt_spill_read(plt_frame *f, const plt_extra *e) { return plt_spill_write(f, e); }

void plt_spill_close(plt_frame *f) { (void)f; }

#endif
