/* Small models for the binding's tests, written as generated code would be. */
#include "rt.h"

/* plt_parallel and plt_special, set by the test as a JIT would resolve them. */
void (*parallel)(plt_call *, plt_task, void *, int64_t, int64_t);
int64_t (*special)(plt_call *, int64_t);

/* scale: x (n, m) f32, k scalar -> y = (x * k) + 1 over a scratch buffer.
 * symbols: n, m, k; table: bytes, n, m, k. Guard 0: n <= 1000; guard 1: m <= 100000. */
int64_t scale_bind(const int64_t *dims, int64_t *symbols) {
    for (int i = 0; i < 3; i++) symbols[i] = dims[i];
    if (dims[0] > 1000) return 1;
    return dims[1] > 100000 ? 2 : 0;
}

int64_t scale_sizes(const int64_t *symbols, int64_t *table) {
    int64_t numel;
    if (__builtin_mul_overflow(symbols[0], symbols[1], &numel) ||
        __builtin_mul_overflow(numel, 4, &table[0])) {
        return 1;
    }
    for (int i = 0; i < 3; i++) table[i + 1] = symbols[i];
    table[4] = symbols[3];
    return 0;
}

struct span {
    const float *x;
    float *y;
    float factor, offset;
};

static void scale_task(void *p, int64_t begin, int64_t end, int64_t worker) {
    struct span *s = p;
    (void)worker;
    for (int64_t i = begin; i < end; i++) s->y[i] = s->x[i] * s->factor + s->offset;
}

void scale_run(plt_call *call) {
    int64_t numel = call->table[1] * call->table[2];
    float *scratch = (float *)(call->arena + call->offsets[0]);
    struct span first = {call->inputs[0], scratch, (float)call->table[3], 0.0f};
    struct span second = {scratch, call->outputs[0], 1.0f, 1.0f};
    parallel(call, scale_task, &first, numel, 16);
    parallel(call, scale_task, &second, numel, 16);
    if (call->table[3] == 13) call->status = 42;
}

/* pair: x (n) f32 -> x + w, x * 2, with w a constant scalar; no scratch. */
int64_t pair_bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    return 0;
}

int64_t pair_sizes(const int64_t *symbols, int64_t *table) {
    table[0] = symbols[0];
    return 0;
}

void pair_run(plt_call *call) {
    const float *x = call->inputs[0], *w = call->weights[0];
    float *sum = call->outputs[0], *twice = call->outputs[1];
    for (int64_t i = 0; i < call->table[0]; i++) {
        sum[i] = x[i] + *w;
        twice[i] = x[i] * 2;
    }
}

/* rows: x (n, m) f32 -> y = (x * 2) + 1, by steps 0 and 1 over a scratch buffer, or by
 * step 2 over a smaller one, some rows at a time.
 * symbols: n, m; table: bytes of both, n, m, work of the steps. */
int64_t rows_bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    symbols[1] = dims[1];
    return 0;
}

int64_t rows_sizes(const int64_t *symbols, int64_t *table) {
    int64_t n = symbols[0], m = symbols[1], rows = symbols[3];
    table[0] = n * m * 4;
    table[1] = rows * m * 4;
    table[2] = n;
    table[3] = m;
    table[4] = n * m * 8;
    table[5] = n * m * 16 + 4096 * ((n + rows - 1) / rows);
    table[6] = rows;
    return 0;
}

static void twice(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = x[i] * 2;
}

static void add_one(const float *x, float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] = x[i] + 1;
}

void rows_run(plt_call *call) {
    int64_t n = call->table[2], m = call->table[3], rows = call->table[6];
    const float *x = call->inputs[0];
    float *y = call->outputs[0], *whole = (float *)(call->arena + call->offsets[0]);
    float *part = (float *)(call->arena + call->offsets[1]);
    for (const int64_t *step = call->program;; step++) {
        if (*step == 0) twice(x, whole, n * m);
        else if (*step == 1) add_one(whole, y, n * m);
        else if (*step != 2 && special(call, *step)) return;
        for (int64_t i = 0; *step == 2 && i < n; i += rows) {
            int64_t count = (n - i < rows ? n - i : rows) * m;
            twice(x + i * m, part, count);
            add_one(part, y + i * m, count);
        }
    }
}

/* overrun: writes one byte past its buffer, to meet the guard page. */
void overrun_run(plt_call *call) { call->arena[call->table[0]] = 1; }

/* unwritten: reads scratch it never wrote, to meet the poison. */
void unwritten_run(plt_call *call) {
    const float *scratch = (const float *)(call->arena + call->offsets[0]);
    ((float *)call->outputs[0])[0] = scratch[0];
}
