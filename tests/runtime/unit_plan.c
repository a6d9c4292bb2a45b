/* Offsets, the cache of plans, and the arena. */
#include "unit.h"

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

void test_planner(void) {
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

void test_planner_overflow(void) {
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
    CHECK(plt_add_up(INT64_MAX, 1) == INT64_MAX && plt_add_up(1, 2) == 3);
    CHECK(c.blocks == 0);
}

/* Sizes near the end of int64: the arena is exact, or the overflow is told; no offset
 * is ever one that wrapped. */
void test_planner_huge(void) {
    counting c;
    plt_services s = counted(&c);
    uint64_t seed = 4242;
    enum { MOST = 12 };
    plt_interval v[MOST];
    int64_t offsets[MOST], arena, bound, exact = 0, refused = 0;
    for (int64_t t = 0; t < 400; t++) {
        int64_t n = 1 + below(&seed, MOST), least = 0;
        for (int64_t i = 0; i < n; i++) {
            v[i].size = PLT_ALIGN * below(&seed, (int64_t)1 << (40 + below(&seed, 18)));
            v[i].first = below(&seed, 8);
            v[i].last = v[i].first + below(&seed, 4);
        }
        bool fits = true;
        for (int64_t i = 0; i < n; i++) {
            int64_t live = 0;
            for (int64_t j = 0; j < n; j++) {
                if (v[j].first > v[i].first || v[i].first > v[j].last) continue;
                fits &= !__builtin_add_overflow(live, v[j].size, &live);
            }
            if (live > least) least = live;
        }
        int status =
            plt_pack(&s, v, n, 0, PLT_PACK_EFFORT, offsets, &arena, &bound);
        CHECK(status == PLT_OK || status == PLT_ERR_OVERFLOW);
        CHECK(fits || status == PLT_ERR_OVERFLOW);
        refused += status != PLT_OK;
        exact += status == PLT_OK;
        if (status == PLT_OK) check_packing(v, n, offsets, arena, bound);
        CHECK(status != PLT_OK || bound == least);
    }
    CHECK(exact > 0 && refused > 0 && c.blocks == 0);
}

/* The bytes of results, at sizes that no tensor has. */
void test_output_bytes(void) {
    const struct {
        int64_t dims[3], bytes; /* -1: refused */
    } cases[] = {
        {{0, (int64_t)1 << 40, 8}, 0},
        {{0, (int64_t)1 << 62, 8}, -1}, /* its strides are no int64 */
        {{(int64_t)1 << 31, (int64_t)1 << 30, 1}, (int64_t)1 << 62},
        {{(int64_t)1 << 31, (int64_t)1 << 30, 4}, -1},
        {{(int64_t)1 << 62, 0, (int64_t)1 << 62}, -1},
        {{-1, 0, 2}, -1},
        {{INT64_MIN, 2, 2}, -1},
        {{3, 5, 7}, 210},
    };
    plt_output_desc o = {.code = 2, .bits = 16, .rank = 3};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int64_t bytes = -1;
        bool told = plt_output_bytes(&o, cases[k].dims, &bytes);
        CHECK(told ? bytes == cases[k].bytes : cases[k].bytes == -1);
    }
}

/* Shaped like a network: layers of short-lived buffers, some that last. */
void test_planner_time(void) {
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

void test_plans(void) {
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

void test_arena(void) {
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
