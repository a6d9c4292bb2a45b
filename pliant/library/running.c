/* Running extremes with their places, and running log-sum-exp, along an axis.
 *
 * The columns after the axis are cut into blocks of BLOCK; each is a unit of work. */
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
#define WANTED(name, type, load)                                                     \
    static void name(const columns *c, type *keys, const char *x, int64_t count) {   \
        type flip = (type)plt_flip(c->dtype);                                        \
        load(keys, x, count, 1, c->dtype, 0);                                        \
        if (!c->least) return;                                                       \
        type nan = c->dtype <= PLT_BF16 ? flip : 0;                                  \
        if (nan)                                                                     \
            for (int64_t j = 0; j < count; j++)                                      \
                keys[j] = keys[j] == nan ? nan : keys[j] ^ flip;                     \
        else                                                                         \
            for (int64_t j = 0; j < count; j++) keys[j] ^= flip;                     \
    }

WANTED(narrow_wanted, uint32_t, plt_narrow_keys)
WANTED(wide_wanted, uint64_t, plt_wide_keys)

/* One row, along which elements are adjacent. Most blocks have nothing better. */
#define EXTREME_ROW(name, element, key, wanted)                                      \
    static void name(const columns *c, int64_t start) {                              \
        const element *x = (const element *)c->x + start;                            \
        element *values = (element *)c->values + start, value = x[0];                \
        int64_t *places = c->places + start, at = 0;                                 \
        key keys[BLOCK], best = 0;                                                   \
        for (int64_t i = 0; i < c->n; i += BLOCK) {                                  \
            int64_t count = plt_min(BLOCK, c->n - i);                                \
            key any = 0;                                                             \
            wanted(c, keys, (const char *)(x + i), count);                           \
            for (int64_t j = 0; j < count; j++) any |= keys[j] >= best;              \
            for (int64_t j = 0; !any && j < count; j++) places[i + j] = at;          \
            for (int64_t j = 0; !any && j < count; j++) values[i + j] = value;       \
            for (int64_t j = 0; any && j < count; j++) {                             \
                if (keys[j] >= best) {                                               \
                    best = keys[j];                                                  \
                    at = i + j;                                                      \
                    value = x[at];                                                   \
                }                                                                    \
                places[i + j] = at;                                                  \
                values[i + j] = value;                                               \
            }                                                                        \
        }                                                                            \
    }

/* Rows side by side: element i of all of them, then the next. */
#define EXTREME_COLUMNS(name, element, key, wanted)                                  \
    static void name(const columns *c, int64_t start, int64_t count) {               \
        key best[BLOCK] = {0}, keys[BLOCK];                                          \
        element value[BLOCK];                                                        \
        int64_t at[BLOCK] = {0};                                                     \
        memset(value, 0, sizeof value);                                              \
        for (int64_t i = 0; i < c->n; i++) {                                         \
            int64_t here = start + i * c->inner;                                     \
            const element *x = (const element *)c->x + here;                         \
            element *values = (element *)c->values + here;                           \
            wanted(c, keys, (const char *)x, count);                                 \
            for (int64_t j = 0; j < count; j++) {                                    \
                int better = keys[j] >= best[j];                                     \
                best[j] = better ? keys[j] : best[j];                                \
                value[j] = better ? x[j] : value[j];                                 \
                at[j] = better ? i : at[j];                                          \
            }                                                                        \
            memcpy(values, value, sizeof *value * (size_t)count);                    \
            memcpy(c->places + here, at, sizeof *at * (size_t)count);                \
        }                                                                            \
    }

#define EXTREME(bytes, element, key, wanted)                       \
    EXTREME_ROW(row_of_##bytes, element, key, wanted)              \
    EXTREME_COLUMNS(columns_of_##bytes, element, key, wanted)

EXTREME(1, uint8_t, uint32_t, narrow_wanted)
EXTREME(2, uint16_t, uint32_t, narrow_wanted)
EXTREME(4, uint32_t, uint32_t, narrow_wanted)
EXTREME(8, uint64_t, uint64_t, wide_wanted)

static void extreme_row(const columns *c, int64_t start) {
    switch (c->bytes) {
    case 8: row_of_8(c, start); break;
    case 4: row_of_4(c, start); break;
    case 2: row_of_2(c, start); break;
    default: row_of_1(c, start);
    }
}

static void extreme_columns(const columns *c, int64_t start, int64_t count) {
    switch (c->bytes) {
    case 8: columns_of_8(c, start, count); break;
    case 4: columns_of_4(c, start, count); break;
    case 2: columns_of_2(c, start, count); break;
    default: columns_of_1(c, start, count);
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
    if (n == 0) return;
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
