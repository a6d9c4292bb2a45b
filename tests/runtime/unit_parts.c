/* A model in two parts: x (n) i64 -> those elements that are positive, doubled.
 *
 * Part 0 counts them and doubles all, part 1 picks them through a buffer of 16 bytes
 * each. At a count of ODD, part 1 claims more than its bound has, and must get that. */
#include "unit.h"

enum { ODD = 13, CLAIMED = 1 << 20 };

static int64_t first_bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    return 0;
}

static int64_t first_sizes(const int64_t *symbols, int64_t *table) {
    table[0] = symbols[0];
    return 0;
}

static void first_run(plt_call *call) {
    const int64_t *x = call->inputs[0];
    int64_t *count = call->outputs[0], *twice = call->outputs[1];
    *count = 0;
    for (int64_t i = 0; i < call->table[0]; i++) {
        *count += x[i] > 0;
        twice[i] = 2 * x[i];
    }
}

/* symbols: n, u; table: u, bytes */
static int64_t rest_bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    symbols[1] = dims[1];
    return dims[1] == 3 ? 1 : 0; /* a guard: there may not be three */
}

static int64_t rest_sizes(const int64_t *symbols, int64_t *table) {
    table[0] = symbols[1];
    table[1] = 16 * symbols[1] + (symbols[1] == ODD ? CLAIMED : 0);
    return 0;
}

static int64_t most_bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = symbols[1] = dims[0];
    return 0;
}

static int64_t most_sizes(const int64_t *symbols, int64_t *table) {
    table[0] = symbols[1];
    table[1] = 16 * symbols[1];
    return 0;
}

static void rest_run(plt_call *call) {
    const int64_t *x = call->inputs[0], *twice = call->inputs[2];
    int64_t n = *(const int64_t *)call->weights[0], u = call->table[0], at = 0;
    int64_t *room = (int64_t *)(void *)(call->arena + call->offsets[0]);
    for (int64_t i = 0; at < u; i++) {
        if (x[i] <= 0) continue;
        room[2 * at] = room[2 * at + 1] = twice[i];
        at++;
    }
    int64_t *out = call->outputs[0];
    for (int64_t i = 0; i < u; i++) out[i] = room[2 * i] / 2 + room[2 * i + 1] / 2 + n;
}

static const plt_order_desc no_steps = {0, NULL, NULL, 0};

typedef struct parts {
    plt_model *first, *rest, *bound;
} parts;

static parts make_parts(const plt_services *s) {
    static const int64_t unused = 7, offset = 1000;
    static const plt_input_desc inputs[] = {{PLT_TENSOR, 0, 64, 1, 0},
                                            {PLT_SCALAR, 0, 64, 0, 0},
                                            {PLT_TENSOR, 0, 64, 1, 0}};
    static const plt_input_desc number[] = {{PLT_SCALAR, 0, 64, 0, 0}};
    static const plt_buffer_desc buffer = {1};
    static const plt_touch_desc touch = {0, PLT_WRITES | PLT_READS};
    static const plt_step_desc step = {0, 1, -1, -1, 1};
    static const int32_t numbers[] = {0};
    static const plt_order_desc order = {1, numbers, NULL, 0};
    static const plt_output_desc handed[] = {{0, 64, 0, 0}, {0, 64, 1, 0}};
    static const plt_output_desc result = {0, 64, 1, 0};
    void *weights[] = {(void *)&unused, (void *)&offset};
    plt_model_desc rest = {
        .n_inputs = 3, .inputs = inputs, .n_symbols = 2, .n_table = 2, .n_buffers = 1,
        .buffers = &buffer, .n_outputs = 1, .outputs = &result, .run = rest_run,
        .sizes = rest_sizes, .bind = rest_bind, .threads = 1, .memory_limit = -1,
        .n_steps = 1, .steps = &step, .n_touches = 1, .touches = &touch, .n_orders = 1,
        .orders = &order, .first_weight = 1,
    };
    plt_model_desc bound = rest;
    bound.n_inputs = 1;
    bound.inputs = number;
    bound.sizes = most_sizes;
    bound.bind = most_bind;
    plt_model_desc first = {
        .n_inputs = 1, .inputs = inputs, .n_symbols = 1, .n_table = 1, .n_outputs = 2,
        .outputs = handed, .n_weights = 2, .weights = weights, .run = first_run,
        .sizes = first_sizes, .bind = first_bind, .threads = 1, .memory_limit = -1,
        .n_orders = 1, .orders = &no_steps,
    };
    parts p = {0};
    p.bound = plt_model_create(&bound, s);
    rest.bound = p.bound;
    p.rest = plt_model_create(&rest, s);
    first.next = p.rest;
    p.first = p.rest && p.bound ? plt_model_create(&first, s) : NULL;
    plt_model_desc wrong = first;
    wrong.n_outputs = 1;
    if (p.first) CHECK(!plt_model_create(&wrong, s));
    return p;
}

static void drop_parts(parts *p) {
    plt_model_destroy(p->first);
    plt_model_destroy(p->rest);
    plt_model_destroy(p->bound);
}

/* n elements, of which the last `count` are positive. */
static int call_parts(plt_model *m, int64_t n, int64_t count, plt_result *out) {
    int64_t *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = i - (n - count) + 1;
    plt_arg arg = {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1,
                   .data = x, .dims = &n};
    int status = plt_invoke(m, &arg, 1, out);
    free(x);
    return status;
}

static int64_t planned(int64_t n, int64_t count) {
    int64_t room;
    CHECK(plt_round(16 * count, &room));
    return 8 + 8 * n + 8 * count + room;
}

static void check_parts(plt_model *m, int64_t n, int64_t count) {
    plt_result r;
    CHECK(call_parts(m, n, count, &r) == PLT_OK);
    CHECK(r.n_outputs == 1 && r.outputs[0].rank == 1 && r.outputs[0].dims[0] == count);
    const int64_t *y = r.outputs[0].data;
    for (int64_t i = 0; i < count; i++) CHECK(y[i] == 2 * (i + 1) + 1000);
    plt_result_free(m, &r);
    plt_stats_info stats;
    plt_stats(m, &stats);
    CHECK(stats.last_peak_bytes == stats.last_planned_bytes);
    CHECK(count == ODD || stats.last_peak_bytes == planned(n, count));
    /* One of the count whose buffer claims more gets the places of the bound. */
    CHECK(stats.last_peak_bytes <= planned(n, n));
}

void test_parts(void) {
    for (int64_t flags = 0; flags < 8; flags++) {
        counting c;
        plt_services s = counted(&c);
        s.flags = flags;
        parts p = make_parts(&s);
        CHECK(p.first);
        plt_model *m = p.first;
        for (int64_t n = 0; n < 40; n++) {
            for (int64_t count = 0; count <= n; count++) {
                if (count != 3) check_parts(m, n, count);
            }
        }
        int64_t symbols[2];
        CHECK(plt_last_symbols(p.rest, symbols) == PLT_OK);
        CHECK(symbols[0] == 39 && symbols[1] == 39);
        check_parts(m, 100000, 50000);
        /* What failed, in which part, at which size; then it runs again. */
        plt_result r;
        CHECK(call_parts(m, 9, 3, &r) == PLT_ERR_GUARD && r.detail[0] == 0);
        CHECK(r.detail[PLT_PART] == 1 && r.detail[PLT_N_SIZES] == 1);
        CHECK(r.detail[PLT_SIZES] == 3);
        plt_set_limit(m, planned(100, 50));
        check_parts(m, 100, 50);
        CHECK(call_parts(m, 100, 51, &r) == PLT_ERR_LIMIT);
        CHECK(r.detail[1] == planned(100, 51) && r.detail[2] == planned(100, 50));
        CHECK(r.detail[PLT_PART] == 1 && r.detail[PLT_SIZES] == 51);
        plt_set_limit(m, 807);
        CHECK(call_parts(m, 100, 0, &r) == PLT_ERR_LIMIT && r.detail[PLT_PART] == 0);
        plt_set_limit(m, -1);
        check_parts(m, 100, 100);
        drop_parts(&p);
        CHECK(c.blocks == 0 && c.bytes == 0);
    }
}

void test_parts_out_of_memory(void) {
    counting c;
    plt_services s = counted(&c);
    s.flags = PLT_FLAG_NO_MAP;
    parts p = make_parts(&s);
    for (int64_t n = 10; n < 40; n += 5) { /* each has plans to make */
        for (int64_t fail = 0;; fail++) {
            atomic_store(&c.fail_after, fail);
            plt_result r;
            int status = call_parts(p.first, n, n - 1, &r);
            atomic_store(&c.fail_after, -1);
            if (status == PLT_OK) {
                plt_result_free(p.first, &r);
                break;
            }
            CHECK(status == PLT_ERR_MEMORY && !r.outputs);
        }
        check_parts(p.first, n, n - 1);
    }
    drop_parts(&p);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

void test_parts_budget(void) {
    counting c;
    plt_services s = counted(&c);
    s.budget = plt_budget_create(&s);
    parts p = make_parts(&s);
    plt_budget_info info;
    for (int64_t limit = planned(100, 100); limit > planned(100, 40); limit -= 64) {
        plt_budget_set(s.budget, limit, 0);
        check_parts(p.first, 100, 40);
        plt_budget_read(s.budget, &info);
        CHECK(info.running == 0 && info.waiting == 0);
        CHECK(info.idle <= 16 * 64); /* the arena, which the first part keeps */
    }
    plt_result r;
    CHECK(call_parts(p.first, 100, 99, &r) == PLT_ERR_LIMIT && r.detail[0] == 1);
    plt_budget_read(s.budget, &info);
    CHECK(info.running == 0);
    drop_parts(&p);
    plt_budget_read(s.budget, &info);
    CHECK(info.idle == 0);
    plt_budget_destroy(s.budget);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

#ifndef PLT_NO_THREADS
typedef struct calling {
    plt_model *model;
    uint64_t state;
    pthread_t thread;
} calling;

static void *call_many(void *p) {
    calling *c = p;
    for (int k = 0; k < 300; k++) {
        plt_result r;
        int64_t n = 4 + below(&c->state, 300), count = 4 + below(&c->state, n - 3);
        CHECK(call_parts(c->model, n, count, &r) == PLT_OK);
        CHECK(r.outputs[0].dims[0] == count);
        const int64_t *y = r.outputs[0].data;
        for (int64_t i = 0; i < count; i++) CHECK(y[i] == 2 * (i + 1) + 1000);
        plt_result_free(c->model, &r);
    }
    return NULL;
}

/* Calls of many sizes at once, under a budget that few of them fit: none waits while it
 * holds memory that another waits for. */
void test_parts_callers(void) {
    counting c;
    plt_services s = counted(&c);
    s.budget = plt_budget_create(&s);
    parts p = make_parts(&s);
    plt_budget_set(s.budget, planned(304, 304) * 3 / 2, -1);
    calling calls[4];
    for (int k = 0; k < 4; k++) {
        calls[k] = (calling){.model = p.first, .state = 88172645463325252u + (uint64_t)k};
        CHECK(pthread_create(&calls[k].thread, NULL, call_many, &calls[k]) == 0);
    }
    for (int k = 0; k < 4; k++) pthread_join(calls[k].thread, NULL);
    plt_budget_info info;
    plt_budget_read(s.budget, &info);
    CHECK(info.running == 0 && info.waiting == 0);
    drop_parts(&p);
    plt_budget_destroy(s.budget);
    CHECK(c.blocks == 0 && c.bytes == 0);
}
#endif
