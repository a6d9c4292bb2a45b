/* Binary search. LANES values go down together: their loads do not wait for each other. */
#include "library.h"

enum { LANES = 8 };

typedef struct queries {
    int64_t n, m, right;
    const void *sorted, *values;
    int64_t *places;
} queries;

/* Whether v is inserted after e. A NaN as v comes after everything. A row that ends in
 * NaN is not sorted by this order, so the result depends on which elements are compared:
 * as in torch, the middle of the part that is left. */
#define BEHIND(e, v) (right ? !((e) > (v)) : !((e) >= (v)))

#define SEARCH(type, name)                                                          \
    static inline void name##_lanes(const type *restrict a, int64_t n,              \
                                    const type *restrict v, int64_t *restrict out,  \
                                    int64_t count, int right) {                     \
        int64_t start[LANES] = {0}, left[LANES];                                    \
        for (int64_t l = 0; l < count; l++) left[l] = n;                            \
        for (int64_t most = n; most > 0; most /= 2) {                               \
            for (int64_t l = 0; l < count; l++) {                                   \
                int64_t half = left[l] / 2, mid = start[l] + half;                  \
                type e = a[mid - (left[l] == 0 && mid != 0)];                       \
                int behind = (left[l] > 0) & BEHIND(e, v[l]);                       \
                start[l] = behind ? mid + 1 : start[l];                             \
                left[l] = behind ? left[l] - half - 1 : half;                       \
            }                                                                       \
        }                                                                           \
        for (int64_t l = 0; l < count; l++) out[l] = start[l];                      \
    }                                                                               \
    static void name(void *args, int64_t begin, int64_t end, int64_t worker) {      \
        const queries *q = args;                                                    \
        (void)worker;                                                               \
        for (int64_t i = begin; i < end;) {                                         \
            int64_t row = i / q->m;                                                 \
            const type *a = (const type *)q->sorted + row * q->n;                   \
            const type *v = (const type *)q->values;                                \
            int64_t stop = plt_min(end, (row + 1) * q->m);                          \
            for (; i + LANES <= stop; i += LANES) {                                 \
                if (q->right)                                                       \
                    name##_lanes(a, q->n, v + i, q->places + i, LANES, 1);          \
                else                                                                \
                    name##_lanes(a, q->n, v + i, q->places + i, LANES, 0);          \
            }                                                                       \
            for (; i < stop; i++)                                                   \
                name##_lanes(a, q->n, v + i, q->places + i, 1, (int)q->right);      \
        }                                                                           \
    }

SEARCH(double, search_f64)
SEARCH(float, search_f32)
SEARCH(int64_t, search_i64)
SEARCH(int32_t, search_i32)

PLT_API void plt_search(plt_call *call, int64_t dtype, int64_t right, int64_t rows,
                        int64_t n, int64_t m, const void *sorted, const void *values,
                        int64_t *places) {
    plt_task task = dtype == PLT_F64   ? search_f64
                    : dtype == PLT_F32 ? search_f32
                    : dtype == PLT_I64 ? search_i64
                                       : search_i32;
    queries q = {n, m, right, sorted, values, places};
    plt_parallel(call, task, &q, rows * m, 4096);
}
