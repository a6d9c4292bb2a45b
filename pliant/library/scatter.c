/* Rows written at places: a copy of a matrix, some rows of it replaced in order. */
#include <string.h>

#include "library.h"

typedef struct placed_rows {
    int64_t bytes, count;
    const char *x, *updates;
    const int64_t *places;
    char *out;
} placed_rows;

/* A worker has a range of the result's rows, and looks for those among all places. */
static void write_rows(void *args, int64_t begin, int64_t end, int64_t worker) {
    const placed_rows *p = args;
    int64_t bytes = p->bytes;
    (void)worker;
    memcpy(p->out + begin * bytes, p->x + begin * bytes, (size_t)((end - begin) * bytes));
    for (int64_t i = 0; i < p->count; i++) {
        int64_t row = p->places[i];
        if (row < begin || row >= end) continue;
        char *to = p->out + row * bytes;
        const char *from = p->updates + i * bytes;
        if (bytes == 8)
            memcpy(to, from, 8);
        else if (bytes == 4)
            memcpy(to, from, 4);
        else
            memcpy(to, from, (size_t)bytes);
    }
}

PLT_API void plt_scatter_rows(plt_call *call, int64_t bytes, int64_t rows, int64_t count,
                              const void *x, const int64_t *places, const void *updates,
                              void *out) {
    placed_rows p = {bytes, count, x, updates, places, out};
    plt_parallel(call, write_rows, &p, rows, plt_max(plt_grain(1 << 16, bytes), count / 4));
}
