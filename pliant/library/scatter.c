/* Parts of a tensor replaced: rows at places, in order, or a window.
 *
 * The result may be the tensor itself: then only what is replaced is touched. */
#include <string.h>

#include "library.h"

#define LEVELS 4 /* axes of a window */

static void copy_range(char *out, const char *x, int64_t begin, int64_t end) {
    if (out != x) memcpy(out + begin, x + begin, (size_t)(end - begin));
}

static void put_row(char *to, const char *from, int64_t bytes) {
    if (bytes == 8)
        memcpy(to, from, 8);
    else if (bytes == 4)
        memcpy(to, from, 4);
    else
        memcpy(to, from, (size_t)bytes);
}

/* ---- rows ---- */

typedef struct placed_rows {
    int64_t bytes, rows, count;
    const char *x, *updates;
    const int64_t *places;
    char *out;
} placed_rows;

/* A worker has a range of the result's rows, and looks for those among all places. */
static void write_rows(void *args, int64_t begin, int64_t end, int64_t worker) {
    const placed_rows *p = args;
    int64_t bytes = p->bytes;
    (void)worker;
    copy_range(p->out, p->x, begin * bytes, end * bytes);
    for (int64_t first = begin; first < end;) {
        int64_t matrix = first / p->rows, start = matrix * p->rows;
        for (int64_t i = 0; i < p->count; i++) {
            int64_t row = start + p->places[i];
            if (row < begin || row >= end) continue;
            put_row(p->out + row * bytes, p->updates + (matrix * p->count + i) * bytes,
                    bytes);
        }
        first = start + p->rows;
    }
}

PLT_API void plt_scatter_rows(plt_call *call, int64_t bytes, int64_t outer, int64_t rows,
                              int64_t count, const void *x, const int64_t *places,
                              const void *updates, void *out) {
    placed_rows p = {bytes, rows, count, x, updates, places, out};
    int64_t grain = plt_max(plt_grain(1 << 16, bytes), count / 4);
    /* In place, a row that stays as it is costs nothing. */
    if (x == out) grain = plt_max(grain, rows * plt_grain(1 << 16, bytes * count));
    plt_parallel(call, write_rows, &p, outer * rows, grain);
}

/* ---- windows ---- */

typedef struct window {
    int64_t bytes, size[LEVELS], width[LEVELS], start[LEVELS];
    const char *x, *part;
    char *out;
} window;

static void copy_bytes(void *args, int64_t begin, int64_t end, int64_t worker) {
    const window *w = args;
    (void)worker;
    copy_range(w->out, w->x, begin, end);
}

/* Runs of the last level. */
static void write_runs(void *args, int64_t begin, int64_t end, int64_t worker) {
    const window *w = args;
    int64_t run = w->width[LEVELS - 1] * w->bytes;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = i, at = w->start[LEVELS - 1], stride = w->size[LEVELS - 1];
        for (int k = LEVELS - 2; k >= 0; k--) {
            at += (w->start[k] + rest % w->width[k]) * stride;
            rest /= w->width[k];
            stride *= w->size[k];
        }
        put_row(w->out + at * w->bytes, w->part + i * run, run);
    }
}

PLT_API void plt_overwrite(plt_call *call, int64_t bytes, int64_t size0, int64_t size1,
                           int64_t size2, int64_t size3, int64_t width0, int64_t width1,
                           int64_t width2, int64_t width3, int64_t start0,
                           int64_t start1, int64_t start2, int64_t start3, const void *x,
                           const void *part, void *out) {
    window w = {bytes,
                {size0, size1, size2, size3},
                {width0, width1, width2, width3},
                {start0, start1, start2, start3},
                x,
                part,
                out};
    if (x != out) {
        int64_t all = bytes * size0 * size1 * size2 * size3;
        plt_parallel(call, copy_bytes, &w, all, 1 << 16);
    }
    if (width3 == 0) return;
    plt_parallel(call, write_runs, &w, width0 * width1 * width2,
                 plt_grain(1 << 16, width3 * bytes));
}
