/* sample.c for one element type: REAL, whose functions are NAMED. */

typedef REAL NAMED(two) __attribute__((vector_size(2 * sizeof(REAL))));
typedef REAL NAMED(four)
    __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL))));

/* Points of a block: shares of the elements around each, in the order of an image. */
typedef struct NAMED(shares) {
    REAL of[4][BLOCK];
} NAMED(shares);

/* Two neighbours at each of four places: the first ones, and the second ones. */
static inline void NAMED(neighbours)(const REAL *x, const int64_t *at,
                                     NAMED(four) *first, NAMED(four) *second) {
    NAMED(two) t[4];
    for (int k = 0; k < 4; k++) memcpy(&t[k], x + at[k], sizeof t[k]);
    NAMED(four) low = __builtin_shufflevector(t[0], t[1], 0, 1, 2, 3);
    NAMED(four) high = __builtin_shufflevector(t[2], t[3], 0, 1, 2, 3);
    *first = __builtin_shufflevector(low, high, 0, 2, 4, 6);
    *second = __builtin_shufflevector(low, high, 1, 3, 5, 7);
}

/* One channel at points whose neighbours are all inside: element `at` and the others. */
static void NAMED(inside)(const REAL *x, int64_t width, const int64_t *at,
                          const NAMED(shares) *w, int64_t count, REAL *out) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        NAMED(four) a, b, c, d, s[4];
        NAMED(neighbours)(x, at + i, &a, &b);
        NAMED(neighbours)(x + width, at + i, &c, &d);
        for (int k = 0; k < 4; k++) memcpy(&s[k], w->of[k] + i, sizeof s[k]);
        NAMED(four) sum = a * s[0] + b * s[1] + c * s[2] + d * s[3];
        memcpy(out + i, &sum, sizeof sum);
    }
    for (; i < count; i++) {
        const REAL *p = x + at[i], *q = p + width;
        out[i] = p[0] * w->of[0][i] + p[1] * w->of[1][i] + q[0] * w->of[2][i] +
                 q[1] * w->of[3][i];
    }
}

/* One channel at one point; what is outside counts as 0. */
static REAL NAMED(at_edge)(const image *m, const REAL *x, int64_t row, int64_t column,
                           const NAMED(shares) *w, int64_t i) {
    REAL sum = 0;
    for (int64_t k = 0; k < 4; k++) {
        int64_t r = row + k / 2, c = column + k % 2;
        int some = r >= 0 && r < m->height && c >= 0 && c < m->width;
        sum += (some ? x[r * m->width + c] : 0) * w->of[k][i];
    }
    return sum;
}

static void NAMED(block)(const image *m, int64_t batch, int64_t start, int64_t count) {
    int64_t first = batch * m->points + start, edges = 0;
    const int32_t *rows = m->rows + first, *columns = m->columns + first;
    const REAL *down = (const REAL *)m->down + first;
    const REAL *across = (const REAL *)m->across + first;
    NAMED(shares) w;
    int64_t at[BLOCK];
    int32_t edge[BLOCK];
    for (int64_t i = 0; i < count; i++) {
        REAL y = down[i], x = across[i];
        w.of[0][i] = (1 - y) * (1 - x);
        w.of[1][i] = (1 - y) * x;
        w.of[2][i] = y * (1 - x);
        w.of[3][i] = y * x;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t row = rows[i], column = columns[i];
        int whole = row >= 0 && row < m->height - 1 && column >= 0 &&
                    column < m->width - 1;
        at[i] = whole ? row * m->width + column : 0;
        edge[edges] = (int32_t)i;
        edges += !whole;
    }
    /* With all points at edges there may be no two neighbours to read. */
    int64_t size = m->height * m->width, read = edges < count ? count : 0;
    for (int64_t c = 0; c < m->channels; c++) {
        int64_t channel = batch * m->channels + c;
        const REAL *x = (const REAL *)m->x + channel * size;
        REAL *out = (REAL *)m->out + channel * m->points + start;
        NAMED(inside)(x, m->width, at, &w, read, out);
        for (int64_t k = 0; k < edges; k++) {
            int64_t i = edge[k];
            out[i] = NAMED(at_edge)(m, x, rows[i], columns[i], &w, i);
        }
    }
}
