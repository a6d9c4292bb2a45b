/* Images between their elements: linear interpolation at points.
 *
 * A point has four elements around it, two and two of which are neighbours in memory:
 * they are read together, four points at a time, which is faster than gathering them
 * one by one. Points come in blocks, whose places and shares are computed once for all
 * channels. Points at the edge of the image are computed again, by themselves. */
#include <string.h>

#include "library.h"

enum { BLOCK = 128 };

typedef struct image {
    int64_t channels, height, width, points;
    const void *x;
    const int32_t *rows, *columns;
    const void *down, *across;
    void *out;
    void (*block)(const struct image *m, int64_t batch, int64_t start, int64_t count);
} image;

#define REAL float
#define NAMED(name) name##_f32
#include "sample_real.h"
#undef REAL
#undef NAMED
#define REAL double
#define NAMED(name) name##_f64
#include "sample_real.h"

static int64_t blocks(int64_t points) { return (points + BLOCK - 1) / BLOCK; }

static void blocks_of_points(void *args, int64_t begin, int64_t end, int64_t worker) {
    const image *m = args;
    int64_t each = blocks(m->points);
    (void)worker;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t start = unit % each * BLOCK;
        m->block(m, unit / each, start, plt_min(BLOCK, m->points - start));
    }
}

PLT_API void plt_sample(plt_call *call, int64_t dtype, int64_t batch, int64_t channels,
                        int64_t height, int64_t width, int64_t points, const void *x,
                        const int32_t *rows, const int32_t *columns, const void *down,
                        const void *across, void *out) {
    image m = {channels, height, width,  points, x,
               rows,     columns, down, across, out,
               dtype == PLT_F64 ? block_f64 : block_f32};
    plt_parallel(call, blocks_of_points, &m, batch * blocks(points),
                 plt_grain(8192, BLOCK * channels));
}
