/* linalg.c's loops over matrices, for one element type: REAL, whose functions are
 * NAMED and whose routines are ROUTINE. */

/* y (n x m) = the transpose of x (m x n), in squares that stay in the cache. */
static void NAMED(transpose)(int64_t m, int64_t n, const REAL *x, REAL *y) {
    enum { SIDE = 16 };
    for (int64_t i = 0; i < m; i += SIDE)
        for (int64_t j = 0; j < n; j += SIDE) {
            int64_t rows = plt_min(i + SIDE, m), columns = plt_min(j + SIDE, n);
            for (int64_t k = i; k < rows; k++)
                for (int64_t l = j; l < columns; l++) y[l * m + k] = x[k * n + l];
        }
}

static void NAMED(transpose_square)(int64_t n, REAL *x) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) {
            REAL kept = x[i * n + j];
            x[i * n + j] = x[j * n + i];
            x[j * n + i] = kept;
        }
}

static void NAMED(copy)(REAL *to, const void *from, int64_t start, int64_t count) {
    if (count > 0) memcpy(to, (const REAL *)from + start, sizeof(REAL) * (size_t)count);
}

/* A = L L' by the factor of the other triangle: L' of the transpose. */
static void NAMED(cholesky)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const int32_t *, REAL *, const int32_t *,
                         int32_t *, size_t);
    const matrices *p = args;
    int64_t n = p->n;
    int32_t size = (int32_t)n, stride = at_least_one(n);
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * n * n;
        int32_t info = 0;
        NAMED(copy)(x, p->a, i * n * n, n * n);
        if (n) ((routine *)ROUTINE(potrf))(p->flag ? "L" : "U", &size, x, &stride, &info, 1);
        for (int64_t row = 0; row < n; row++)
            for (int64_t j = p->flag ? 0 : row + 1; j < (p->flag ? row : n); j++)
                x[row * n + j] = 0;
        p->info[i] = info;
        report(p, info);
    }
}

/* The pivots exchange rows, so there is no other way than to transpose. */
static void NAMED(lu)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const int32_t *, const int32_t *, REAL *, const int32_t *,
                         int32_t *, int32_t *);
    const matrices *p = args;
    int64_t m = p->m, n = p->n, k = plt_min(m, n);
    int32_t rows = (int32_t)m, columns = (int32_t)n;
    REAL *turned = (REAL *)(p->work + worker * p->room);
    for (int64_t i = begin; i < end; i++) {
        int32_t info = 0;
        NAMED(transpose)(m, n, (const REAL *)p->a + i * m * n, turned);
        if (k)
            ((routine *)ROUTINE(getrf))(&rows, &columns, turned, &rows,
                                        p->pivots + i * k, &info);
        NAMED(transpose)(n, m, turned, (REAL *)p->x + i * m * n);
        p->info[i] = info;
        report(p, info);
    }
}

typedef void NAMED(trsm)(const char *, const char *, const char *, const char *,
                         const int32_t *, const int32_t *, const REAL *, const REAL *,
                         const int32_t *, REAL *, const int32_t *, size_t, size_t,
                         size_t, size_t);

/* op(A) X = B in place of X, as X' op(A)' = B': from the right, of the other triangle. */
static void NAMED(solve_triangle)(int64_t n, int64_t k, int upper, int transposed,
                                  int unit, const REAL *a, REAL *x) {
    REAL one = 1;
    int32_t rows = (int32_t)k, columns = (int32_t)n;
    if (n == 0 || k == 0) return;
    ((NAMED(trsm) *)ROUTINE(trsm))("R", upper ? "L" : "U", transposed ? "T" : "N",
                                   unit ? "U" : "N", &rows, &columns, &one, a, &columns,
                                   x, &rows, 1, 1, 1, 1);
}

static void NAMED(triangular_solve)(void *args, int64_t begin, int64_t end,
                                    int64_t worker) {
    const matrices *p = args;
    int64_t n = p->n, k = p->k;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * n * k;
        NAMED(copy)(x, p->b, i * n * k, n * k);
        NAMED(solve_triangle)(n, k, (int)p->flag, p->other & 1, p->other >> 1 & 1,
                              (const REAL *)p->a + i * n * n, x);
    }
}

static void NAMED(swap_row)(const matrices *p, int64_t row, int32_t pivot, REAL *x) {
    int64_t other = pivot - 1, k = p->k;
    if (other < 0 || other >= p->n) {
        report(p, pivot ? pivot : -1);
        return;
    }
    for (int64_t j = 0; other != row && j < k; j++) {
        REAL kept = x[row * k + j];
        x[row * k + j] = x[other * k + j];
        x[other * k + j] = kept;
    }
}

static void NAMED(lu_solve)(void *args, int64_t begin, int64_t end, int64_t worker) {
    const matrices *p = args;
    int64_t n = p->n, k = p->k;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        const REAL *lu = (const REAL *)p->a + i * n * n;
        const int32_t *pivots = p->pivots + i * n;
        REAL *x = (REAL *)p->x + i * n * k;
        NAMED(copy)(x, p->b, i * n * k, n * k);
        if (p->flag) {
            NAMED(solve_triangle)(n, k, 1, 1, 0, lu, x);
            NAMED(solve_triangle)(n, k, 0, 1, 1, lu, x);
            for (int64_t row = n; row-- > 0;) NAMED(swap_row)(p, row, pivots[row], x);
        } else {
            for (int64_t row = 0; row < n; row++)
                NAMED(swap_row)(p, row, pivots[row], x);
            NAMED(solve_triangle)(n, k, 0, 0, 1, lu, x);
            NAMED(solve_triangle)(n, k, 1, 0, 0, lu, x);
        }
    }
}

/* A' = L Q of the transpose has the same reflectors as A = Q R. */
static void NAMED(qr)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const int32_t *, const int32_t *, REAL *, const int32_t *,
                         REAL *, REAL *, const int32_t *, int32_t *);
    const matrices *p = args;
    int64_t m = p->m, n = p->n, k = plt_min(m, n);
    int32_t rows = (int32_t)n, columns = (int32_t)m, room = room_of(BLOCK * n), info;
    REAL *work = (REAL *)(p->work + worker * p->room);
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * m * n;
        NAMED(copy)(x, p->a, i * m * n, m * n);
        if (k)
            ((routine *)ROUTINE(gelqf))(&rows, &columns, x, &rows, (REAL *)p->y + i * k,
                                        work, &room, &info);
    }
}

/* The first n columns of Q (m x m) are the first n rows of the transpose. */
static void NAMED(householder)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const int32_t *, const int32_t *, const int32_t *, REAL *,
                         const int32_t *, const REAL *, REAL *, const int32_t *,
                         int32_t *);
    const matrices *p = args;
    int64_t m = p->m, n = p->n, k = p->k;
    int32_t rows = (int32_t)n, columns = (int32_t)m, count = (int32_t)k;
    int32_t room = room_of(BLOCK * n), info;
    REAL *work = (REAL *)(p->work + worker * p->room);
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * m * n;
        NAMED(copy)(x, p->a, i * m * n, m * n);
        if (m && n)
            ((routine *)ROUTINE(orglq))(&rows, &columns, &count, x, &rows,
                                        (const REAL *)p->b + i * k, work, &room, &info);
    }
}

/* Q C is C' Q' of the transposes: from the other side. flag: left; other: Q'. */
static void NAMED(householder_multiply)(void *args, int64_t begin, int64_t end,
                                        int64_t worker) {
    typedef void routine(const char *, const char *, const int32_t *, const int32_t *,
                         const int32_t *, const REAL *, const int32_t *, const REAL *,
                         REAL *, const int32_t *, REAL *, const int32_t *, int32_t *,
                         size_t, size_t);
    const matrices *p = args;
    int64_t m = p->m, n = p->n, k = p->k, order = p->flag ? m : n;
    int32_t rows = (int32_t)n, columns = (int32_t)m, count = (int32_t)k, info;
    int32_t room = room_of(BLOCK * plt_max(p->flag ? n : m, 1) + REFLECTORS);
    REAL *work = (REAL *)(p->work + worker * p->room);
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * m * n;
        NAMED(copy)(x, p->c, i * m * n, m * n);
        if (m && n && k)
            ((routine *)ROUTINE(ormlq))(
                p->flag ? "R" : "L", p->other ? "T" : "N", &rows, &columns, &count,
                (const REAL *)p->a + i * order * k, &count, (const REAL *)p->b + i * k,
                x, &rows, work, &room, &info, 1, 1);
    }
}

/* A' = V S U': the left vectors of the transpose are the right ones. flag: 0 only the
 * values, 1 as many vectors as values, 2 all vectors. */
static void NAMED(svd)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const int32_t *, const int32_t *, REAL *,
                         const int32_t *, REAL *, REAL *, const int32_t *, REAL *,
                         const int32_t *, REAL *, const int32_t *, int32_t *, int32_t *,
                         size_t);
    static const char *const jobs[] = {"N", "S", "A"};
    const matrices *p = args;
    int64_t m = p->m, n = p->n, k = plt_min(m, n);
    int64_t left = p->flag == 2 ? m : k, right = p->flag == 2 ? n : k;
    int32_t rows = (int32_t)n, columns = (int32_t)m, first = at_least_one(left);
    int32_t room = room_of(svd_room(m, n, p->flag));
    REAL *copied = (REAL *)(p->work + worker * p->room), none;
    REAL *work = copied + m * n;
    int32_t *integers = (int32_t *)(work + svd_room(m, n, p->flag));
    for (int64_t i = begin; i < end; i++) {
        REAL *u = p->flag ? (REAL *)p->x + i * m * left : &none;
        REAL *vh = p->flag ? (REAL *)p->z + i * right * n : &none;
        int32_t info = 0;
        NAMED(copy)(copied, p->a, i * m * n, m * n);
        if (k) {
            ((routine *)ROUTINE(gesdd))(jobs[p->flag], &rows, &columns, copied, &rows,
                                        (REAL *)p->y + i * k, vh, &rows, u, &first,
                                        work, &room, integers, &info, 1);
            report(p, info);
        } else if (p->flag == 2) {
            for (int64_t j = 0; j < m * m; j++) u[j] = j % (m + 1) == 0;
            for (int64_t j = 0; j < n * n; j++) vh[j] = j % (n + 1) == 0;
        }
    }
}

/* Of the other triangle; vectors are columns, so they are transposed in the end. */
static void NAMED(eigh)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const char *, const int32_t *, REAL *,
                         const int32_t *, REAL *, REAL *, const int32_t *, int32_t *,
                         const int32_t *, int32_t *, size_t, size_t);
    const matrices *p = args;
    int64_t n = p->n, vectors = p->y != 0;
    int32_t size = (int32_t)n, room = room_of(eigh_room(n, vectors));
    int32_t integers = room_of(3 + 5 * n);
    REAL *work = (REAL *)(p->work + worker * p->room);
    int32_t *whole = (int32_t *)(work + eigh_room(n, vectors) + (vectors ? 0 : n * n));
    for (int64_t i = begin; i < end; i++) {
        REAL *x = vectors ? (REAL *)p->y + i * n * n : work + eigh_room(n, 0);
        int32_t info = 0;
        NAMED(copy)(x, p->a, i * n * n, n * n);
        if (n)
            ((routine *)ROUTINE(syevd))(vectors ? "V" : "N", p->flag ? "L" : "U", &size,
                                        x, &size, (REAL *)p->x + i * n, work, &room,
                                        whole, &integers, &info, 1, 1);
        if (vectors) NAMED(transpose_square)(n, x);
        report(p, info);
    }
}

/* Values and vectors as pairs (real, imaginary), the vectors in columns. LAPACK has the
 * vectors of conjugate values as one column of real and one of imaginary parts. */
static void NAMED(eig)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const char *, const int32_t *, REAL *,
                         const int32_t *, REAL *, REAL *, REAL *, const int32_t *,
                         REAL *, const int32_t *, REAL *, const int32_t *, int32_t *,
                         size_t, size_t);
    const matrices *p = args;
    int64_t n = p->n;
    int32_t size = (int32_t)n, stride = at_least_one(n);
    int32_t room = room_of((4 + BLOCK) * n + 1);
    REAL *turned = (REAL *)(p->work + worker * p->room), *found = turned + n * n;
    REAL *real = found + n * n, *imaginary = real + n, *work = imaginary + n;
    for (int64_t i = begin; i < end; i++) {
        REAL *values = (REAL *)p->x + 2 * i * n, *vectors = (REAL *)p->y + 2 * i * n * n;
        int32_t info = 0;
        NAMED(transpose)(n, n, (const REAL *)p->a + i * n * n, turned);
        if (n)
            ((routine *)ROUTINE(geev))("N", "V", &size, turned, &stride, real,
                                       imaginary, turned, &stride, found, &stride, work,
                                       &room, &info, 1, 1);
        report(p, info);
        for (int64_t j = 0; j < n; j++) {
            int64_t second = j > 0 && imaginary[j] < 0;
            const REAL *column = found + (j - second) * n;
            values[2 * j] = real[j];
            values[2 * j + 1] = imaginary[j];
            for (int64_t row = 0; row < n; row++) {
                REAL other = imaginary[j] == 0 ? 0 : column[n + row];
                vectors[2 * (row * n + j)] = column[row];
                vectors[2 * (row * n + j) + 1] = second ? -other : other;
            }
        }
    }
}

static void NAMED(ldl)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const int32_t *, REAL *, const int32_t *,
                         int32_t *, REAL *, const int32_t *, int32_t *, size_t);
    const matrices *p = args;
    int64_t n = p->n;
    int32_t size = (int32_t)n, room = room_of(2 * BLOCK * n);
    REAL *work = (REAL *)(p->work + worker * p->room);
    for (int64_t i = begin; i < end; i++) {
        REAL *x = (REAL *)p->x + i * n * n;
        int32_t info = 0;
        NAMED(transpose)(n, n, (const REAL *)p->a + i * n * n, x);
        if (n)
            ((routine *)ROUTINE(sytrf))("L", &size, x, &size, p->pivots + i * n, work,
                                        &room, &info, 1);
        NAMED(transpose_square)(n, x);
        for (int64_t row = 0; row < n; row++)
            for (int64_t j = row + 1; j < n; j++) x[row * n + j] = 0;
        p->info[i] = info;
        report(p, info);
    }
}

static void NAMED(ldl_solve)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void routine(const char *, const int32_t *, const int32_t *, const REAL *,
                         const int32_t *, const int32_t *, REAL *, const int32_t *,
                         int32_t *, size_t);
    const matrices *p = args;
    int64_t n = p->n, k = p->k;
    int32_t size = (int32_t)n, count = (int32_t)k, info;
    REAL *turned = (REAL *)(p->work + worker * p->room), *right = turned + n * n;
    for (int64_t i = begin; i < end; i++) {
        NAMED(transpose)(n, n, (const REAL *)p->a + i * n * n, turned);
        NAMED(transpose)(n, k, (const REAL *)p->b + i * n * k, right);
        if (n && k)
            ((routine *)ROUTINE(sytrs))("L", &size, &count, turned, &size,
                                        p->pivots + i * n, right, &size, &info, 1);
        NAMED(transpose)(k, n, right, (REAL *)p->x + i * n * k);
    }
}

/* z = x y, all of them transposed: z' = y' x'. */
static void NAMED(multiply)(int64_t n, const REAL *x, const REAL *y, REAL *z) {
    typedef void routine(const char *, const char *, const int32_t *, const int32_t *,
                         const int32_t *, const REAL *, const REAL *, const int32_t *,
                         const REAL *, const int32_t *, const REAL *, REAL *,
                         const int32_t *, size_t, size_t);
    REAL one = 1, zero = 0;
    int32_t size = (int32_t)n;
    ((routine *)ROUTINE(gemm))("N", "N", &size, &size, &size, &one, y, &size, x, &size,
                               &zero, z, &size, 1, 1);
}

/* exp(A) by scaling and squaring: the Pade approximant of degree 13 of A / 2^s, whose
 * norm is below 5.37 (Higham, The scaling and squaring method for the matrix
 * exponential revisited, 2005). p and q of exp(A) = q(A)^-1 p(A) share their even and
 * odd parts: q = even - odd, p = even + odd. */
static void NAMED(matrix_exp)(void *args, int64_t begin, int64_t end, int64_t worker) {
    typedef void factorize(const int32_t *, const int32_t *, REAL *, const int32_t *,
                           int32_t *, int32_t *);
    static const double b[] = {64764752532480000.0, 32382376266240000.0,
                               7771770303897600.0,  1187353796428800.0,
                               129060195264000.0,   10559470521600.0,
                               670442572800.0,      33522128640.0,
                               1323241920.0,        40840800.0,
                               960960.0,            16380.0,
                               182.0,               1.0};
    const matrices *p = args;
    int64_t n = p->n, all = n * n;
    int32_t size = (int32_t)n, info;
    REAL *w = (REAL *)(p->work + worker * p->room);
    REAL *a1 = w, *a2 = w + all, *a4 = w + 2 * all, *a6 = w + 3 * all, *s = w + 4 * all;
    matrices rows = {.call = p->call, .n = n, .k = n};
    rows.pivots = (int32_t *)(w + 5 * all);
    for (int64_t i = begin; n && i < end; i++) {
        REAL *x = (REAL *)p->x + i * all;
        const REAL *a = (const REAL *)p->a + i * all;
        double norm = 0;
        for (int64_t row = 0; row < n; row++) {
            double sum = 0;
            for (int64_t j = 0; j < n; j++) sum += fabs((double)a[row * n + j]);
            norm = sum > norm || sum != sum ? sum : norm;
        }
        if (!isfinite(norm)) { /* so is the result */
            for (int64_t j = 0; j < all; j++) x[j] = NAN;
            continue;
        }
        int squarings = norm > 5.371920351148152 ? ilogb(norm / 5.371920351148152) + 1 : 0;
        for (int64_t j = 0; j < all; j++) a1[j] = (REAL)ldexp((double)a[j], -squarings);
        NAMED(multiply)(n, a1, a1, a2);
        NAMED(multiply)(n, a2, a2, a4);
        NAMED(multiply)(n, a4, a2, a6);
        /* Divided by b[0], so that the numbers fit in f32 as well. */
        double r[14];
        for (int j = 0; j < 14; j++) r[j] = b[j] / b[0];
        for (int64_t j = 0; j < all; j++)
            s[j] = (REAL)(r[13] * (double)a6[j] + r[11] * (double)a4[j] +
                          r[9] * (double)a2[j]);
        NAMED(multiply)(n, a6, s, x);
        for (int64_t j = 0; j < all; j++)
            x[j] = (REAL)((double)x[j] + r[7] * (double)a6[j] + r[5] * (double)a4[j] +
                          r[3] * (double)a2[j] + (j % (n + 1) == 0 ? r[1] : 0));
        NAMED(multiply)(n, a1, x, s); /* odd */
        for (int64_t j = 0; j < all; j++)
            x[j] = (REAL)(r[12] * (double)a6[j] + r[10] * (double)a4[j] +
                          r[8] * (double)a2[j]);
        NAMED(multiply)(n, a6, x, a1);
        for (int64_t j = 0; j < all; j++) { /* even, then p and q */
            double even = (double)a1[j] + r[6] * (double)a6[j] + r[4] * (double)a4[j] +
                          r[2] * (double)a2[j] + (j % (n + 1) == 0 ? 1 : 0);
            x[j] = (REAL)(even + (double)s[j]);
            a1[j] = (REAL)(even - (double)s[j]);
        }
        NAMED(transpose_square)(n, a1);
        ((factorize *)ROUTINE(getrf))(&size, &size, a1, &size, rows.pivots, &info);
        NAMED(transpose_square)(n, a1);
        for (int64_t row = 0; row < n; row++)
            NAMED(swap_row)(&rows, row, rows.pivots[row], x);
        NAMED(solve_triangle)(n, n, 0, 0, 1, a1, x);
        NAMED(solve_triangle)(n, n, 1, 0, 0, a1, x);
        for (int k = 0; k < squarings; k++) {
            NAMED(multiply)(n, x, x, a2);
            NAMED(copy)(x, a2, 0, all);
        }
    }
}
