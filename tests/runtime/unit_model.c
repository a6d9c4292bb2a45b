/* Calls of a small model: results, statuses, what is held. */
#include "unit.h"

static int64_t bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    symbols[1] = dims[1];
    if (dims[1] == INT64_MIN) return -3;
    return dims[0] > 1 << 20 ? 8 : 0;
}

static int64_t sizes(const int64_t *symbols, int64_t *table) {
    if (symbols[1] == 6) return 6;
    if (__builtin_mul_overflow(symbols[0], 8, &table[0])) table[0] = -1;
    table[1] = symbols[0];
    table[2] = symbols[1];
    table[3] = symbols[2];
    return 0;
}

typedef struct span {
    const int64_t *x;
    int64_t *y;
    int64_t k;
} span;

static void add_task(void *p, int64_t begin, int64_t end, int64_t worker) {
    span *s = p;
    (void)worker;
    for (int64_t i = begin; i < end; i++) s->y[i] = s->x[i] + s->k;
}

static void run(plt_call *call) {
    int64_t *a = (int64_t *)(call->arena + call->offsets[0]);
    int64_t *b = (int64_t *)(call->arena + call->offsets[1]);
    int64_t n = call->table[1], k = call->table[2];
    span first = {call->inputs[0], a, k}, second = {a, b, 1};
    span third = {b, call->outputs[0], *(int64_t *)call->weights[0]};
    plt_parallel(call, add_task, &first, n, 8);
    plt_parallel(call, add_task, &second, n, 8);
    plt_parallel(call, add_task, &third, n, 8);
    if (k == 13) call->status = 77;
}

static const int64_t constant = 1000;

plt_model *make_model(const plt_services *s, int64_t threads, int64_t capacity) {
    static const plt_input_desc inputs[] = {
        {PLT_TENSOR, 0, 64, 1, 0}, {PLT_SCALAR, 0, 0, 0, 0}};
    static const plt_buffer_desc buffers[] = {{0}, {0}};
    static const plt_touch_desc touches[] = {
        {0, PLT_WRITES}, {0, PLT_READS}, {1, PLT_WRITES}, {1, PLT_READS}};
    static const plt_step_desc steps[] = {
        {0, 1, -1, -1, 1}, {1, 2, -1, -1, 1}, {3, 1, -1, -1, 1}};
    static const int32_t numbers[] = {0, 1, 2};
    static const plt_order_desc order = {3, numbers, NULL, 0};
    static const plt_output_desc outputs[] = {{0, 64, 1, 1}};
    void *weights[] = {(void *)&constant};
    plt_model_desc d = {
        .n_inputs = 2, .inputs = inputs, .n_symbols = 2, .n_table = 4,
        .n_buffers = 2, .buffers = buffers, .n_outputs = 1, .outputs = outputs,
        .n_weights = 1, .weights = weights, .run = run, .sizes = sizes, .bind = bind,
        .threads = threads, .memory_limit = -1, .plan_capacity = capacity,
        .n_steps = 3, .steps = steps, .n_touches = 4, .touches = touches,
        .n_orders = 1, .orders = &order,
    };
    return plt_model_create(&d, s);
}

int call_model(plt_model *m, int64_t n, int64_t k, plt_result *out) {
    int64_t *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = i;
    plt_arg args[2] = {
        {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1, .data = x,
         .dims = &n},
        {.kind = PLT_SCALAR, .value = k},
    };
    int status = plt_invoke(m, args, 2, out);
    free(x);
    return status;
}

void check_call(plt_model *m, int64_t n, int64_t k) {
    plt_result r;
    CHECK(call_model(m, n, k, &r) == PLT_OK);
    CHECK(r.n_outputs == 1 && r.outputs[0].rank == 1 && r.outputs[0].dims[0] == n);
    const int64_t *y = r.outputs[0].data;
    CHECK((uintptr_t)y % PLT_ALIGN == 0);
    for (int64_t i = 0; i < n; i++) CHECK(y[i] == i + k + 1001);
    plt_result_free(m, &r);
}

void test_calls(void) {
    for (int64_t flags = 0; flags < 8; flags++) {
        counting c;
        plt_services s = counted(&c);
        s.flags = flags;
        plt_model *m = make_model(&s, 3, 4);
        CHECK(m);
        const int64_t lengths[] = {0, 1, 7, 1000, 8, 300000, 9, 1000, 1 << 20, 2, 0};
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            check_call(m, lengths[i], 5);
        }
        plt_stats_info stats;
        plt_stats(m, &stats);
        CHECK(stats.calls == 11 && stats.plans_cached == 4);
        CHECK(stats.arena_bytes == 0 && stats.last_peak_bytes == 0);
        CHECK(stats.max_peak_bytes == 3 * 8 * (1 << 20));
        plt_model_destroy(m);
        CHECK(c.blocks == 0 && c.bytes == 0);
    }
}

void test_statuses(void) {
    counting c;
    plt_services s = counted(&c);
    plt_model *m = make_model(&s, 1, 0);
    plt_result r;
    int64_t x[4] = {0}, dims[2] = {4, 1}, stride = 2;
    plt_arg good[2] = {
        {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1, .data = x,
         .dims = dims},
        {.kind = PLT_SCALAR, .value = 1},
    };
    plt_arg a[2];
#define EXPECT(change, status, at, d)                       \
    memcpy(a, good, sizeof a);                              \
    change;                                                 \
    CHECK(plt_invoke(m, a, 2, &r) == (status));             \
    CHECK(r.detail[at] == (d) && !r.outputs)
    CHECK(plt_invoke(m, good, 1, &r) == PLT_ERR_COUNT && r.detail[1] == 2);
    EXPECT(a[0].kind = PLT_SCALAR, PLT_ERR_KIND, 0, 0);
    EXPECT(a[1].kind = -1, PLT_ERR_KIND, 2, -1);
    EXPECT(a[0].bits = 32, PLT_ERR_DTYPE, 2, 1 << 16 | 32);
    EXPECT(a[0].lanes = 2, PLT_ERR_DTYPE, 2, 2 << 16 | 64);
    EXPECT(a[0].rank = 2, PLT_ERR_RANK, 2, 2);
    EXPECT(a[0].device = 2, PLT_ERR_DEVICE, 2, 2);
    m->inputs[0].written = 1; /* else it would be copied */
    EXPECT(a[0].strides = &stride, PLT_ERR_LAYOUT, 1, 0);
    EXPECT(a[0].data = (char *)x + 1, PLT_ERR_LAYOUT, 1, -1);
    m->inputs[0].written = 0;
    EXPECT(a[0].data = NULL, PLT_ERR_LAYOUT, 1, -1);
    int64_t negative = -4, huge = (1 << 20) + 1;
    EXPECT(a[0].dims = &negative, PLT_ERR_LAYOUT, 1, 0);
    EXPECT(a[0].dims = &huge, PLT_ERR_GUARD, 0, 7);
    EXPECT(a[1].value = 13, PLT_ERR_RUN, 0, 77);
    plt_set_limit(m, 64 * 2 + 31);
    EXPECT((void)0, PLT_ERR_LIMIT, 1, 160);
    plt_set_limit(m, 160);
    check_call(m, 4, 1);
    plt_set_limit(m, -1);

    int64_t symbols[2] = {INT64_MAX / 4, 1};
    plt_plan_info info = {0};
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
    CHECK(info.detail[0] == 0 && info.detail[1] == PLT_OVER_BUFFER);
    symbols[0] = INT64_MAX / 8 - 8; /* a buffer fits, two do not */
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
    CHECK(info.detail[0] == -1 && info.detail[1] == PLT_OVER_ALL);
    symbols[0] = INT64_MAX / 24 + 64; /* two buffers fit, and a result, not all three */
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
    CHECK(info.detail[0] == -1 && info.detail[1] == PLT_OVER_ALL);
    CHECK(plt_least(m, symbols, &info.peak_bytes) == PLT_ERR_OVERFLOW);
    symbols[0] = -1;
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
    symbols[1] = 6; /* what the table's own code refuses */
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
    CHECK(info.detail[0] == 5 && info.detail[1] == PLT_OVER_TABLE);
    EXPECT(a[1].value = 6, PLT_ERR_OVERFLOW, 0, 5);
    EXPECT(a[1].value = INT64_MIN, PLT_ERR_OVERFLOW, 0, 2);
    EXPECT(a[1].value = INT64_MIN, PLT_ERR_OVERFLOW, 1, PLT_OVER_GUARD);
    symbols[1] = 1;
    symbols[0] = (int64_t)1 << 40; /* plans without allocating */
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_OK);
    CHECK(info.peak_bytes == (int64_t)24 << 40 && info.lower_bound == info.peak_bytes);
    symbols[0] = 5;
    int64_t offsets[2], exact[2], table[4];
    info.offsets = offsets;
    info.sizes = exact;
    info.table = table;
    CHECK(plt_plan(m, symbols, 167, &info) == PLT_ERR_LIMIT && info.detail[1] == 168);
    CHECK(plt_plan(m, symbols, 168, &info) == PLT_OK && info.arena_bytes == 128);
    CHECK(exact[0] == 40 && table[1] == 5 && table[3] == 1 && offsets[0] != offsets[1]);
    CHECK(plt_set_threads(m, 0) == PLT_ERR_COUNT && plt_set_threads(m, 2) == PLT_OK);
    check_call(m, 4, 1);
    plt_model_destroy(m);
    CHECK(c.blocks == 0);
}

/* Every allocation fails once: nothing leaks, and the model works afterwards. */
void test_out_of_memory(void) {
    for (int64_t flags = 0; flags <= PLT_FLAG_NO_MAP; flags += PLT_FLAG_NO_MAP) {
        counting c;
        plt_services s = counted(&c);
        s.flags = flags;
        plt_model *m = NULL;
        for (int64_t k = 0; !m; k++) {
            c.fail_after = k;
            m = make_model(&s, 2, 2);
            CHECK(m || c.blocks == 0);
            CHECK(k < 100);
        }
        c.fail_after = -1;
        int status = PLT_ERR_MEMORY;
        for (int64_t k = 0; status != PLT_OK; k++) {
            plt_result r;
            c.fail_after = k;
            status = call_model(m, 100 + k, 1, &r);
            c.fail_after = -1;
            CHECK(status == PLT_OK || status == PLT_ERR_MEMORY);
            if (status == PLT_OK) plt_result_free(m, &r);
            check_call(m, 5, 1);
            plt_trim(m);
            CHECK(k < 100);
        }
        plt_model_destroy(m);
        CHECK(c.blocks == 0 && c.bytes == 0);
    }
}

void test_malformed(void) {
    plt_buffer_desc buffer = {0};
    plt_output_desc output = {0, 64, 1, 0};
    plt_touch_desc touch = {0, PLT_WRITES};
    plt_step_desc step = {0, 1, -1, 0, 1};
    int32_t number = 0, root = 0;
    plt_order_desc order = {1, &number, &root, 0};
    plt_knob_desc knob = {0, 1};
    const plt_step_desc twice[] = {step, step};
    const int32_t again[] = {1, 1};
    plt_model_desc good = {.n_table = 1, .n_buffers = 1, .buffers = &buffer,
                           .n_outputs = 1, .outputs = &output, .run = run,
                           .sizes = sizes, .bind = bind, .threads = 1,
                           .n_steps = 1, .steps = &step, .n_touches = 1,
                           .touches = &touch, .n_orders = 1, .orders = &order,
                           .n_knobs = 1, .knobs = &knob}, d;
#define REJECT(change, restore)                 \
    d = good;                                   \
    change;                                     \
    CHECK(plt_model_create(&d, NULL) == NULL);  \
    restore
    REJECT(d.threads = 0, );
    REJECT(d.run = NULL, );
    REJECT(d.n_table = -1, );
    REJECT(d.n_buffers = (int64_t)1 << 40, );
    REJECT(buffer.size_index = 1, buffer.size_index = 0);
    REJECT(touch.object = 1, touch.object = 0);
    REJECT(touch.flags = 4, touch.flags = PLT_WRITES);
    REJECT(step.n_touches = 2, step.n_touches = 1);
    REJECT(step.bytes_index = 1, step.bytes_index = 0);
    REJECT(number = 1, number = 0);
    REJECT(root = 1, root = 0);
    REJECT(d.n_orders = 0, );
    REJECT(order.n_steps = 2, order.n_steps = 1);
    REJECT(order.knobs = 2, order.knobs = 0); /* there is one */
    REJECT(order.knobs = 1, order.knobs = 0); /* no order without */
    REJECT(knob.extent_index = 1, knob.extent_index = 0);
    REJECT(knob.multiple = 0, knob.multiple = 1);
    REJECT(d.n_knobs = PLT_MOST_KNOBS + 1, );
    REJECT((d.n_steps = 2, d.steps = twice, order.n_steps = 2, order.steps = again),
           (order.n_steps = 1, order.steps = &number));
    REJECT(output.dim_index = 1, output.dim_index = 0);
    REJECT(output.rank = -1, output.rank = 1);
    plt_model *m = plt_model_create(&good, NULL);
    CHECK(m);
    plt_model_destroy(m);
}

/* A model never holds more than its last call needed, and nothing after a trim. */
void test_retained(void) {
    counting c;
    plt_services s = counted(&c);
    plt_model *m = make_model(&s, 1, 8);
    plt_stats_info stats;
    uint64_t seed = 5;
    for (int step = 0; step < 300; step++) {
        int64_t n = below(&seed, 1 << below(&seed, 15));
        check_call(m, n, 1);
        plt_stats(m, &stats);
        CHECK(stats.last_peak_bytes == stats.last_arena_bytes + 8 * n);
#ifdef PLT_NO_MMAP
        CHECK(stats.arena_bytes == stats.last_arena_bytes);
#else
        CHECK(stats.arena_bytes == ((stats.last_arena_bytes + 4095) & ~(int64_t)4095));
#endif
    }
    /* a known shape allocates nothing but its outputs: the block and the data */
    check_call(m, 64, 1);
    int64_t before = c.total;
    for (int k = 0; k < 10; k++) check_call(m, 64, 1);
    CHECK(c.total - before == 20);
    plt_trim(m);
    plt_stats(m, &stats);
    CHECK(stats.arena_bytes == 0 && stats.plans_cached == 0);
    check_call(m, 10, 1);
    plt_model_destroy(m);
    CHECK(c.blocks == 0);
}
