/* Kernels that are algorithms rather than loops over elements, in portable C11.
 *
 * A model calls them as library functions (lower/library.py): the call first, then
 * sizes, then the memory of operands, results and workspace. They allocate nothing,
 * keep nothing, and run regions by plt_parallel. Tensors are row-major. An axis in the
 * middle of a tensor is given as (outer, n, inner): element i of a row is at
 * i * inner. The workspace of a function has one part for each worker, as large as its
 * row in lower/library.py says.
 * */
#ifndef PLT_LIBRARY_H
#define PLT_LIBRARY_H

#include "../runtime/rt.h"

/* Element types, in the order of ir/types.py's DType. */
enum plt_dtype {
    PLT_F64,
    PLT_F32,
    PLT_F16,
    PLT_BF16,
    PLT_I64,
    PLT_I32,
    PLT_I16,
    PLT_I8,
    PLT_U64,
    PLT_U32,
    PLT_U16,
    PLT_U8,
    PLT_BOOL
};

static inline int64_t plt_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t plt_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Units of a region that are about `work` elements of `size` each. */
static inline int64_t plt_grain(int64_t work, int64_t size) {
    return plt_max(work / plt_max(size, 1), 1);
}

static inline int64_t plt_bytes(int64_t dtype) {
    static const int8_t bytes[] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1};
    return bytes[dtype];
}

/* Sorts rows; equal elements stay in order, NaN is the largest number. */
PLT_API void plt_sort(plt_call *call, int64_t dtype, int64_t descending, int64_t outer,
                      int64_t n, int64_t inner, const void *x, void *values,
                      int64_t *places, void *work);

/* The k largest or smallest of each row, best first; of equals, the first. */
PLT_API void plt_top(plt_call *call, int64_t dtype, int64_t largest, int64_t outer,
                     int64_t n, int64_t inner, int64_t k, const void *x, void *values,
                     int64_t *places, void *work);

/* Where each of m values goes in a sorted row of n: in front of its equals, or with
 * `right` behind them. Types: f64, f32, i64, i32. */
PLT_API void plt_search(plt_call *call, int64_t dtype, int64_t right, int64_t rows,
                        int64_t n, int64_t m, const void *sorted, const void *values,
                        int64_t *places);

/* The largest (or, with `least`, smallest) element so far and where it is: of equals
 * the last, and NaN from the first one on. */
PLT_API void plt_running_extreme(plt_call *call, int64_t dtype, int64_t least,
                                 int64_t outer, int64_t n, int64_t inner, const void *x,
                                 void *values, int64_t *places);

/* The logarithm of the sum of exponentials so far. Types: f64, f32. */
PLT_API void plt_running_logsumexp(plt_call *call, int64_t dtype, int64_t outer,
                                   int64_t n, int64_t inner, const void *x, void *out);

/* `outer` matrices x, whose rows have so many bytes, with updates written at places, in
 * order. The places are rows of x. `out` may be x. */
PLT_API void plt_scatter_rows(plt_call *call, int64_t bytes, int64_t outer, int64_t rows,
                              int64_t count, const void *x, const int64_t *places,
                              const void *updates, void *out);

/* x, whose elements have so many bytes, with a window of it replaced: of `size` along an
 * axis, `width` from `start`. `out` may be x. */
PLT_API void plt_overwrite(plt_call *call, int64_t bytes, int64_t size0, int64_t size1,
                           int64_t size2, int64_t size3, int64_t width0, int64_t width1,
                           int64_t width2, int64_t width3, int64_t start0,
                           int64_t start1, int64_t start2, int64_t start3, const void *x,
                           const void *part, void *out);

/* The indices (row, column) of the true elements of a mask, in order, and how many there
 * are; with rank 1, of the columns of one row. `places` has room for all elements. */
PLT_API void plt_locate(plt_call *call, int64_t rank, int64_t outer, int64_t n,
                        const uint8_t *mask, int64_t *places, int64_t *count);

/* Channels of images at points: between row and row + 1, `down` of the way, and between
 * column and column + 1, `across` of it. Elements outside are 0. Types: f64, f32. */
PLT_API void plt_sample(plt_call *call, int64_t dtype, int64_t batch, int64_t channels,
                        int64_t height, int64_t width, int64_t points, const void *x,
                        const int32_t *rows, const int32_t *columns, const void *down,
                        const void *across, void *out);

#endif
