/* Running extremes with their places, and running log-sum-exp, along an axis.
 *
 * The columns behind the axis go in blocks of BLOCK; each block is a unit of work. */
#include <math.h>
#include <string.h>

#include "keys.h"

enum { BLOCK = 64 };

typedef struct columns {
    int64_t dtype, bytes, n, inner, least;
    const char *x;
    char *values;
    int64_t *places;
} columns;

static int64_t blocks(int64_t inner) { return (inner + BLOCK - 1) / BLOCK; }

/* Keys by which the wanted element is the largest; a NaN always is. */
static void wanted_keys(const columns *c, uint64_t *keys, const char *x, int64_t count) {
    uint64_t flip = plt_flip(c->dtype);
    if (c->bytes == 8) {
        plt_wide_keys(keys, x, count, 1, c->dtype, 0);
    } else {
        uint32_t narrow[BLOCK];
        plt_narrow_keys(narrow, x, count, 1, c->dtype, 0);
        for (int64_t j = 0; j < count; j++) keys[j] = narrow[j];
    }
    if (!c->least) return;
    int64_t is_float = c->dtype <= PLT_BF16;
    for (int64_t j = 0; j < count; j++)
        keys[j] = is_float && keys[j] == flip ? flip : keys[j] ^ flip;
}

static void copy_row(const columns *c, char *to, const char *from, int64_t n,
                     const int64_t *places) {
    int64_t step = 1, k = n;
    PLT_PICK_ANY(c->bytes, places[i])
}

/* One row, along which elements are adjacent. */
static void extreme_row(const columns *c, int64_t start) {
    const char *x = c->x + start * c->bytes;
    int64_t *places = c->places + start, at = 0;
    uint64_t keys[BLOCK], best = 0;
    for (int64_t i = 0; i < c->n; i += BLOCK) {
        int64_t count = plt_min(BLOCK, c->n - i);
        wanted_keys(c, keys, x + i * c->bytes, count);
        for (int64_t j = 0; j < count; j++) {
            int better = keys[j] >= best;
            best = better ? keys[j] : best;
            at = better ? i + j : at;
            places[i + j] = at;
        }
    }
    copy_row(c, c->values + start * c->bytes, x, c->n, places);
}

static void extreme_columns(const columns *c, int64_t start, int64_t count) {
    uint64_t best[BLOCK] = {0}, keys[BLOCK];
    int64_t at[BLOCK] = {0};
    for (int64_t i = 0; i < c->n; i++) {
        int64_t here = start + i * c->inner, size = c->bytes;
        wanted_keys(c, keys, c->x + here * size, count);
        for (int64_t j = 0; j < count; j++) {
            int better = keys[j] >= best[j];
            best[j] = better ? keys[j] : best[j];
            at[j] = better ? i : at[j];
            c->places[here + j] = at[j];
        }
        for (int64_t j = 0; j < count; j++) {
            int64_t source = start + at[j] * c->inner + j;
            memcpy(c->values + (here + j) * size, c->x + source * size, (size_t)size);
        }
    }
}

static void extreme(void *args, int64_t begin, int64_t end, int64_t worker) {
    const columns *c = args;
    int64_t across = blocks(c->inner);
    (void)worker;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t column = unit % across * BLOCK;
        int64_t start = unit / across * c->n * c->inner + column;
        if (c->inner == 1)
            extreme_row(c, start);
        else
            extreme_columns(c, start, plt_min(BLOCK, c->inner - column));
    }
}

PLT_API void plt_running_extreme(plt_call *call, int64_t dtype, int64_t least,
                                 int64_t outer, int64_t n, int64_t inner, const void *x,
                                 void *values, int64_t *places) {
    columns c = {dtype, plt_bytes(dtype), n, inner, least, x, values, places};
    int64_t each = n * plt_min(inner, BLOCK);
    plt_parallel(call, extreme, &c, outer * blocks(inner), plt_grain(8192, each));
}

/* ---- log-sum-exp ---------------------------------------------------------------- */

/* The sum so far is exp(peak) * sum, with peak the largest element: no term overflows. */
#define LOGSUMEXP(type, name)                                                      \
    static void name(void *args, int64_t begin, int64_t end, int64_t worker) {     \
        const columns *c = args;                                                   \
        (void)worker;                                                              \
        for (int64_t unit = begin; unit < end; unit++) {                           \
            int64_t start = unit / c->inner * c->n * c->inner + unit % c->inner;   \
            const type *x = (const type *)c->x + start;                            \
            type *out = (type *)c->values + start;                                 \
            double peak = -INFINITY, sum = 0;                                      \
            for (int64_t i = 0; i < c->n; i++) {                                   \
                double e = x[i * c->inner];                                        \
                if (e == peak) {                                                   \
                    sum += e == -INFINITY ? 0 : 1;                                 \
                } else if (e > peak) {                                             \
                    sum = sum * exp(peak - e) + 1;                                 \
                    peak = e;                                                      \
                } else {                                                           \
                    sum += exp(e - peak);                                          \
                }                                                                  \
                out[i * c->inner] = (type)(peak + log(sum));                       \
            }                                                                      \
        }                                                                          \
    }

LOGSUMEXP(double, logsumexp_f64)
LOGSUMEXP(float, logsumexp_f32)

PLT_API void plt_running_logsumexp(plt_call *call, int64_t dtype, int64_t outer,
                                   int64_t n, int64_t inner, const void *x, void *out) {
    columns c = {dtype, plt_bytes(dtype), n, inner, 0, x, out, 0};
    plt_task task = dtype == PLT_F64 ? logsumexp_f64 : logsumexp_f32;
    plt_parallel(call, task, &c, outer * inner, plt_grain(512, n));
}
