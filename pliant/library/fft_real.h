/* fft.c for one element type: REAL, whose functions are NAMED. */

/* Complex numbers in two arrays. */
typedef struct NAMED(pair) {
    REAL *re, *im;
} NAMED(pair);

/* What a call knows of its length. */
typedef struct NAMED(plan) {
    int64_t n;       /* complex numbers of a transform */
    int64_t table;   /* roots of unity in `roots`: a multiple of n */
    stages own;      /* of n, or if `longer` of the convolution's length */
    int64_t longer;  /* the length of the convolution; 0: none */
    NAMED(pair) roots;
    NAMED(pair) chirp;       /* [n] exp(-pi i k^2 / n) */
    NAMED(pair) response;    /* [longer] the transform of its inverse */
    NAMED(pair) longer_roots;
} NAMED(plan);

/* Roots of unity of order n: products of those at two distances. */
static void NAMED(fill_roots)(int64_t n, NAMED(pair) out) {
    enum { NEAR = 64 };
    double near_re[NEAR], near_im[NEAR];
    for (int64_t k = 0; k < plt_min(NEAR, n); k++) root(k, n, near_re + k, near_im + k);
    for (int64_t start = 0; start < n; start += NEAR) {
        double re, im;
        int64_t count = plt_min(NEAR, n - start);
        root(start, n, &re, &im);
        for (int64_t k = 0; k < count; k++) {
            out.re[start + k] = (REAL)(re * near_re[k] - im * near_im[k]);
            out.im[start + k] = (REAL)(re * near_im[k] + im * near_re[k]);
        }
    }
}

/* ---- stages: m groups of s adjacent numbers; step: distance of roots ------------- */

#define FROM(k)                                                                     \
    const REAL *restrict xr##k = xr + s * (p + m * k);                              \
    const REAL *restrict xi##k = xi + s * (p + m * k)
#define TO(r, j)                                                                    \
    REAL *restrict yr##j = yr + s * (r * p + j), *restrict yi##j = yi + s * (r * p + j); \
    REAL w##j = wr[j * p * step], v##j = wi[j * p * step]
#define FIRST(r) REAL *restrict yr0 = yr + s * r * p, *restrict yi0 = yi + s * r * p
#define LOAD(k) REAL r##k = xr##k[q], i##k = xi##k[q]
#define STORE(j, real, imaginary)                  \
    do {                                           \
        REAL one = (real), other = (imaginary);    \
        yr##j[q] = one * w##j - other * v##j;      \
        yi##j[q] = one * v##j + other * w##j;      \
    } while (0)
#define EACH _Pragma("GCC ivdep") for (int64_t q = 0; q < s; q++)
#define ARGUMENTS                                                                   \
    int64_t m, int64_t s, const REAL *restrict xr, const REAL *restrict xi,         \
        REAL *restrict yr, REAL *restrict yi, const REAL *restrict wr,              \
        const REAL *restrict wi, int64_t step

CLONED static void NAMED(stage2)(ARGUMENTS) {
    for (int64_t p = 0; p < m; p++) {
        FROM(0);
        FROM(1);
        FIRST(2);
        TO(2, 1);
        EACH {
            LOAD(0);
            LOAD(1);
            yr0[q] = r0 + r1;
            yi0[q] = i0 + i1;
            STORE(1, r0 - r1, i0 - i1);
        }
    }
}

CLONED static void NAMED(stage3)(ARGUMENTS) {
    const REAL half_root = (REAL)0.86602540378443864676;
    for (int64_t p = 0; p < m; p++) {
        FROM(0);
        FROM(1);
        FROM(2);
        FIRST(3);
        TO(3, 1);
        TO(3, 2);
        EACH {
            LOAD(0);
            LOAD(1);
            LOAD(2);
            REAL sr = r1 + r2, si = i1 + i2;
            REAL cr = r0 - (REAL)0.5 * sr, ci = i0 - (REAL)0.5 * si;
            REAL dr = half_root * (i1 - i2), di = half_root * (r2 - r1);
            yr0[q] = r0 + sr;
            yi0[q] = i0 + si;
            STORE(1, cr + dr, ci + di);
            STORE(2, cr - dr, ci - di);
        }
    }
}

CLONED static void NAMED(stage4)(ARGUMENTS) {
    for (int64_t p = 0; p < m; p++) {
        FROM(0);
        FROM(1);
        FROM(2);
        FROM(3);
        FIRST(4);
        TO(4, 1);
        TO(4, 2);
        TO(4, 3);
        EACH {
            LOAD(0);
            LOAD(1);
            LOAD(2);
            LOAD(3);
            REAL ar = r0 + r2, ai = i0 + i2, br = r0 - r2, bi = i0 - i2;
            REAL cr = r1 + r3, ci = i1 + i3, dr = i1 - i3, di = r3 - r1;
            yr0[q] = ar + cr;
            yi0[q] = ai + ci;
            STORE(1, br + dr, bi + di);
            STORE(2, ar - cr, ai - ci);
            STORE(3, br - dr, bi - di);
        }
    }
}

CLONED static void NAMED(stage5)(ARGUMENTS) {
    const REAL c1 = (REAL)0.30901699437494742410, c2 = (REAL)-0.80901699437494742410;
    const REAL s1 = (REAL)0.95105651629515357212, s2 = (REAL)0.58778525229247312917;
    for (int64_t p = 0; p < m; p++) {
        FROM(0);
        FROM(1);
        FROM(2);
        FROM(3);
        FROM(4);
        FIRST(5);
        TO(5, 1);
        TO(5, 2);
        TO(5, 3);
        TO(5, 4);
        EACH {
            LOAD(0);
            LOAD(1);
            LOAD(2);
            LOAD(3);
            LOAD(4);
            REAL ar = r1 + r4, ai = i1 + i4, br = r1 - r4, bi = i1 - i4;
            REAL cr = r2 + r3, ci = i2 + i3, dr = r2 - r3, di = i2 - i3;
            REAL er = r0 + c1 * ar + c2 * cr, ei = i0 + c1 * ai + c2 * ci;
            REAL fr = r0 + c2 * ar + c1 * cr, fi = i0 + c2 * ai + c1 * ci;
            REAL gr = s1 * bi + s2 * di, gi = -(s1 * br + s2 * dr);
            REAL hr = s2 * bi - s1 * di, hi = -(s2 * br - s1 * dr);
            yr0[q] = r0 + ar + cr;
            yi0[q] = i0 + ai + ci;
            STORE(1, er + gr, ei + gi);
            STORE(2, fr + hr, fi + hi);
            STORE(3, fr - hr, fi - hi);
            STORE(4, er - gr, ei - gi);
        }
    }
}

/* Any odd radix: sums and differences of the elements k and r - k. */
CLONED static void NAMED(stage_odd)(int64_t r, int64_t order, ARGUMENTS) {
    int64_t fold = order / r; /* roots of order r in the table */
    for (int64_t p = 0; p < m; p++)
        for (int64_t j = 0; j <= r / 2; j++) {
            int64_t other = j ? r - j : 0;
            REAL w1 = wr[j * p * step], v1 = wi[j * p * step];
            REAL w2 = wr[other * p * step], v2 = wi[other * p * step];
            enum { SOME = 64 };
            for (int64_t begin = 0; begin < s; begin += SOME) {
                int64_t count = plt_min(SOME, s - begin);
                REAL er[SOME], ei[SOME], fr[SOME], fi[SOME];
                for (int64_t q = 0; q < count; q++) {
                    er[q] = xr[begin + q + s * p];
                    ei[q] = xi[begin + q + s * p];
                    fr[q] = fi[q] = 0;
                }
                for (int64_t k = 1; k <= r / 2; k++) {
                    int64_t angle = j * k % r * fold;
                    REAL c = wr[angle], d = wi[angle];
                    const REAL *ur = xr + begin + s * (p + m * k);
                    const REAL *ui = xi + begin + s * (p + m * k);
                    const REAL *vr = xr + begin + s * (p + m * (r - k));
                    const REAL *vi = xi + begin + s * (p + m * (r - k));
                    for (int64_t q = 0; q < count; q++) {
                        er[q] += c * (ur[q] + vr[q]);
                        ei[q] += c * (ui[q] + vi[q]);
                        fr[q] -= d * (ui[q] - vi[q]);
                        fi[q] += d * (ur[q] - vr[q]);
                    }
                }
                REAL *to_r = yr + begin + s * (r * p + j);
                REAL *to_i = yi + begin + s * (r * p + j);
                REAL *far_r = yr + begin + s * (r * p + other);
                REAL *far_i = yi + begin + s * (r * p + other);
                for (int64_t q = 0; q < count; q++) {
                    REAL a = er[q] + fr[q], b = ei[q] + fi[q];
                    REAL c = er[q] - fr[q], d = ei[q] - fi[q];
                    to_r[q] = a * w1 - b * v1;
                    to_i[q] = a * v1 + b * w1;
                    if (j) {
                        far_r[q] = c * w2 - d * v2;
                        far_i[q] = c * v2 + d * w2;
                    }
                }
            }
        }
}

#undef FROM
#undef TO
#undef FIRST
#undef LOAD
#undef STORE
#undef EACH
#undef ARGUMENTS

/* Transforms x by way of y; gives the one that holds the result. */
static NAMED(pair) NAMED(chain)(const stages *own, int64_t lanes, NAMED(pair) x,
                                NAMED(pair) y, NAMED(pair) roots, int64_t table) {
    int64_t left = own->n, s = lanes;
    for (int64_t k = 0; k < own->count; k++) {
        int64_t r = own->radix[k], m = left / r, step = table / left;
        const REAL *wr = roots.re, *wi = roots.im;
        if (r == 4)
            NAMED(stage4)(m, s, x.re, x.im, y.re, y.im, wr, wi, step);
        else if (r == 2)
            NAMED(stage2)(m, s, x.re, x.im, y.re, y.im, wr, wi, step);
        else if (r == 3)
            NAMED(stage3)(m, s, x.re, x.im, y.re, y.im, wr, wi, step);
        else if (r == 5)
            NAMED(stage5)(m, s, x.re, x.im, y.re, y.im, wr, wi, step);
        else
            NAMED(stage_odd)(r, table, m, s, x.re, x.im, y.re, y.im, wr, wi, step);
        NAMED(pair) kept = x;
        x = y;
        y = kept;
        left = m;
        s *= r;
    }
    return x;
}

static NAMED(pair) NAMED(swapped)(NAMED(pair) x) {
    return (NAMED(pair)){x.im, x.re};
}

/* x *= a, a number for all lanes */
static void NAMED(times)(int64_t n, int64_t lanes, NAMED(pair) x, NAMED(pair) a) {
    for (int64_t k = 0; k < n; k++) {
        REAL c = a.re[k], d = a.im[k];
        REAL *re = x.re + k * lanes, *im = x.im + k * lanes;
        for (int64_t q = 0; q < lanes; q++) {
            REAL kept = re[q] * c - im[q] * d;
            im[q] = re[q] * d + im[q] * c;
            re[q] = kept;
        }
    }
}

/* The transform of x (n x lanes), in one of the two buffers. */
static NAMED(pair) NAMED(transform)(const NAMED(plan) *plan, int64_t lanes,
                                    NAMED(pair) x, NAMED(pair) y) {
    int64_t n = plan->n, size = plan->longer;
    if (size == 0)
        return NAMED(chain)(&plan->own, lanes, x, y, plan->roots, plan->table);
    size_t rest = sizeof(REAL) * (size_t)((size - n) * lanes);
    NAMED(times)(n, lanes, x, plan->chirp);
    memset(x.re + n * lanes, 0, rest);
    memset(x.im + n * lanes, 0, rest);
    NAMED(pair) z = NAMED(chain)(&plan->own, lanes, x, y, plan->longer_roots, size);
    NAMED(pair) free = z.re == x.re ? y : x;
    NAMED(times)(size, lanes, z, plan->response);
    z = NAMED(swapped)(NAMED(chain)(&plan->own, lanes, NAMED(swapped)(z),
                                    NAMED(swapped)(free), plan->longer_roots, size));
    NAMED(times)(n, lanes, z, plan->chirp);
    return z;
}

static NAMED(pair) NAMED(cut)(REAL **from, int64_t count) {
    NAMED(pair) out = {*from, *from + count};
    *from += 2 * count;
    return out;
}

/* Fills the tables; the numbers in a buffer of a lane. */
static int64_t NAMED(make_plan)(NAMED(plan) *plan, int64_t n, int64_t table,
                                void *shared, void *work) {
    REAL *at = shared;
    plan->n = n;
    plan->table = table;
    plan->roots = NAMED(cut)(&at, table);
    NAMED(fill_roots)(table, plan->roots);
    plan->longer = 0;
    if (is_smooth(n, &plan->own)) return n;
    int64_t size = plan->longer = convolved(n), square = 0;
    is_smooth(size, &plan->own);
    plan->chirp = NAMED(cut)(&at, n);
    plan->response = NAMED(cut)(&at, size);
    plan->longer_roots = NAMED(cut)(&at, size);
    NAMED(fill_roots)(size, plan->longer_roots);
    REAL *memory = work;
    NAMED(pair) x = NAMED(cut)(&memory, size), y = NAMED(cut)(&memory, size);
    memset(x.re, 0, sizeof(REAL) * 2 * (size_t)size);
    for (int64_t k = 0; k < n; k++) { /* square = k^2 mod 2n */
        double re, im;
        root(square, 2 * n, &re, &im);
        plan->chirp.re[k] = (REAL)re;
        plan->chirp.im[k] = (REAL)im;
        x.re[k] = x.re[k ? size - k : 0] = (REAL)(re / (double)size);
        x.im[k] = x.im[k ? size - k : 0] = (REAL)(-im / (double)size);
        square = (square + 2 * k + 1) % (2 * n);
    }
    x = NAMED(chain)(&plan->own, 1, x, y, plan->longer_roots, size);
    memcpy(plan->response.re, x.re, sizeof(REAL) * (size_t)size);
    memcpy(plan->response.im, x.im, sizeof(REAL) * (size_t)size);
    return size;
}

/* ---- rows in and out of lanes ---------------------------------------------------- */

/* Where a unit's rows start in a tensor with so many elements in a row. */
static int64_t NAMED(starts)(const rows *r, int64_t unit, int64_t size, int64_t *out) {
    int64_t first = unit * r->lanes, all = r->outer * r->inner;
    int64_t count = plt_min(r->lanes, all - first);
    for (int64_t l = 0; l < r->lanes; l++) {
        int64_t row = plt_min(first + l, all - 1); /* the last ones may be idle */
        out[l] = row / r->inner * size * r->inner + row % r->inner;
    }
    return count;
}

static int NAMED(adjacent)(const rows *r, const int64_t *starts) {
    for (int64_t l = 1; l < r->lanes; l++)
        if (starts[l] != starts[0] + l) return 0;
    return 1;
}

/* Where the elements of a row go among lanes: all to one array, or in turns to two. */
typedef struct NAMED(places) {
    REAL *to[2];
    int64_t arrays;
} NAMED(places);

static inline REAL *NAMED(place)(const NAMED(places) *p, int64_t i, int64_t lanes) {
    return p->arrays == 2 ? p->to[i & 1] + (i >> 1) * lanes : p->to[0] + i * lanes;
}

typedef REAL NAMED(four)
    __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL))));

/* The transpose of four rows of four. */
static inline void NAMED(turn)(NAMED(four) *x) {
    NAMED(four) a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
    NAMED(four) b = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
    NAMED(four) c = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
    NAMED(four) d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
    x[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    x[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

/* Elements [0, count) of each row of a unit, to lanes. */
static void NAMED(gather)(const rows *r, const int64_t *starts, const void *given,
                          int64_t count, NAMED(places) p) {
    const REAL *x = given;
    int64_t lanes = r->lanes, inner = r->inner, l = 0;
    if (NAMED(adjacent)(r, starts)) {
        for (int64_t i = 0; i < count; i++) {
            const REAL *from = x + starts[0] + i * inner;
            REAL *to = NAMED(place)(&p, i, lanes);
            for (int64_t k = 0; k < lanes; k++) to[k] = from[k];
        }
        return;
    }
    for (; inner == 1 && l + 4 <= lanes; l += 4) {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            NAMED(four) tile[4];
            for (int k = 0; k < 4; k++)
                tile[k] = *(const NAMED(four) *)(x + starts[l + k] + i);
            NAMED(turn)(tile);
            for (int k = 0; k < 4; k++)
                *(NAMED(four) *)(NAMED(place)(&p, i + k, lanes) + l) = tile[k];
        }
        for (; i < count; i++)
            for (int k = 0; k < 4; k++)
                NAMED(place)(&p, i, lanes)[l + k] = x[starts[l + k] + i];
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = l; k < lanes; k++)
            NAMED(place)(&p, i, lanes)[k] = x[starts[k] + i * inner];
}

/* The way back, scaled. */
static void NAMED(scatter)(const rows *r, const int64_t *starts, int64_t used,
                           NAMED(places) p, int64_t count, void *given) {
    REAL *x = given, scale = (REAL)r->scale;
    int64_t lanes = r->lanes, inner = r->inner, l = 0;
    if (NAMED(adjacent)(r, starts)) {
        for (int64_t i = 0; i < count; i++) {
            REAL *to = x + starts[0] + i * inner;
            const REAL *from = NAMED(place)(&p, i, lanes);
            for (int64_t k = 0; k < lanes; k++) to[k] = from[k] * scale;
        }
        return;
    }
    for (; inner == 1 && l + 4 <= used; l += 4) {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            NAMED(four) tile[4];
            for (int k = 0; k < 4; k++)
                tile[k] = *(NAMED(four) *)(NAMED(place)(&p, i + k, lanes) + l) * scale;
            NAMED(turn)(tile);
            for (int k = 0; k < 4; k++)
                *(NAMED(four) *)(x + starts[l + k] + i) = tile[k];
        }
        for (; i < count; i++)
            for (int k = 0; k < 4; k++)
                x[starts[l + k] + i] = NAMED(place)(&p, i, lanes)[l + k] * scale;
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = l; k < used; k++)
            x[starts[k] + i * inner] = NAMED(place)(&p, i, lanes)[k] * scale;
}

static NAMED(places) NAMED(whole)(REAL *to) {
    return (NAMED(places)){{to, to}, 1};
}

static void NAMED(buffers)(const rows *r, int64_t worker, NAMED(pair) *x,
                           NAMED(pair) *y) {
    int64_t size = r->length * r->lanes + APART;
    REAL *at = (REAL *)(r->work + worker * r->room);
    *x = NAMED(cut)(&at, size);
    *y = NAMED(cut)(&at, size);
}

static void NAMED(fft)(void *args, int64_t begin, int64_t end, int64_t worker) {
    const rows *r = args;
    int64_t n = r->n, start[LANES];
    NAMED(pair) x, y;
    NAMED(buffers)(r, worker, &x, &y);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t used = NAMED(starts)(r, unit, n, start);
        NAMED(gather)(r, start, r->re, n, NAMED(whole)(x.re));
        NAMED(gather)(r, start, r->im, n, NAMED(whole)(x.im));
        NAMED(pair) z = NAMED(transform)(r->plan, r->lanes, x, y);
        NAMED(scatter)(r, start, used, NAMED(whole)(z.re), n, r->out_re);
        NAMED(scatter)(r, start, used, NAMED(whole)(z.im), n, r->out_im);
    }
}

/* The spectrum of a real row of even length from that of its even elements as real and
 * its odd ones as imaginary parts, into `out`. */
CLONED static void NAMED(split)(int64_t h, int64_t lanes, NAMED(pair) z,
                                NAMED(pair) roots, NAMED(pair) out) {
    for (int64_t k = 0; k <= h; k++) {
        int64_t a = k == h ? 0 : k, b = k ? h - k : 0;
        REAL c = k == h ? -1 : roots.re[k], d = k == h ? 0 : roots.im[k];
        const REAL *ar = z.re + a * lanes, *ai = z.im + a * lanes;
        const REAL *br = z.re + b * lanes, *bi = z.im + b * lanes;
        REAL *re = out.re + k * lanes, *im = out.im + k * lanes;
        for (int64_t q = 0; q < lanes; q++) {
            REAL even_r = ar[q] + br[q], even_i = ai[q] - bi[q];
            REAL odd_r = ai[q] + bi[q], odd_i = br[q] - ar[q];
            re[q] = (REAL)0.5 * (even_r + (odd_r * c - odd_i * d));
            im[q] = (REAL)0.5 * (even_i + (odd_r * d + odd_i * c));
        }
    }
}

static void NAMED(rfft)(void *args, int64_t begin, int64_t end, int64_t worker) {
    const rows *r = args;
    const NAMED(plan) *plan = r->plan;
    int64_t n = r->n, h = plan->n, start[LANES], to[LANES];
    NAMED(pair) x, y;
    NAMED(buffers)(r, worker, &x, &y);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t used = NAMED(starts)(r, unit, n, start);
        NAMED(starts)(r, unit, r->half, to);
        NAMED(places) real = {{x.re, x.im}, n % 2 ? 1 : 2};
        NAMED(gather)(r, start, r->re, n, real);
        if (n % 2) memset(x.im, 0, sizeof(REAL) * (size_t)(n * r->lanes));
        NAMED(pair) z = NAMED(transform)(plan, r->lanes, x, y);
        if (n % 2 == 0) {
            NAMED(pair) out = z.re == x.re ? y : x;
            NAMED(split)(h, r->lanes, z, plan->roots, out);
            z = out;
        }
        NAMED(scatter)(r, to, used, NAMED(whole)(z.re), r->half, r->out_re);
        NAMED(scatter)(r, to, used, NAMED(whole)(z.im), r->half, r->out_im);
    }
}

/* The way back: what even and odd elements are the transform of, from a half. */
CLONED static void NAMED(join)(int64_t h, int64_t lanes, NAMED(pair) x,
                               NAMED(pair) roots, NAMED(pair) out) {
    for (int64_t k = 0; k < h; k++) {
        REAL c = roots.re[k], d = -roots.im[k];
        const REAL *ar = x.re + k * lanes, *ai = x.im + k * lanes;
        const REAL *br = x.re + (h - k) * lanes, *bi = x.im + (h - k) * lanes;
        REAL *re = out.re + k * lanes, *im = out.im + k * lanes;
        for (int64_t q = 0; q < lanes; q++) {
            REAL even_r = ar[q] + br[q], even_i = ai[q] - bi[q];
            REAL less_r = ar[q] - br[q], less_i = ai[q] + bi[q];
            re[q] = even_r - (less_r * d + less_i * c);
            im[q] = even_i + (less_r * c - less_i * d);
        }
    }
}

static void NAMED(irfft)(void *args, int64_t begin, int64_t end, int64_t worker) {
    const rows *r = args;
    const NAMED(plan) *plan = r->plan;
    int64_t n = r->n, h = plan->n, lanes = r->lanes, from[LANES], to[LANES];
    size_t row = sizeof(REAL) * (size_t)lanes;
    NAMED(pair) x, y;
    NAMED(buffers)(r, worker, &x, &y);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t used = NAMED(starts)(r, unit, n, to);
        NAMED(starts)(r, unit, r->half, from);
        NAMED(pair) half = n % 2 ? x : y;
        NAMED(gather)(r, from, r->re, r->half, NAMED(whole)(half.re));
        NAMED(gather)(r, from, r->im, r->half, NAMED(whole)(half.im));
        memset(half.im, 0, row); /* of a real row, these are 0 */
        if (n % 2) {
            for (int64_t i = lanes; i < r->half * lanes; i++) {
                int64_t mirror = (n - i / lanes) * lanes + i % lanes;
                x.re[mirror] = x.re[i];
                x.im[mirror] = -x.im[i];
            }
        } else {
            memset(half.im + h * lanes, 0, row);
            NAMED(join)(h, lanes, y, plan->roots, x);
        }
        NAMED(pair) z = NAMED(transform)(plan, lanes, NAMED(swapped)(x),
                                         NAMED(swapped)(y));
        NAMED(places) real = {{z.im, z.re}, n % 2 ? 1 : 2};
        NAMED(scatter)(r, to, used, real, n, r->out_re);
    }
}
