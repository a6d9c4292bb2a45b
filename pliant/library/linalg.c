/* Factorizations and solutions of matrices, by LAPACK.
 *
 * A tensor is a batch of row-major matrices. LAPACK reads such a matrix as its
 * transpose, and most functions here use that instead of copying: the Cholesky factor
 * of the other triangle, the LQ factorization for QR, left for right singular vectors.
 * Each function lists in front of its definition what it calls instead.
 *
 * A matrix that cannot be factorized has the number that LAPACK gives in `info`. If
 * `check` is not 0, the call fails with that status and this number (library.h). */
#include <math.h>
#include <string.h>

#include "lapack.h"

/* The one thing kept: set once, when the routines are loaded, and only read then. */
static const plt_lapack *tables;

PLT_API void plt_use_lapack(const plt_lapack *given) { tables = given; }

typedef struct matrices {
    plt_call *call;
    int64_t check, m, n, k;
    int64_t flag, other; /* what they are is said at each function */
    const void *a, *b, *c;
    void *x, *y, *z;
    int32_t *pivots, *info;
    char *work;
    int64_t room; /* bytes of the workspace of a worker */
} matrices;

/* Elements that LAPACK's blocked algorithms want for each row or column. */
enum { BLOCK = 32, REFLECTORS = 65 * 64 };

static int32_t at_least_one(int64_t n) { return (int32_t)plt_max(n, 1); }
static int32_t room_of(int64_t n) { return (int32_t)plt_min(plt_max(n, 1), INT32_MAX); }

static void report(const matrices *p, int64_t value) {
    int64_t none = 0;
    if (value == 0 || p->check == 0) return;
    if (__atomic_compare_exchange_n(&p->call->status, &none, p->check, 0,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        p->call->value = value;
}

/* Matrices that are worth a worker: about 2^16 operations. */
static int64_t grain(int64_t m, int64_t n, int64_t k) {
    double work = (double)plt_max(m, 1) * (double)plt_max(n, 1) * (double)plt_max(k, 1);
    return work >= 65536 ? 1 : (int64_t)(65536 / work);
}

/* Elements of workspace of gesdd: more than the least that its documentation states. */
static int64_t svd_room(int64_t m, int64_t n, int64_t vectors) {
    int64_t most = plt_max(m, n), least = plt_min(m, n);
    int64_t square = vectors ? 4 * least * least : 0;
    return square + 10 * least + 2 * BLOCK * most + 2 * BLOCK * least + BLOCK;
}

/* Elements and integers of workspace of syevd, as its documentation states. */
static int64_t eigh_room(int64_t n, int64_t vectors) {
    return vectors ? 1 + 6 * n + 2 * n * n + BLOCK * n : 1 + (2 + BLOCK) * n;
}

/* The workspaces of workers start at cache lines. */
static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

#define REAL float
#define NAMED(name) name##_f32
#define ROUTINE(name) tables[0].name
#include "linalg_real.h"
#undef REAL
#undef NAMED
#undef ROUTINE

#define REAL double
#define NAMED(name) name##_f64
#define ROUTINE(name) tables[1].name
#include "linalg_real.h"

#define TASK(name) (dtype == PLT_F64 ? name##_f64 : name##_f32)

/* The orders that `pivots` bring m rows into: row i of the permuted matrix is row
 * order[i]. LAPACK counts from 1. */
static void permuted(void *args, int64_t begin, int64_t end, int64_t worker) {
    const matrices *p = args;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        const int32_t *pivots = p->pivots + i * p->k;
        int64_t *order = (int64_t *)p->x + i * p->m;
        for (int64_t row = 0; row < p->m; row++) order[row] = row;
        for (int64_t row = 0; row < p->k; row++) {
            int64_t other = pivots[row] - 1;
            if (other < 0 || other >= p->m) {
                report(p, pivots[row] ? pivots[row] : -1);
                continue;
            }
            int64_t kept = order[row];
            order[row] = order[other];
            order[other] = kept;
        }
    }
}

PLT_API void plt_row_order(plt_call *call, int64_t check, int64_t batch, int64_t m,
                           int64_t k, const int32_t *pivots, int64_t *order) {
    matrices p = {.call = call, .check = check, .m = m, .k = k};
    p.pivots = (int32_t *)pivots;
    p.x = order;
    plt_parallel(call, permuted, &p, batch, plt_grain(8192, m));
}

PLT_API void plt_cholesky(plt_call *call, int64_t dtype, int64_t check, int64_t upper,
                          int64_t batch, int64_t n, const void *a, void *factor,
                          int32_t *info) {
    matrices p = {.call = call, .check = check, .n = n, .flag = upper, .a = a};
    p.x = factor;
    p.info = info;
    plt_parallel(call, TASK(cholesky), &p, batch, grain(n, n, n));
}

PLT_API void plt_lu(plt_call *call, int64_t dtype, int64_t check, int64_t batch,
                    int64_t m, int64_t n, const void *a, void *lu, int32_t *pivots,
                    int32_t *info, void *work) {
    matrices p = {.call = call, .check = check, .m = m, .n = n, .a = a, .x = lu};
    p.pivots = pivots;
    p.info = info;
    p.work = work;
    p.room = lines(m * n * plt_bytes(dtype));
    plt_parallel(call, TASK(lu), &p, batch, grain(m, n, plt_min(m, n)));
}

PLT_API void plt_lu_solve(plt_call *call, int64_t dtype, int64_t check,
                          int64_t transposed, int64_t batch, int64_t n, int64_t k,
                          const void *lu, const int32_t *pivots, const void *b,
                          void *x) {
    matrices p = {.call = call, .check = check, .n = n, .k = k, .flag = transposed};
    p.a = lu;
    p.b = b;
    p.x = x;
    p.pivots = (int32_t *)pivots;
    plt_parallel(call, TASK(lu_solve), &p, batch, grain(n, n, k));
}

PLT_API void plt_triangular_solve(plt_call *call, int64_t dtype, int64_t upper,
                                  int64_t transposed, int64_t unit, int64_t batch,
                                  int64_t n, int64_t k, const void *a, const void *b,
                                  void *x) {
    matrices p = {.call = call, .n = n, .k = k, .flag = upper, .a = a, .b = b, .x = x};
    p.other = transposed | unit << 1;
    plt_parallel(call, TASK(triangular_solve), &p, batch, grain(n, n, k));
}

PLT_API void plt_qr(plt_call *call, int64_t dtype, int64_t batch, int64_t m, int64_t n,
                    const void *a, void *qr, void *tau, void *work) {
    matrices p = {.call = call, .m = m, .n = n, .a = a, .x = qr, .y = tau};
    p.work = work;
    p.room = lines(BLOCK * plt_max(n, 1) * plt_bytes(dtype));
    plt_parallel(call, TASK(qr), &p, batch, grain(m, n, plt_min(m, n)));
}

PLT_API void plt_householder(plt_call *call, int64_t dtype, int64_t batch, int64_t m,
                             int64_t n, int64_t k, const void *qr, const void *tau,
                             void *q, void *work) {
    matrices p = {.call = call, .m = m, .n = n, .k = k, .a = qr, .b = tau, .x = q};
    p.work = work;
    p.room = lines(BLOCK * plt_max(n, 1) * plt_bytes(dtype));
    plt_parallel(call, TASK(householder), &p, batch, grain(m, n, k));
}

PLT_API void plt_householder_multiply(plt_call *call, int64_t dtype, int64_t left,
                                      int64_t transposed, int64_t batch, int64_t m,
                                      int64_t n, int64_t k, const void *qr,
                                      const void *tau, const void *c, void *x,
                                      void *work) {
    matrices p = {.call = call, .m = m, .n = n, .k = k, .flag = left, .a = qr, .b = tau};
    p.other = transposed;
    p.c = c;
    p.x = x;
    p.work = work;
    p.room = lines((BLOCK * plt_max(left ? n : m, 1) + REFLECTORS) * plt_bytes(dtype));
    plt_parallel(call, TASK(householder_multiply), &p, batch, grain(m, n, k));
}

static int64_t svd_bytes(int64_t dtype, int64_t m, int64_t n, int64_t vectors) {
    int64_t elements = m * n + svd_room(m, n, vectors);
    return elements * plt_bytes(dtype) + 32 * plt_min(m, n);
}

PLT_API void plt_svd(plt_call *call, int64_t dtype, int64_t check, int64_t full,
                     int64_t batch, int64_t m, int64_t n, const void *a, void *u,
                     void *s, void *vh, void *work) {
    matrices p = {.call = call, .check = check, .m = m, .n = n, .flag = 1 + full};
    p.a = a;
    p.x = u;
    p.y = s;
    p.z = vh;
    p.work = work;
    p.room = lines(svd_bytes(dtype, m, n, 1));
    plt_parallel(call, TASK(svd), &p, batch, grain(m, n, plt_min(m, n)));
}

PLT_API void plt_singular_values(plt_call *call, int64_t dtype, int64_t check,
                                 int64_t batch, int64_t m, int64_t n, const void *a,
                                 void *s, void *work) {
    matrices p = {.call = call, .check = check, .m = m, .n = n, .a = a, .y = s};
    p.work = work;
    p.room = lines(svd_bytes(dtype, m, n, 0));
    plt_parallel(call, TASK(svd), &p, batch, grain(m, n, plt_min(m, n)));
}

static int64_t eigh_bytes(int64_t dtype, int64_t n, int64_t vectors) {
    int64_t elements = eigh_room(n, vectors) + (vectors ? 0 : n * n);
    return elements * plt_bytes(dtype) + 4 * (3 + 5 * n);
}

PLT_API void plt_eigh(plt_call *call, int64_t dtype, int64_t check, int64_t upper,
                      int64_t batch, int64_t n, const void *a, void *values,
                      void *vectors, void *work) {
    matrices p = {.call = call, .check = check, .n = n, .flag = upper, .a = a};
    p.x = values;
    p.y = vectors;
    p.work = work;
    p.room = lines(eigh_bytes(dtype, n, 1));
    plt_parallel(call, TASK(eigh), &p, batch, grain(n, n, n));
}

PLT_API void plt_eigvalsh(plt_call *call, int64_t dtype, int64_t check, int64_t upper,
                          int64_t batch, int64_t n, const void *a, void *values,
                          void *work) {
    matrices p = {.call = call, .check = check, .n = n, .flag = upper, .a = a};
    p.x = values;
    p.work = work;
    p.room = lines(eigh_bytes(dtype, n, 0));
    plt_parallel(call, TASK(eigh), &p, batch, grain(n, n, n));
}

PLT_API void plt_eig(plt_call *call, int64_t dtype, int64_t check, int64_t batch,
                     int64_t n, const void *a, void *values, void *vectors,
                     void *work) {
    matrices p = {.call = call, .check = check, .n = n, .a = a, .x = values};
    p.y = vectors;
    p.work = work;
    p.room = lines((2 * n * n + (6 + BLOCK) * n + 1) * plt_bytes(dtype));
    plt_parallel(call, TASK(eig), &p, batch, grain(n, n, n));
}

PLT_API void plt_ldl(plt_call *call, int64_t dtype, int64_t check, int64_t batch,
                     int64_t n, const void *a, void *ld, int32_t *pivots, int32_t *info,
                     void *work) {
    matrices p = {.call = call, .check = check, .n = n, .a = a, .x = ld};
    p.pivots = pivots;
    p.info = info;
    p.work = work;
    p.room = lines(2 * BLOCK * plt_max(n, 1) * plt_bytes(dtype));
    plt_parallel(call, TASK(ldl), &p, batch, grain(n, n, n));
}

PLT_API void plt_ldl_solve(plt_call *call, int64_t dtype, int64_t batch, int64_t n,
                           int64_t k, const void *ld, const int32_t *pivots,
                           const void *b, void *x, void *work) {
    matrices p = {.call = call, .n = n, .k = k, .a = ld, .b = b, .x = x};
    p.pivots = (int32_t *)pivots;
    p.work = work;
    p.room = lines((n * n + n * k) * plt_bytes(dtype));
    plt_parallel(call, TASK(ldl_solve), &p, batch, grain(n, n, k));
}

PLT_API void plt_matrix_exp(plt_call *call, int64_t dtype, int64_t batch, int64_t n,
                            const void *a, void *x, void *work) {
    matrices p = {.call = call, .n = n, .a = a, .x = x, .work = work};
    p.room = lines(5 * n * n * plt_bytes(dtype) + 4 * n);
    plt_parallel(call, TASK(matrix_exp), &p, batch, grain(n, n, n));
}
