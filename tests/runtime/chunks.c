/* Random programs in several versions, under every limit: some steps are replaced by one
 * that loops over chunks of rows, and the plan chooses how many.
 *
 * The results are those of the plain steps; the plan fits and is what it says; no other
 * level of any version is cheaper, and a larger limit never costs more. Prints how many
 * plans without evictions are the cheapest of all settings of all versions. */
#include "internal.h"
#include "random.h"

#include <float.h>
#include <time.h>

enum {
    PLAIN = 12, GROUPS = 3, ORDERS = 5, LEVELS = 10, LIMITS = 24, /* of random programs */
    LAYERS = 12, LARGE = 16 * LAYERS, VERSIONS = 4, LOOPS = VERSIONS * 3 * LAYERS,
    KNOBS = 3 * VERSIONS, TABLE = 1024,
    STEPS = LARGE + LOOPS, BUFFERS = STEPS, TOUCHES = 4096
};

/* A group of plain steps, one after the other, that one step replaces. */
typedef struct group {
    int32_t first, end;
    int64_t knob, other;  /* both count if they differ: a loop in a loop */
    int64_t fixed, again; /* bytes: of its temporaries, and read once for every chunk */
} group;

static struct {
    int64_t n_plain, n_groups, n_steps, n_buffers, n_touches, n_orders, n_knobs;
    plt_step_desc steps[STEPS];
    plt_touch_desc touches[TOUCHES];
    plt_buffer_desc buffers[BUFFERS];
    int64_t row_bytes[BUFFERS]; /* of a value, by row */
    group groups[LOOPS];
    plt_knob_desc knobs[KNOBS];
    int32_t order[ORDERS + 1][STEPS];
    plt_order_desc orders[ORDERS + 1];
    bool separate; /* no group has two knobs */
    int64_t evaluations;
    int64_t most_rows; /* the table refuses more; 0: none */
    int64_t blocks, fail_after; /* allocations; -1: none fails */
} t;

/* ---- the table: bytes by buffer, work by step, extents by knob, the output's dim, and
 * the symbol ---- */

static int64_t extent_entry(void) { return t.n_buffers + t.n_steps; }
static int64_t output_entry(void) { return extent_entry() + t.n_knobs; }
static int64_t symbol_entry(void) { return output_entry() + 1; }

static int64_t extent_of(int64_t n, int64_t knob) {
    return knob % 3 == 0 ? n : knob % 3 == 1 ? 2 * n + 1 : (n + 2) / 3;
}

static int64_t bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    return 0;
}

static int64_t cut(int64_t n, int64_t rows) { return (n + rows - 1) / rows; }

static int64_t sizes(const int64_t *symbols, int64_t *table) {
    const int64_t n = symbols[0], *rows = symbols + 2;
    t.evaluations++;
    for (int64_t k = 0; t.most_rows && k < t.n_knobs; k++) {
        if (rows[k] > t.most_rows) return 1;
    }
    for (int64_t i = 0; i < t.n_plain; i++) {
        table[i] = t.row_bytes[i] * n;
        table[t.n_buffers + i] = 700 * t.row_bytes[i] * n;
    }
    for (int64_t g = 0; g < t.n_groups; g++) {
        const group *at = &t.groups[g];
        int64_t inner = 0, work = 0, extent = extent_of(n, at->knob);
        int64_t chunks = cut(extent, rows[at->knob]);
        for (int32_t k = at->first; k < at->end; k++) {
            inner += t.row_bytes[k];
            work += table[t.n_buffers + k] + 500;
        }
        inner = extent ? cut(inner * n * rows[at->knob], extent) : 0;
        if (at->other != at->knob) {
            extent = extent_of(n, at->other);
            inner = extent ? cut(inner * rows[at->other], extent) : 0;
            chunks *= cut(extent, rows[at->other]);
        }
        table[t.n_plain + g] = inner + at->fixed;
        table[t.n_buffers + t.n_plain + g] = work + at->again * chunks;
    }
    for (int64_t k = 0; k < t.n_knobs; k++) table[extent_entry() + k] = extent_of(n, k);
    table[output_entry()] = 8;
    table[symbol_entry()] = n;
    return 0;
}

/* ---- running ---- */

static uint64_t mix(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0xff51afd7ed558ccdu;
    return h ^ (h >> 29);
}

static uint64_t *words(plt_call *call, int32_t x, int64_t *count) {
    *count = x < t.n_buffers ? call->table[x] / 8 : 8;
    if (x == t.n_buffers) return call->outputs[0];
    return (uint64_t *)(call->arena + call->offsets[x]);
}

static uint64_t read_value(plt_call *call, int32_t x) {
    int64_t n;
    const uint64_t *v = words(call, x, &n);
    for (int64_t j = 1; j < n; j++) CHECK(v[j] == v[0] + (uint64_t)j);
    return n ? v[0] : 0;
}

static void write_value(plt_call *call, int32_t x, uint64_t first) {
    int64_t n;
    uint64_t *v = words(call, x, &n);
    for (int64_t j = 0; j < n; j++) v[j] = first + (uint64_t)j;
}

static bool writes(int64_t step, int32_t x) {
    const plt_step_desc *s = &t.steps[step];
    for (int64_t i = 0; i < s->n_touches; i++) {
        plt_touch_desc touch = t.touches[s->first_touch + i];
        if (touch.object == x && touch.flags & PLT_WRITES) return true;
    }
    return false;
}

/* What plain step k writes; `inner` has the values of the group so far, from `first`. */
static uint64_t compute(plt_call *call, int64_t k, int32_t first, const uint64_t *inner) {
    const plt_step_desc *s = &t.steps[k];
    uint64_t h = mix(17, (uint64_t)k);
    for (int64_t i = 0; i < s->n_touches; i++) {
        plt_touch_desc touch = t.touches[s->first_touch + i];
        if (!(touch.flags & PLT_READS)) continue;
        bool own = touch.object >= first && touch.object < k && call->table[symbol_entry()];
        h = mix(h, own ? inner[touch.object] : read_value(call, touch.object));
    }
    return h;
}

static void run_step(plt_call *call, int64_t k) {
    uint64_t inner[LARGE] = {0};
    int64_t n;
    if (k < t.n_plain) {
        uint64_t h = compute(call, k, (int32_t)t.n_plain, inner);
        write_value(call, k + 1 == t.n_plain ? (int32_t)t.n_buffers : (int32_t)k, h);
        return;
    }
    const group *g = &t.groups[k - t.n_plain];
    uint64_t *scratch = words(call, (int32_t)k, &n);
    for (int64_t j = 0; j < n; j++) scratch[j] = ~(uint64_t)0;
    for (int32_t i = g->first; i < g->end; i++) inner[i] = compute(call, i, g->first, inner);
    for (int32_t i = g->first; i < g->end; i++) {
        if (writes(k, i)) write_value(call, i, inner[i]);
    }
}

static void run(plt_call *call) {
    for (const int64_t *at = call->program;; at++) {
        if (*at >= 0 && *at < t.n_steps) run_step(call, *at);
        else if (plt_special(call, *at)) return;
    }
}

/* ---- making programs ---- */

static void touch(int64_t k, int32_t object, int32_t flags) {
    plt_step_desc *s = &t.steps[k];
    for (int64_t i = s->first_touch; i < t.n_touches; i++) {
        if (t.touches[i].object == object) return;
    }
    CHECK(t.n_touches < TOUCHES);
    t.touches[t.n_touches++] = (plt_touch_desc){object, flags};
    s->n_touches++;
}

static bool reads(int64_t step, int32_t x) {
    const plt_step_desc *s = &t.steps[step];
    for (int64_t i = 0; i < s->n_touches; i++) {
        plt_touch_desc made = t.touches[s->first_touch + i];
        if (made.object == x && made.flags & PLT_READS) return true;
    }
    return false;
}

static void start_step(int64_t k) {
    t.steps[k] = (plt_step_desc){t.n_touches, 0, -1, t.n_buffers + k, 1};
}

static void make_plain(uint64_t *seed) {
    for (int32_t k = 0; k < t.n_plain; k++) {
        start_step(k);
        t.row_bytes[k] = 8 * (1 + below(seed, below(seed, 3) ? 4 : 40));
        if (k > 0) touch(k, k - 1, PLT_READS);
        if (k > 2 && below(seed, 3) == 0) touch(k, below(seed, k - 1), PLT_READS);
        touch(k, k + 1 == t.n_plain ? (int32_t)t.n_buffers : k, PLT_WRITES);
    }
}

/* The step that replaces a group reads what comes from outside and writes what is used
 * outside. */
static void make_group(int64_t g, uint64_t *seed) {
    group *at = &t.groups[g];
    int64_t k = t.n_plain + g;
    start_step(k);
    touch(k, (int32_t)k, PLT_WRITES);
    for (int32_t x = 0; x < at->first; x++) {
        bool used = false;
        for (int32_t i = at->first; i < at->end; i++) used |= reads(i, x);
        if (used) touch(k, x, PLT_READS);
    }
    for (int32_t x = at->first; x < at->end; x++) {
        bool used = false;
        for (int32_t i = at->end; i < t.n_plain; i++) used |= reads(i, x);
        if (used) touch(k, x, PLT_WRITES);
    }
    at->knob = at->other = below(seed, t.n_knobs);
    if (below(seed, 6) == 0) at->other = below(seed, t.n_knobs);
    t.separate &= at->other == at->knob;
    at->fixed = 64 * below(seed, 10);
    at->again = 1 + below(seed, 20000);
}

/* Replaces the groups whose bits are set, counted from one. */
static void make_order(int32_t number, int64_t from, uint64_t groups) {
    plt_order_desc *o = &t.orders[number];
    int32_t *steps = t.order[number];
    *o = (plt_order_desc){0, steps, NULL, 0};
    for (int32_t k = 0; k < t.n_plain; k++) {
        int64_t within = -1;
        for (int64_t g = 0; g < t.n_groups; g++) {
            bool inside = k >= t.groups[g].first && k < t.groups[g].end;
            bool taken = g >= from && g - from < 64 && groups >> (g - from) & 1;
            if (inside && taken) within = g;
        }
        if (within < 0) steps[o->n_steps++] = k;
        if (within < 0 || k != t.groups[within].first) continue;
        steps[o->n_steps++] = (int32_t)(t.n_plain + within);
        o->knobs |= (uint64_t)1 << t.groups[within].knob;
        o->knobs |= (uint64_t)1 << t.groups[within].other;
    }
}

static void make_program(uint64_t seed) {
    memset(&t, 0, sizeof t);
    t.n_plain = 5 + below(&seed, PLAIN - 4);
    t.n_groups = 1 + below(&seed, GROUPS);
    t.n_knobs = 1 + below(&seed, t.n_groups);
    t.n_steps = t.n_buffers = t.n_plain + t.n_groups;
    t.separate = true;
    make_plain(&seed);
    for (int64_t g = 0; g < t.n_groups; g++) {
        int32_t from = (int32_t)((t.n_plain - 1) * g / t.n_groups);
        int32_t to = (int32_t)((t.n_plain - 1) * (g + 1) / t.n_groups);
        t.groups[g].first = from;
        t.groups[g].end = to - (to - from > 1 ? below(&seed, 2) : 0);
        make_group(g, &seed);
    }
    for (int64_t i = 0; i < t.n_buffers; i++) t.buffers[i].size_index = i;
    for (int64_t k = 0; k < t.n_knobs; k++) {
        t.knobs[k] = (plt_knob_desc){extent_entry() + k, 1 + below(&seed, 3) * 7};
    }
    t.n_orders = 2 + below(&seed, ORDERS - 1);
    uint64_t all = ((uint64_t)1 << t.n_groups) - 1;
    for (int32_t o = 0; o < t.n_orders; o++) {
        uint64_t some = o ? 1 + (uint64_t)below(&seed, (int64_t)all) : 0;
        make_order(o, 0, o == 1 ? all : some);
    }
}

/* A dozen layers of sixteen steps, each with three wide parts beside what goes through
 * all of them; in four versions that cut these parts at other places, each version with
 * a knob for each part. */
static void make_large(void) {
    uint64_t seed = 1;
    memset(&t, 0, sizeof t);
    t.n_plain = LARGE;
    t.n_groups = LOOPS;
    t.n_knobs = 3 * VERSIONS;
    t.n_steps = t.n_buffers = LARGE + LOOPS;
    for (int32_t k = 0; k < LARGE; k++) {
        int32_t at = k % 16;
        start_step(k);
        t.row_bytes[k] = at == 5 || at == 10 || at == 15 ? 64 : 64 * (2 + at % 5);
        if (k > 0) touch(k, k - 1, PLT_READS);
        if (at % 5 == 0 && k >= 5) touch(k, k - (at ? 5 : 6), PLT_READS);
        touch(k, k + 1 == LARGE ? (int32_t)t.n_buffers : k, PLT_WRITES);
    }
    for (int32_t g = 0; g < LOOPS; g++) {
        int32_t version = g / (LAYERS * 3), part = g % 3, layer = g / 3 % LAYERS;
        group *at = &t.groups[g];
        at->first = 16 * layer + 5 * part + 1 + version / 2;
        at->end = 16 * layer + 5 * part + 6 - version % 2;
        make_group(g, &seed);
        at->knob = at->other = 3 * version + part;
    }
    for (int64_t i = 0; i < t.n_buffers; i++) t.buffers[i].size_index = i;
    for (int64_t k = 0; k < t.n_knobs; k++) {
        t.knobs[k] = (plt_knob_desc){extent_entry() + k, 16};
    }
    t.n_orders = 2 + VERSIONS;
    make_order(0, 0, 0);
    make_order(1, 0, 0);
    for (int32_t v = 0; v < VERSIONS; v++) {
        make_order(2 + v, v * LAYERS * 3, ((uint64_t)1 << LAYERS * 3) - 1);
    }
}

static void *allocate(void *context, size_t bytes) {
    (void)context;
    if (t.fail_after == 0) return NULL;
    if (t.fail_after > 0) t.fail_after--;
    t.blocks++;
    return malloc(bytes);
}

static void release(void *context, void *p, size_t bytes) {
    (void)context;
    (void)bytes;
    t.blocks--;
    free(p);
}

static plt_model *make_model(int64_t can) {
    static const plt_input_desc input = {PLT_SCALAR, 0, 0, 0, 0};
    plt_output_desc output = {0, 64, 1, output_entry()};
    plt_services services = {
        .allocate = allocate, .release = release, .flags = PLT_FLAG_POISON};
    t.fail_after = -1;
    plt_model_desc d = {
        .n_inputs = 1, .inputs = &input, .n_symbols = 1,
        .n_table = symbol_entry() + 1, .n_buffers = t.n_buffers, .buffers = t.buffers,
        .n_outputs = 1, .outputs = &output, .run = run, .sizes = sizes, .bind = bind,
        .threads = 1, .memory_limit = -1, .n_pinned = 1, .n_steps = t.n_steps,
        .steps = t.steps, .n_touches = t.n_touches, .touches = t.touches,
        .n_orders = t.n_orders, .orders = t.orders, .n_knobs = t.n_knobs,
        .knobs = t.knobs, .can = can, .bytes_per_second = 1e9,
        .spill_bytes_per_second = 1e8,
    };
    return plt_model_create(&d, &services);
}

/* ---- every setting, apart from the runtime's own search ---- */

typedef struct outcome {
    int64_t peak, arena;
    double cost;
} outcome;

static int64_t rows_at(int64_t n, int64_t knob, int64_t level) {
    int64_t multiple = t.knobs[knob].multiple, extent = extent_of(n, knob), rows = extent;
    for (; level > 0; level--) rows = cut(rows, 2);
    rows = cut(rows, multiple) * multiple;
    if (rows > extent) rows = extent;
    return rows < 1 ? 1 : rows;
}

/* Lifetimes by a scan of the order; the arena by the packer, until it fits. */
static outcome measure(int64_t n, int64_t order, const int64_t *rows, int64_t room) {
    const plt_order_desc *o = &t.orders[order];
    static const plt_services none;
    plt_services services;
    plt_services_copy(&services, &none);
    int64_t symbols[2 + KNOBS] = {n, 1}, table[TABLE], offsets[BUFFERS], bound;
    for (int64_t k = 0; k < t.n_knobs; k++) symbols[2 + k] = o->knobs >> k & 1 ? rows[k] : 1;
    sizes(symbols, table);
    plt_interval v[BUFFERS];
    int64_t count = 0;
    outcome made = {0};
    for (int32_t x = 0; x < t.n_buffers; x++) {
        plt_interval life = {(table[x] + 63) / 64 * 64, -1, -1};
        for (int64_t p = 0; p < o->n_steps; p++) {
            if (!reads(o->steps[p], x) && !writes(o->steps[p], x)) continue;
            if (life.first < 0) life.first = p;
            life.last = p;
        }
        if (life.first >= 0) v[count++] = life;
    }
    for (int64_t p = 0; p < o->n_steps; p++) {
        int64_t live = 0;
        for (int64_t i = 0; i < count; i++) {
            live += v[i].first <= p && v[i].last >= p ? v[i].size : 0;
        }
        if (live > made.peak) made.peak = live;
        made.cost += (double)table[t.n_buffers + o->steps[p]] + 500;
    }
    CHECK(plt_pack(&services, v, count, room, 20000, offsets, &made.arena, &bound) == 0);
    CHECK(bound == made.peak);
    return made;
}

/* The least cost of all settings that fit, at one level for all knobs or at any. */
static double cheapest(int64_t n, int64_t room, bool any) {
    double least = DBL_MAX;
    for (int64_t o = 0; o < t.n_orders; o++) {
        int64_t count = LEVELS;
        for (int64_t k = 1; any && k < t.n_knobs; k++) count *= LEVELS;
        for (int64_t code = 0; code < (t.orders[o].knobs ? count : 1); code++) {
            int64_t rows[KNOBS], rest = code;
            for (int64_t k = 0; k < t.n_knobs; k++, rest /= any ? LEVELS : 1) {
                rows[k] = rows_at(n, k, rest % LEVELS);
            }
            outcome made = measure(n, o, rows, room);
            if (made.arena <= room && made.cost < least) least = made.cost;
        }
    }
    return least;
}

/* ---- checks ---- */

static int64_t chunked, evicted, both, compared, exact, dearer, most_evaluations;
static double worst; /* cost at a limit over that at a smaller one */

static void check_plan(plt_model *m, int64_t n, int64_t limit, plt_plan_info *info,
                       uint64_t expected) {
    int64_t table[TABLE], knobs[KNOBS], rows[KNOBS], out = 64, symbols[2 + KNOBS];
    plt_eviction evictions[TOUCHES];
    *info = (plt_plan_info){.table = table, .knobs = knobs, .evictions = evictions,
                            .max_evictions = TOUCHES};
    t.evaluations = 0;
    CHECK(plt_plan(m, &n, limit, info) == PLT_OK);
    if (t.evaluations > most_evaluations) most_evaluations = t.evaluations;
    CHECK(limit < 0 || info->peak_bytes <= limit);
    const plt_order_desc *o = &t.orders[info->order];
    symbols[0] = n;
    symbols[1] = 1;
    for (int64_t k = 0; k < t.n_knobs; k++) {
        bool own = o->knobs >> k & 1;
        CHECK((knobs[k] > 0) == own);
        symbols[2 + k] = rows[k] = own ? knobs[k] : 1;
        int64_t extent = extent_of(n, k);
        CHECK(!own || rows[k] == extent || rows[k] % t.knobs[k].multiple == 0 || !extent);
        CHECK(!own || rows[k] <= extent || (extent == 0 && rows[k] == 1));
    }
    int64_t again[TABLE];
    sizes(symbols, again);
    CHECK(memcmp(table, again, (size_t)(symbol_entry() + 1) * sizeof *table) == 0);
    outcome made = measure(n, info->order, rows, 0);
    CHECK(info->nanoseconds == (int64_t)(made.cost + (double)info->extra_nanoseconds));
    if (info->n_evictions == 0) CHECK(info->lower_bound == made.peak + out);
    for (int64_t i = 0; i < info->n_evictions; i++) {
        bool after = false, before = false;
        for (int64_t p = 0; p < o->n_steps; p++) {
            after |= o->steps[p] == evictions[i].after;
            before |= after && o->steps[p] == evictions[i].before;
        }
        CHECK(before);
    }
    plt_arg arg = {.kind = PLT_SCALAR, .value = n};
    plt_result r;
    plt_stats_info stats;
    plt_set_limit(m, limit);
    CHECK(plt_invoke(m, &arg, 1, &r) == PLT_OK);
    CHECK(*(uint64_t *)r.outputs[0].data == expected || expected == 0);
    plt_result_free(m, &r);
    plt_stats(m, &stats);
    CHECK(stats.last_peak_bytes == info->peak_bytes);
}

static uint64_t plain_result(plt_model *m, int64_t n) {
    plt_arg arg = {.kind = PLT_SCALAR, .value = n};
    plt_result r;
    plt_set_limit(m, -1);
    CHECK(plt_invoke(m, &arg, 1, &r) == PLT_OK);
    uint64_t first = *(uint64_t *)r.outputs[0].data;
    plt_result_free(m, &r);
    return first;
}

static void check_limits(int64_t n, int64_t can) {
    plt_model *m = make_model(can);
    CHECK(m);
    plt_plan_info info, refused = {0};
    int64_t least;
    uint64_t expected = plain_result(m, n);
    check_plan(m, n, -1, &info, expected);
    CHECK(info.order == 0 && info.n_evictions == 0);
    int64_t most = info.peak_bytes;
    CHECK(plt_least(m, &n, &least) == PLT_OK && least <= most);
    int status = plt_plan(m, &n, least - 1, &refused);
    /* a level before the last may pack better, and recomputing is a search */
    CHECK(status == PLT_OK || status == PLT_ERR_LIMIT);
    if (status == PLT_ERR_LIMIT) CHECK(refused.detail[1] == least);
    int64_t before = INT64_MAX;
    for (int64_t k = 0; k <= LIMITS && least < most; k++) {
        int64_t limit = least + (most - least) * k / LIMITS;
        check_plan(m, n, limit, &info, expected);
        bool chunks = t.orders[info.order].knobs != 0;
        chunked += chunks;
        evicted += info.n_evictions > 0;
        both += chunks && info.n_evictions > 0;
        CHECK((double)info.nanoseconds <= cheapest(n, limit - 64, false));
        if (!can && t.separate) {
            compared++;
            exact += (double)info.nanoseconds <= cheapest(n, limit - 64, true);
            CHECK(info.nanoseconds <= before);
        }
        double ratio = (double)info.nanoseconds / (double)before;
        dearer += ratio > 1;
        if (ratio > worst) worst = ratio;
        before = info.nanoseconds;
    }
    plt_model_destroy(m);
    CHECK(t.blocks == 0);
}

/* Settings that the table refuses are not used; every allocation may fail. */
static void check_failures(void) {
    int64_t n = 150, least, knobs[KNOBS];
    plt_model *m = make_model(PLT_CAN_RECOMPUTE);
    CHECK(m);
    plt_plan_info info = {.knobs = knobs};
    t.most_rows = 40;
    CHECK(plt_plan(m, &n, -1, &info) == PLT_OK);
    int64_t most = info.peak_bytes;
    CHECK(plt_least(m, &n, &least) == PLT_OK);
    for (int64_t k = 0; k <= 8; k++) {
        int64_t limit = least + (most - least) * k / 8, blocks = t.blocks;
        int status = PLT_ERR_MEMORY;
        for (int64_t fail = 0; status == PLT_ERR_MEMORY; fail++) {
            t.fail_after = fail;
            status = plt_plan(m, &n, limit, &info);
            t.fail_after = -1;
            CHECK(t.blocks == blocks);
        }
        CHECK(status == PLT_OK && info.peak_bytes <= limit);
        for (int64_t i = 0; i < t.n_knobs; i++) CHECK(knobs[i] <= t.most_rows);
    }
    plt_model_destroy(m);
    CHECK(t.blocks == 0);
    t.most_rows = 0;
}

/* An order that depends on a knob which it does not name: no plan has other sizes than
 * its table says. */
static void check_unnamed_knobs(int64_t can) {
    int64_t n = 150, least;
    for (int64_t o = 1; o < t.n_orders; o++) t.orders[o].knobs &= t.orders[o].knobs - 1;
    plt_model *m = make_model(can);
    CHECK(m);
    plt_arg arg = {.kind = PLT_SCALAR, .value = n};
    plt_plan_info info = {0};
    CHECK(plt_plan(m, &n, -1, &info) == PLT_OK);
    int status = plt_least(m, &n, &least);
    CHECK(status == PLT_OK || status == PLT_ERR_MODEL);
    for (int64_t k = 1; k <= 8; k++) {
        plt_result r;
        plt_set_limit(m, info.peak_bytes * k / 8);
        status = plt_invoke(m, &arg, 1, &r);
        bool said = status == PLT_ERR_LIMIT || status == PLT_ERR_MODEL;
        CHECK(status == PLT_OK || said);
        if (status == PLT_OK) plt_result_free(m, &r);
    }
    plt_model_destroy(m);
}

/* Planning a new shape takes less than a millisecond; it is only printed, because the
 * machine may be busy. */
static void time_plans(int64_t can) {
    make_large();
    plt_model *m = make_model(can);
    CHECK(m);
    int64_t n = 1024, least, evaluations = 0;
    plt_plan_info info = {0};
    CHECK(plt_plan(m, &n, -1, &info) == PLT_OK);
    int64_t most = info.peak_bytes;
    CHECK(plt_least(m, &n, &least) == PLT_OK);
    double worst = 0, sum = 0;
    for (int64_t k = 0; k < LIMITS; k++) {
        int64_t limit = least + (most - least) * k / LIMITS;
        double spent = DBL_MAX;
        for (int again = 0; again < 5; again++) {
            clock_t begun = clock();
            t.evaluations = 0;
            CHECK(plt_plan(m, &n, limit, &info) == PLT_OK);
            double took = (double)(clock() - begun) / CLOCKS_PER_SEC * 1e6;
            if (took < spent) spent = took;
        }
        if (t.evaluations > evaluations) evaluations = t.evaluations;
        sum += spent;
        if (spent > worst) worst = spent;
    }
    printf("%d steps, can %lld: %.0f us in the mean, %.0f at most, %lld evaluations\n",
           LARGE, (long long)can, sum / LIMITS, worst, (long long)evaluations);
    plt_model_destroy(m);
}

int main(int argc, char **argv) {
    int64_t count = argc > 1 ? atoll(argv[1]) : 100;
    static const int64_t extents[] = {0, 1, 7, 31, 64, 100, 97};
    for (seed_now = 1; (int64_t)seed_now <= count; seed_now++) {
        make_program(seed_now);
        int64_t can = (int64_t)(seed_now % 4);
#ifdef PLT_NO_FILES
        can &= ~(int64_t)PLT_CAN_SPILL;
#endif
        check_limits(extents[seed_now % (sizeof extents / sizeof *extents)], can);
        check_limits(100 + below(&(uint64_t){seed_now}, 100), can);
        check_failures();
        check_unnamed_knobs(can);
    }
    printf("%lld plans with chunks, %lld with evictions, %lld with both; %lld of %lld "
           "without are the cheapest; %lld dearer at a larger limit, by %.3f at most; at "
           "most %lld evaluations\n", (long long)chunked, (long long)evicted, (long long)both,
           (long long)exact, (long long)compared, (long long)dearer, worst,
           (long long)most_evaluations);
    CHECK(chunked > count && evicted > count && both > 0);
    CHECK(exact * 100 >= compared * 98);
    time_plans(0);
    time_plans(PLT_CAN_RECOMPUTE);
#ifndef PLT_NO_FILES
    time_plans(PLT_CAN_RECOMPUTE | PLT_CAN_SPILL);
#endif
    printf("ok\n");
    return 0;
}
