/* Discrete Fourier transforms of any length along an axis.
 *
 * A length whose primes are small is a chain of butterflies (Stockham's: each stage
 * reads one buffer and writes the other in the order that the next one wants). Others
 * are a convolution with a chirp, made by transforms of a longer, smooth length
 * (Bluestein). A real row of even length is a complex one of half the length.
 *
 * Several rows are transformed together, element i of all of them side by side: these
 * are the lanes. A row never touches the numbers of another. Real and imaginary parts
 * are apart everywhere.
 *
 * Factors of a length are tables in `shared`, computed in f64 at the start of a call
 * from 2 sqrt(n) sines and cosines. lower/library_fft.py has the sizes of the tables
 * and of the workspace. */
#include <math.h>
#include <string.h>

#include "library.h"

/* The largest prime that is a butterfly, and stages at most. */
enum { LARGEST_PRIME = 61, STAGES = 64, LANES = 16, ELEMENTS = 32768 };

/* Elements between the arrays of a buffer, so that lengths that are powers of 2 do not
 * put all of them at the same places of the cache. */
enum { APART = 80 };

/* Rows that are transformed together. */
static int64_t lanes_of(int64_t n, int64_t rows) {
    int64_t fitting = ELEMENTS / plt_max(n, 1);
    return plt_max(plt_min(plt_min(LANES, rows), fitting), 1);
}

typedef struct stages {
    int64_t n;
    int64_t count;
    int32_t radix[STAGES];
} stages;

/* Whether a length is a chain of butterflies. */
static int is_smooth(int64_t n, stages *out) {
    static const int32_t small[] = {4, 2, 3, 5, 7};
    out->n = n;
    out->count = 0;
    for (int i = 0; i < 5; i++)
        for (; n % small[i] == 0; n /= small[i]) out->radix[out->count++] = small[i];
    for (int32_t prime = 11; prime <= LARGEST_PRIME; prime += 2)
        for (; n % prime == 0; n /= prime) out->radix[out->count++] = prime;
    return n == 1;
}

/* The smallest 4, 5, 6 or 7 times a power of 2 that is not below 2n - 1. */
static int64_t convolved(int64_t n) {
    int64_t best = INT64_MAX;
    for (int64_t size = 4; size <= 7; size++) {
        int64_t whole = size;
        while (whole < 2 * n - 1) whole *= 2;
        best = plt_min(best, whole);
    }
    return best;
}

/* exp(-2 pi i k / n) for 0 <= k < n, by an angle of at most an eighth of a turn. */
static void root(int64_t k, int64_t n, double *real, double *imaginary) {
    int64_t eighths = 8 * k, octant = eighths / n, rest = eighths - octant * n;
    int64_t inside = octant & 1 ? n - rest : rest;
    double angle = 0.78539816339744830962 * ((double)inside / (double)n);
    double c = cos(angle), s = sin(angle);
    if (((octant + 1) >> 1) & 1) {
        double kept = c;
        c = s;
        s = kept;
    }
    *real = octant >= 2 && octant < 6 ? -c : c;
    *imaginary = octant >= 4 ? s : -s;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=haswell", "default")))
#else
#define CLONED
#endif

typedef struct rows {
    int64_t outer, n, inner; /* n of the real or complex sequence */
    int64_t half;            /* elements of a row of the spectrum, if it is one half */
    int64_t lanes, length, room; /* length: numbers of a lane in a buffer */
    double scale;
    const void *plan;
    const void *re, *im;
    void *out_re, *out_im;
    char *work;
} rows;

static double scale_of(int64_t norm, int64_t n) {
    if (norm == 0 || n == 0) return 1;
    return norm == 1 ? 1 / sqrt((double)n) : 1 / (double)n;
}

#define REAL float
#define NAMED(name) name##_f32
#include "fft_real.h"
#undef REAL
#undef NAMED

#define REAL double
#define NAMED(name) name##_f64
#include "fft_real.h"

/* Bytes of workspace for a worker: two buffers of complex numbers. */
static int64_t room_of(int64_t length, int64_t lanes, int64_t dtype) {
    return (4 * (length * lanes + APART) * plt_bytes(dtype) + 63) / 64 * 64;
}

static void run(plt_call *call, int64_t dtype, rows *r, int64_t length, int64_t table,
                void *shared, void *work, plt_task single, plt_task wide) {
    int64_t count = r->outer * r->inner;
    if (count == 0 || r->n == 0) return;
    r->lanes = lanes_of(r->n, count);
    r->work = work;
    int64_t units = (count + r->lanes - 1) / r->lanes;
    int64_t grain = plt_grain(4096, r->n * r->lanes);
    if (dtype == PLT_F64) {
        plan_f64 plan;
        r->length = plt_max(make_plan_f64(&plan, length, table, shared, work), r->half);
        r->room = room_of(r->length, r->lanes, dtype);
        r->plan = &plan;
        plt_parallel(call, wide, r, units, grain);
    } else {
        plan_f32 plan;
        r->length = plt_max(make_plan_f32(&plan, length, table, shared, work), r->half);
        r->room = room_of(r->length, r->lanes, dtype);
        r->plan = &plan;
        plt_parallel(call, single, r, units, grain);
    }
}

PLT_API void plt_fft(plt_call *call, int64_t dtype, int64_t inverse, int64_t norm,
                     int64_t outer, int64_t n, int64_t inner, const void *re,
                     const void *im, void *out_re, void *out_im, void *work,
                     void *shared) {
    /* The inverse is that of real and imaginary parts exchanged, exchanged again. */
    rows r = {.outer = outer, .n = n, .inner = inner, .scale = scale_of(norm, n)};
    r.re = inverse ? im : re;
    r.im = inverse ? re : im;
    r.out_re = inverse ? out_im : out_re;
    r.out_im = inverse ? out_re : out_im;
    run(call, dtype, &r, n, n, shared, work, fft_f32, fft_f64);
}

PLT_API void plt_rfft(plt_call *call, int64_t dtype, int64_t norm, int64_t outer,
                      int64_t n, int64_t inner, const void *x, void *out_re,
                      void *out_im, void *work, void *shared) {
    rows r = {.outer = outer, .n = n, .inner = inner, .scale = scale_of(norm, n)};
    r.half = n / 2 + 1;
    r.re = x;
    r.out_re = out_re;
    r.out_im = out_im;
    run(call, dtype, &r, n % 2 ? n : n / 2, n, shared, work, rfft_f32, rfft_f64);
}

PLT_API void plt_irfft(plt_call *call, int64_t dtype, int64_t norm, int64_t outer,
                       int64_t n, int64_t inner, const void *re, const void *im,
                       void *x, void *work, void *shared) {
    rows r = {.outer = outer, .n = n, .inner = inner, .scale = scale_of(norm, n)};
    r.half = n / 2 + 1;
    r.re = re;
    r.im = im;
    r.out_re = x;
    run(call, dtype, &r, n % 2 ? n : n / 2, n, shared, work, irfft_f32, irfft_f64);
}
