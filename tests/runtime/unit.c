/* Unit tests of the C runtime, built by test_c.py under each sanitizer. Run with the
 * names of tests, or with none for all, or with -name for all but that one; prints the
 * name of each that passed. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef PLT_NO_THREADS
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif
#include <time.h>

#define CHECK(c)                                                            \
    do {                                                                    \
        if (!(c)) {                                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c);         \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static int64_t below(uint64_t *state, int64_t n) {
    return (int64_t)(next_random(state) % (uint64_t)n);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- services that count and can fail ---- */

typedef struct counting {
    _Atomic int64_t blocks, bytes, total;
    _Atomic int64_t fail_after; /* allocations until one fails; -1: never */
} counting;

static void *count_allocate(void *context, size_t bytes) {
    counting *c = context;
    if (atomic_load(&c->fail_after) >= 0 && atomic_fetch_sub(&c->fail_after, 1) == 0) {
        return NULL;
    }
    void *p = malloc(bytes);
    if (!p) return NULL;
    atomic_fetch_add(&c->blocks, 1);
    atomic_fetch_add(&c->total, 1);
    atomic_fetch_add(&c->bytes, (int64_t)bytes);
    return p;
}

static void count_release(void *context, void *p, size_t bytes) {
    counting *c = context;
    atomic_fetch_sub(&c->blocks, 1);
    atomic_fetch_sub(&c->bytes, (int64_t)bytes);
    free(p);
}

static plt_services counted(counting *c) {
    *c = (counting){.fail_after = -1};
    return (plt_services){
        .context = c, .allocate = count_allocate, .release = count_release};
}

/* ---- planner ---- */

static void check_packing(const plt_interval *v, int64_t n, const int64_t *offsets,
                          int64_t arena, int64_t bound) {
    int64_t extent = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        CHECK(offsets[i] >= 0 && offsets[i] % PLT_ALIGN == 0);
        int64_t live = 0;
        int64_t end = offsets[i] + v[i].size;
        if (v[i].size && end > extent) extent = end;
        for (int64_t j = 0; j < n; j++) {
            if (v[j].first <= v[i].first && v[i].first <= v[j].last) live += v[j].size;
            if (j >= i || !v[i].size || !v[j].size) continue;
            bool together = v[i].first <= v[j].last && v[j].first <= v[i].last;
            bool overlap = offsets[i] < offsets[j] + v[j].size &&
                           offsets[j] < offsets[i] + v[i].size;
            CHECK(!(together && overlap));
        }
        if (live > most) most = live;
    }
    CHECK(extent == arena);
    CHECK(most == bound);
    CHECK(arena >= bound);
}

static void test_planner(void) {
    counting c;
    plt_services s = counted(&c);
    uint64_t seed = 88172645463325252u;
    enum { MOST = 400 };
    plt_interval v[MOST];
    int64_t offsets[MOST], arena, bound, exact = 0, trials = 400;
    double excess = 0;
    for (int64_t t = 0; t < trials; t++) {
        int64_t n = below(&seed, t < 300 ? 24 : MOST);
        int64_t steps = 1 + below(&seed, 2 * n + 2);
        for (int64_t i = 0; i < n; i++) {
            v[i].size = PLT_ALIGN * below(&seed, 1 << below(&seed, 12));
            v[i].first = below(&seed, steps);
            v[i].last = v[i].first + below(&seed, 1 + below(&seed, 12));
        }
        CHECK(plt_pack(&s, v, n, 0, PLT_PACK_EFFORT, offsets, &arena, &bound) == PLT_OK);
        check_packing(v, n, offsets, arena, bound);
        exact += arena == bound;
        if (bound) excess += (double)arena / (double)bound - 1;
        int64_t again[MOST], same;
        CHECK(plt_pack(&s, v, n, 0, PLT_PACK_EFFORT, again, &same, &bound) == PLT_OK && same == arena);
        CHECK(n == 0 || memcmp(again, offsets, (size_t)n * sizeof *again) == 0);
    }
    CHECK(c.blocks == 0 && c.bytes == 0);
    printf("  optimal for %d of %d, mean excess %.2f%%\n", (int)exact, (int)trials,
           100 * excess / (double)trials);
    CHECK(excess / (double)trials < 0.03);

    c.fail_after = 0;
    v[0] = (plt_interval){64, 0, 0};
    CHECK(plt_pack(&s, v, 1, 0, PLT_PACK_EFFORT, offsets, &arena, &bound) == PLT_ERR_MEMORY);
}

static void test_planner_overflow(void) {
    counting c;
    plt_services s = counted(&c);
    int64_t big = INT64_MAX / 2 & ~(int64_t)63, offsets[3], arena, bound, rounded;
    plt_interval v[3] = {{big, 0, 1}, {big, 1, 2}, {big, 1, 1}};
    CHECK(plt_pack(&s, v, 3, 0, PLT_PACK_EFFORT, offsets, &arena, &bound) == PLT_ERR_OVERFLOW);
    v[2].first = v[2].last = 3; /* not live together: fits */
    CHECK(plt_pack(&s, v, 3, 0, PLT_PACK_EFFORT, offsets, &arena, &bound) == PLT_OK && arena == 2 * big);
    CHECK(!plt_round(-1, &rounded) && !plt_round(INT64_MAX, &rounded));
    CHECK(plt_round(INT64_MAX - 63, &rounded));
    CHECK(plt_round(1, &rounded) && rounded == 64);
    CHECK(c.blocks == 0);
}

/* Shaped like a network: layers of short-lived buffers, some that last. */
static void test_planner_time(void) {
    uint64_t seed = 12345;
    for (int64_t n = 300; n <= 4800; n *= 4) {
        plt_interval *v = malloc((size_t)n * sizeof *v);
        int64_t *offsets = malloc((size_t)n * sizeof *offsets), arena, bound;
        for (int64_t i = 0; i < n; i++) {
            v[i].size = PLT_ALIGN * (1 + below(&seed, 4096));
            v[i].first = i;
            v[i].last = i + 1 + below(&seed, below(&seed, 10) ? 4 : 60);
        }
        plt_services s;
        plt_services_copy(&s, NULL);
        double best = 1e9;
        for (int k = 0; k < 5; k++) {
            double start = now();
            CHECK(plt_pack(&s, v, n, 0, PLT_PACK_EFFORT, offsets, &arena, &bound) == PLT_OK);
            if (now() - start < best) best = now() - start;
        }
        printf("  %d buffers: %.3f ms, %.2f%% above the bound\n", (int)n, 1e3 * best,
               100.0 * ((double)arena / (double)bound - 1));
        free(v);
        free(offsets);
    }
}

/* ---- a model: x (n) i64, k -> x + k + 1 + constant, through two buffers ---- */

static int64_t bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    symbols[1] = dims[1];
    return dims[0] > 1 << 20 ? 8 : 0;
}

static void sizes(const int64_t *symbols, int64_t *table) {
    if (__builtin_mul_overflow(symbols[0], 8, &table[0])) table[0] = -1;
    table[1] = symbols[0];
    table[2] = symbols[1];
    table[3] = symbols[2];
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

static plt_model *make_model(const plt_services *s, int64_t threads, int64_t capacity) {
    static const plt_input_desc inputs[] = {
        {PLT_TENSOR, 0, 64, 1}, {PLT_SCALAR, 0, 0, 0}};
    static const plt_buffer_desc buffers[] = {{0}, {0}};
    static const plt_touch_desc touches[] = {
        {0, PLT_WRITES}, {0, PLT_READS}, {1, PLT_WRITES}, {1, PLT_READS}};
    static const plt_step_desc steps[] = {
        {0, 1, -1, -1, 1}, {1, 2, -1, -1, 1}, {3, 1, -1, -1, 1}};
    static const int32_t numbers[] = {0, 1, 2};
    static const plt_order_desc order = {numbers, NULL};
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

static int call_model(plt_model *m, int64_t n, int64_t k, plt_result *out) {
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

static void check_call(plt_model *m, int64_t n, int64_t k) {
    plt_result r;
    CHECK(call_model(m, n, k, &r) == PLT_OK);
    CHECK(r.n_outputs == 1 && r.outputs[0].rank == 1 && r.outputs[0].dims[0] == n);
    const int64_t *y = r.outputs[0].data;
    CHECK((uintptr_t)y % PLT_ALIGN == 0);
    for (int64_t i = 0; i < n; i++) CHECK(y[i] == i + k + 1001);
    plt_result_free(m, &r);
}

static void test_calls(void) {
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

static void test_statuses(void) {
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
    EXPECT(a[0].strides = &stride, PLT_ERR_LAYOUT, 1, 0);
    EXPECT(a[0].data = (char *)x + 1, PLT_ERR_LAYOUT, 1, -1);
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
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW && info.detail[0] == 0);
    symbols[0] = INT64_MAX / 8 - 8; /* a buffer fits, two do not */
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW && info.detail[0] == -1);
    symbols[0] = -1;
    CHECK(plt_plan(m, symbols, -1, &info) == PLT_ERR_OVERFLOW);
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
static void test_out_of_memory(void) {
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

static void test_malformed(void) {
    plt_buffer_desc buffer = {0};
    plt_output_desc output = {0, 64, 1, 0};
    plt_touch_desc touch = {0, PLT_WRITES};
    plt_step_desc step = {0, 1, -1, 0, 1};
    int32_t number = 0, root = 0;
    plt_order_desc order = {&number, &root};
    plt_model_desc good = {.n_table = 1, .n_buffers = 1, .buffers = &buffer,
                           .n_outputs = 1, .outputs = &output, .run = run,
                           .sizes = sizes, .bind = bind, .threads = 1,
                           .n_steps = 1, .steps = &step, .n_touches = 1,
                           .touches = &touch, .n_orders = 1, .orders = &order}, d;
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
    REJECT(output.dim_index = 1, output.dim_index = 0);
    REJECT(output.rank = -1, output.rank = 1);
    plt_model *m = plt_model_create(&good, NULL);
    CHECK(m);
    plt_model_destroy(m);
}

/* ---- plans ---- */

static plt_entry *make_entry(const plt_services *s, int64_t a, int64_t b) {
    size_t bytes = sizeof(plt_entry) + 2 * sizeof(int64_t);
    plt_entry *e = plt_allocate(s, bytes);
    e->block_bytes = bytes;
    e->key = (int64_t *)(e + 1);
    e->key[0] = a;
    e->key[1] = b;
    e->hash = plt_plans_hash(e->key, 2);
    e->refs = 1;
    return e;
}

static void test_plans(void) {
    counting c;
    plt_services s = counted(&c);
    plt_plans p;
    enum { CAPACITY = 5, KEYS = 9 };
    CHECK(plt_plans_init(&p, &s, CAPACITY, 2));
    uint64_t seed = 99;
    int64_t stamp[KEYS] = {0}, clock = 0;
    for (int step = 0; step < 20000; step++) {
        int64_t k = below(&seed, KEYS), key[2] = {k, -k};
        bool cached = false; /* by the definition of least recently used */
        int64_t newer = 0;
        for (int64_t j = 0; j < KEYS; j++) newer += stamp[j] > stamp[k];
        cached = stamp[k] && newer < CAPACITY;
        plt_entry *e = plt_plans_find(&p, key, plt_plans_hash(key, 2));
        CHECK((e != NULL) == cached);
        if (!e) e = plt_plans_insert(&p, &s, make_entry(&s, k, -k));
        CHECK(e->key[0] == k && p.count <= CAPACITY);
        plt_entry *twin = plt_plans_insert(&p, &s, make_entry(&s, k, -k));
        CHECK(twin == e);
        plt_plans_drop(&s, twin);
        plt_plans_drop(&s, e);
        stamp[k] = ++clock;
    }
    /* an entry in use outlives its eviction */
    plt_entry *held = plt_plans_insert(&p, &s, make_entry(&s, 100, 0));
    plt_plans_clear(&p, &s);
    CHECK(p.count == 0 && held->key[0] == 100);
    plt_plans_drop(&s, held);
    plt_plans_destroy(&p, &s);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

/* ---- arena ---- */

static void test_arena(void) {
    for (int64_t flags = 0; flags < 8; flags++) {
        if (flags & PLT_FLAG_POISON) continue;
        counting c;
        plt_services s = counted(&c);
        s.flags = flags;
        plt_arena a = {0};
        uint64_t seed = 4242;
        for (int step = 0; step < 400; step++) {
            int64_t need = PLT_ALIGN * below(&seed, 1 << below(&seed, 17));
            CHECK(plt_arena_fit(&a, &s, need));
            CHECK((uintptr_t)a.base % PLT_ALIGN == 0 && a.mapped <= need + 2 * 4096);
            CHECK((a.base != NULL) == (need > 0));
            if (need) a.base[0] = a.base[need - 1] = 1;
            int64_t less = need / (1 + below(&seed, 3));
            plt_arena_shrink(&a, &s, less);
            CHECK(a.need <= need && a.mapped <= need + 2 * 4096);
        }
        CHECK(!plt_arena_fit(&a, &s, (int64_t)1 << 60) || (flags & PLT_FLAG_NO_MAP));
        plt_arena_shrink(&a, &s, 0);
        CHECK(!a.map && !a.mapped && c.blocks == 0);
        CHECK(!plt_arena_fit(&a, &s, INT64_MAX - 63) && !a.map);
    }
}

/* A model never holds more than its last call needed, and nothing after a trim. */
static void test_retained(void) {
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

/* ---- threads ---- */

enum { UNITS = 5000, THREADS = 4 };

typedef struct region {
    _Atomic int32_t visits[UNITS];
    int64_t begins[64], ends[64];
    plt_call *nested;
} region;

static void visit(void *p, int64_t begin, int64_t end, int64_t worker) {
    region *r = p;
    r->begins[worker] = begin;
    r->ends[worker] = end;
    for (int64_t i = begin; i < end; i++) atomic_fetch_add(&r->visits[i], 1);
}

static void check_region(plt_call *call, region *r, int64_t units, int64_t grain) {
    memset(r, 0, sizeof *r);
    for (int64_t w = 0; w < 64; w++) r->begins[w] = -1;
    plt_parallel(call, visit, r, units, grain);
    for (int64_t i = 0; i < UNITS; i++) CHECK(r->visits[i] == (i < units));
    int64_t at = 0, count = 0;
    for (; count < 64 && r->begins[count] >= 0; count++) {
        CHECK(r->begins[count] == at);
        CHECK(count == 0 || r->ends[count] - at >= grain);
        at = r->ends[count];
    }
    CHECK(at == (units > 0 ? units : 0) && count <= call->threads);
    for (; count < 64; count++) CHECK(r->begins[count] == -1);
}

static void test_regions(void) {
    counting c;
    plt_services s = counted(&c);
    plt_pool *pool = plt_pool_create(&s);
    region *r = malloc(sizeof *r), *serial = malloc(sizeof *r);
    uint64_t seed = 77;
    for (int k = 0; k < 2000; k++) {
        plt_call call = {.pool = pool, .threads = 1 + below(&seed, 6)};
        plt_call alone = {.pool = NULL, .threads = call.threads};
        int64_t units = below(&seed, 1 + below(&seed, UNITS));
        int64_t grain = below(&seed, 300);
        check_region(&call, r, units, grain);
        check_region(&alone, serial, units, grain);
        CHECK(memcmp(r->begins, serial->begins, sizeof r->begins) == 0);
        CHECK(memcmp(r->ends, serial->ends, sizeof r->ends) == 0);
    }
    plt_pool_destroy(pool);
    free(r);
    free(serial);
    CHECK(c.blocks == 0);
}

static void nest(void *p, int64_t begin, int64_t end, int64_t worker) {
    region *outer = p;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        region *inner = malloc(sizeof *inner);
        check_region(outer->nested, inner, 200 + i, 3);
        free(inner);
    }
}

static void test_nested(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = THREADS};
    region *r = malloc(sizeof *r);
    r->nested = &call;
    for (int k = 0; k < 20; k++) plt_parallel(&call, nest, r, 16, 1);
    free(r);
    plt_pool_destroy(pool);
}

#ifndef PLT_NO_THREADS

static void *regions_from_thread(void *p) {
    plt_call call = {.pool = p, .threads = THREADS};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 300; k++) check_region(&call, r, UNITS - k, 1 + k);
    free(r);
    return NULL;
}

static void test_callers(void) {
    plt_pool *pool = plt_pool_create(NULL);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, regions_from_thread, pool) == 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    plt_pool_destroy(pool);
}

static void *calls_from_thread(void *p) {
    uint64_t seed = (uint64_t)(uintptr_t)&seed | 1;
    for (int k = 0; k < 300; k++) {
        check_call(p, below(&seed, 2000), below(&seed, 4));
        if (k % 50 == 0) plt_trim(p);
    }
    return NULL;
}

static void test_concurrent_calls(void) {
    counting c;
    plt_services s = counted(&c);
    plt_model *m = make_model(&s, 2, 3);
    pthread_t threads[2 * THREADS];
    for (int i = 0; i < 2 * THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, calls_from_thread, m) == 0);
    }
    for (int i = 0; i < 2 * THREADS; i++) pthread_join(threads[i], NULL);
    plt_stats_info stats;
    plt_stats(m, &stats);
    CHECK(stats.calls == 2 * THREADS * 300 && stats.failures == 0);
    CHECK(stats.plans_made + stats.plan_hits == stats.calls);
    /* what concurrent calls left behind goes as serial calls follow */
    for (int k = 0; k < 40; k++) check_call(m, 1, 1);
    plt_stats(m, &stats);
    CHECK(stats.arena_bytes == 4096);
    plt_model_destroy(m);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

/* Parked workers wake, with pauses longer than the spin in between. */
static void test_parking(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 3};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 60; k++) {
        check_region(&call, r, 100, 1);
        usleep(k % 3 ? 2000 : 40);
    }
    free(r);
    plt_pool_destroy(pool);
}

static void wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        fprintf(stderr, "child ended with wait status %#x\n", (unsigned)status);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The child runs regions and calls, forks again, and destroys. */
static void test_fork(void) {
    plt_model *m = make_model(NULL, 3, 4);
    check_call(m, 1000, 1);
    for (int k = 0; k < 5; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            for (int i = 0; i < 20; i++) check_call(m, 1000 + i, 1);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                alarm(20);
                check_call(m, 1000, 2);
                plt_model_destroy(m);
                _exit(0);
            }
            wait_for(grandchild);
            check_call(m, 1000, 2);
            plt_model_destroy(m);
            _exit(0);
        }
        wait_for(child);
        check_call(m, 1000, 3);
    }
    plt_model_destroy(m);
}

static _Atomic int stop_calls;

static void *call_until_stopped(void *p) {
    for (int64_t k = 0; !atomic_load(&stop_calls); k++) check_call(p, k % 3000, 1);
    return NULL;
}

/* Forks while other threads are in the middle of calls: the child must not hang. */
static void test_fork_in_call(void) {
    plt_model *m = make_model(NULL, 2, 4);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, call_until_stopped, m) == 0);
    }
    for (int k = 0; k < 40; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            for (int64_t i = 0; i < 5; i++) {
                int64_t x[64] = {0}, n = 64;
                plt_arg args[2] = {
                    {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1,
                     .data = x, .dims = &n},
                    {.kind = PLT_SCALAR, .value = i},
                };
                plt_result r;
                CHECK(plt_invoke(m, args, 2, &r) == PLT_OK);
                CHECK(((int64_t *)r.outputs[0].data)[63] == i + 1001);
                plt_result_free(m, &r);
            }
            _exit(0);
        }
        wait_for(child);
    }
    atomic_store(&stop_calls, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    plt_model_destroy(m);
}

static pthread_t main_thread;
static _Atomic int on_main, elsewhere;

static void on_signal(int number) {
    (void)number;
    if (pthread_equal(pthread_self(), main_thread)) atomic_fetch_add(&on_main, 1);
    else atomic_fetch_add(&elsewhere, 1);
}

/* Signals sent to the process are never taken by a worker. */
static void test_signals(void) {
    main_thread = pthread_self();
    struct sigaction action = {.sa_handler = on_signal}, old;
    sigaction(SIGUSR1, &action, &old);
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 3};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 100; k++) {
        check_region(&call, r, 100, 1);
        kill(getpid(), SIGUSR1);
    }
    CHECK(on_main > 0 && elsewhere == 0);
    free(r);
    plt_pool_destroy(pool);
    sigaction(SIGUSR1, &old, NULL);
}

static void nothing(void *p, int64_t begin, int64_t end, int64_t worker) {
    (void)p, (void)begin, (void)end, (void)worker;
}

static void test_region_cost(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 2};
    double best = 1e9;
    for (int k = 0; k < 20; k++) {
        double start = now();
        for (int i = 0; i < 1000; i++) plt_parallel(&call, nothing, NULL, 2, 1);
        if (now() - start < best) best = now() - start;
    }
    printf("  hot region on 2 threads: %.2f us\n", best * 1e3);
    double parked = 0;
    for (int k = 0; k < 50; k++) {
        usleep(1000);
        double start = now();
        plt_parallel(&call, nothing, NULL, 2, 1);
        parked += now() - start;
    }
    printf("  after parking: %.2f us\n", parked / 50 * 1e6);
    plt_pool_destroy(pool);
}

#endif

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"planner", test_planner},
    {"planner_overflow", test_planner_overflow},
    {"planner_time", test_planner_time},
    {"calls", test_calls},
    {"statuses", test_statuses},
    {"out_of_memory", test_out_of_memory},
    {"malformed", test_malformed},
    {"plans", test_plans},
    {"arena", test_arena},
    {"retained", test_retained},
    {"regions", test_regions},
    {"nested", test_nested},
#ifndef PLT_NO_THREADS
    {"callers", test_callers},
    {"concurrent_calls", test_concurrent_calls},
    {"parking", test_parking},
    {"fork", test_fork},
    {"fork_in_call", test_fork_in_call},
    {"signals", test_signals},
    {"region_cost", test_region_cost},
#endif
};

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = argc == 1 || argv[1][0] == '-';
        for (int k = 1; k < argc; k++) {
            if (strcmp(argv[k], tests[i].name) == 0) wanted = true;
            if (argv[k][0] == '-' && strcmp(argv[k] + 1, tests[i].name) == 0) {
                wanted = false;
            }
        }
        if (!wanted) continue;
        double start = now();
        tests[i].run();
        printf("ok %s %.2fs\n", tests[i].name, now() - start);
        fflush(stdout);
    }
    return 0;
}
