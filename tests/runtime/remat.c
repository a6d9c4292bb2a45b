/* Random programs under every limit: the same results, inside the limit.
 *
 * A step mixes all that it reads into one number and fills what it writes with numbers
 * that follow from it, so that a value which is lost, stale or overwritten shows. */
#define _POSIX_C_SOURCE 200809L
#include "internal.h"
#include "random.h"

#include <time.h>

enum { STEPS = 48, OBJECTS = 64, TOUCHES = STEPS * 6, OUTPUTS = 2, ORDERS = 3 };

/* ---- the program under test; the last two objects are an output and a parameter ---- */

static struct {
    int64_t n_steps, n_buffers, n_touches;
    plt_step_desc steps[STEPS];
    plt_touch_desc touches[TOUCHES];
    plt_buffer_desc buffers[OBJECTS];
    int64_t bytes[OBJECTS];
    int32_t order[ORDERS][STEPS], roots[ORDERS][OBJECTS];
    int64_t n_orders;
    uint64_t parameter[8];
    int64_t runs[STEPS];
    int64_t seen_high; /* bytes of the arena that were touched */
} t;

static int64_t bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    return 0;
}

static int64_t sizes(const int64_t *symbols, int64_t *table) {
    for (int64_t i = 0; i < t.n_buffers; i++) table[i] = t.bytes[i] * symbols[0];
    table[t.n_buffers] = 8;
    table[t.n_buffers + 1] = symbols[0] * 100000;
    return 0;
}

static uint64_t mix(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0xff51afd7ed558ccdu;
    return h ^ (h >> 29);
}

static uint64_t *words(plt_call *call, int32_t object, int64_t *count) {
    if (object == t.n_buffers) {
        *count = 8;
        return call->outputs[0];
    }
    if (object > t.n_buffers) {
        *count = 8;
        return t.parameter;
    }
    int64_t bytes = call->table[object], at = call->offsets[object];
    *count = bytes / 8;
    if (at + bytes > t.seen_high) t.seen_high = at + bytes;
    return (uint64_t *)(call->arena + at);
}

static void run_step(plt_call *call, int64_t k) {
    const plt_step_desc *s = &t.steps[k];
    uint64_t h = mix(17, (uint64_t)k);
    int64_t n;
    t.runs[k]++;
    for (int64_t i = 0; i < s->n_touches; i++) {
        const plt_touch_desc *touch = &t.touches[s->first_touch + i];
        if (!(touch->flags & PLT_READS)) continue;
        const uint64_t *v = words(call, touch->object, &n);
        for (int64_t j = 1; j < n; j++) CHECK(v[j] == v[0] + (uint64_t)j);
        if (n) h = mix(h, v[0]);
    }
    for (int64_t i = 0; i < s->n_touches; i++) {
        const plt_touch_desc *touch = &t.touches[s->first_touch + i];
        if (!(touch->flags & PLT_WRITES)) continue;
        uint64_t *v = words(call, touch->object, &n);
        uint64_t own = mix(h, (uint64_t)touch->object);
        for (int64_t j = 0; j < n; j++) v[j] = own + (uint64_t)j;
    }
}

/* As generated code does it. */
static void run(plt_call *call) {
    for (const int64_t *at = call->program;; at++) {
        if (*at >= 0 && *at < t.n_steps) run_step(call, *at);
        else if (plt_special(call, *at)) return;
    }
}

/* ---- making programs ---- */

static void add_touch(int64_t k, int32_t object, int32_t flags) {
    plt_step_desc *s = &t.steps[k];
    for (int64_t i = 0; i < s->n_touches; i++) {
        plt_touch_desc *touch = &t.touches[s->first_touch + i];
        if (touch->object != object) continue;
        touch->flags |= flags;
        return;
    }
    t.touches[t.n_touches++] = (plt_touch_desc){object, flags};
    s->n_touches++;
}

static int32_t flags_of(int64_t k, int32_t object) {
    const plt_step_desc *s = &t.steps[k];
    for (int64_t i = 0; i < s->n_touches; i++) {
        plt_touch_desc touch = t.touches[s->first_touch + i];
        if (touch.object == object) return touch.flags;
    }
    return 0;
}

static bool depend(int64_t a, int64_t b) {
    for (int32_t x = 0; x < t.n_buffers + 2; x++) {
        int32_t f = flags_of(a, x), g = flags_of(b, x);
        if (f && g && ((f | g) & PLT_WRITES)) return true;
    }
    return false;
}

/* Buffers that may take the place of one that dies in the step that first writes them. */
static void find_roots(int32_t number, uint64_t *seed) {
    const int32_t *order = t.order[number];
    for (int32_t b = 0; b < t.n_buffers; b++) t.roots[number][b] = b;
    for (int32_t b = 0; b < t.n_buffers; b++) {
        int64_t first = 0;
        while (first < t.n_steps && !flags_of(order[first], b)) first++;
        if (first == t.n_steps || flags_of(order[first], b) != PLT_WRITES) continue;
        if (below(seed, 2)) continue;
        for (int32_t a = 0; a < t.n_buffers; a++) {
            if (flags_of(order[first], a) != PLT_READS || t.bytes[a] < t.bytes[b]) continue;
            bool later = t.roots[number][a] != a;
            for (int64_t p = first + 1; p < t.n_steps; p++) {
                later |= flags_of(order[p], a) != 0;
            }
            for (int32_t c = 0; c < t.n_buffers; c++) {
                later |= c != a && t.roots[number][c] == a;
            }
            bool has_members = false;
            for (int32_t c = 0; c < t.n_buffers; c++) {
                has_members |= c != b && t.roots[number][c] == b;
            }
            if (later || has_members) continue;
            t.roots[number][b] = a;
            break;
        }
    }
}

static void make_program(uint64_t seed) {
    memset(&t, 0, sizeof t);
    int32_t output, parameter;
    t.n_steps = 3 + below(&seed, STEPS - 3);
    t.n_buffers = 2 + below(&seed, OBJECTS - 4);
    output = (int32_t)t.n_buffers;
    parameter = output + 1;
    bool written[OBJECTS] = {false};
    int64_t update = below(&seed, 3) ? t.n_steps : below(&seed, t.n_steps);
    int32_t fresh = 0;
    for (int64_t i = 0; i < t.n_buffers; i++) {
        t.bytes[i] = 64 * (1 + below(&seed, below(&seed, 4) ? 4 : 20));
        t.buffers[i].size_index = i;
    }
    for (int64_t k = 0; k < t.n_steps; k++) {
        t.steps[k] = (plt_step_desc){t.n_touches, 0, -1, t.n_buffers + below(&seed, 2),
                                     below(&seed, 16) != 0};
        for (int reads = below(&seed, 4); reads > 0; reads--) {
            int32_t x = below(&seed, t.n_buffers);
            if (written[x]) add_touch(k, x, PLT_READS);
        }
        if (below(&seed, 6) == 0) add_touch(k, parameter, PLT_READS);
        if (k == update) {
            add_touch(k, parameter, PLT_READS | PLT_WRITES);
            t.steps[k].repeatable = 0;
        }
        int32_t x = below(&seed, t.n_buffers);
        if (written[x] && below(&seed, 8) == 0) {
            add_touch(k, x, below(&seed, 2) ? PLT_WRITES : PLT_READS | PLT_WRITES);
        } else if (fresh < t.n_buffers) {
            written[fresh] = true;
            add_touch(k, fresh++, PLT_WRITES);
        }
        if (fresh < t.n_buffers && below(&seed, 6) == 0) {
            written[fresh] = true;
            add_touch(k, fresh++, PLT_WRITES);
        }
        if (k + 1 == t.n_steps) add_touch(k, output, PLT_WRITES);
        else if (below(&seed, 10) == 0) add_touch(k, output, PLT_WRITES);
    }
    t.n_orders = 1 + below(&seed, ORDERS);
    for (int32_t o = 0; o < t.n_orders; o++) {
        for (int32_t k = 0; k < t.n_steps; k++) t.order[o][k] = k;
        for (int swaps = o ? 200 : 0; swaps > 0; swaps--) {
            int32_t p = below(&seed, t.n_steps - 1), *v = t.order[o];
            if (depend(v[p], v[p + 1])) continue;
            int32_t moved = v[p];
            v[p] = v[p + 1];
            v[p + 1] = moved;
        }
        find_roots(o, &seed);
    }
}

/* ---- running them ---- */

static plt_model *make_model(int64_t can, int64_t flags) {
    static const plt_input_desc input = {PLT_SCALAR, 0, 0, 0, 0};
    plt_output_desc output = {0, 64, 1, t.n_buffers};
    plt_order_desc orders[ORDERS];
    for (int32_t o = 0; o < t.n_orders; o++) {
        orders[o] = (plt_order_desc){t.n_steps, t.order[o], t.roots[o], 0};
    }
    plt_services services = {.flags = flags};
    plt_model_desc d = {
        .n_inputs = 1, .inputs = &input, .n_symbols = 1, .n_table = t.n_buffers + 2,
        .n_buffers = t.n_buffers, .buffers = t.buffers, .n_outputs = 1,
        .outputs = &output, .run = run, .sizes = sizes, .bind = bind, .threads = 1,
        .memory_limit = -1, .n_pinned = 2, .n_steps = t.n_steps, .steps = t.steps,
        .n_touches = t.n_touches, .touches = t.touches, .n_orders = t.n_orders,
        .orders = orders, .can = can, .spill_bytes_per_second = 1e9,
    };
    return plt_model_create(&d, &services);
}

static int call_model(plt_model *m, int64_t n, uint64_t *out, int64_t *detail) {
    plt_arg arg = {.kind = PLT_SCALAR, .value = n};
    plt_result r;
    for (uint64_t j = 0; j < 8; j++) t.parameter[j] = 4711 + j;
    memset(t.runs, 0, sizeof t.runs);
    t.seen_high = 0;
    int status = plt_invoke(m, &arg, 1, &r);
    plt_copy(detail, r.detail, 3, sizeof *detail);
    if (status != PLT_OK) return status;
    memcpy(out, r.outputs[0].data, 64);
    memcpy(out + 8, t.parameter, 64);
    plt_result_free(m, &r);
    for (int64_t k = 0; k < t.n_steps; k++) {
        CHECK(t.runs[k] >= 1 && (t.runs[k] == 1 || t.steps[k].repeatable));
    }
    return PLT_OK;
}

static int64_t tight; /* limits met below the unlimited peak, of all programs */

static void check_limits(int64_t can) {
    int64_t detail[3], least = 0, symbol = 3;
    uint64_t expected[16], got[16];
    plt_model *m = make_model(can, PLT_FLAG_POISON);
    CHECK(m);
    CHECK(call_model(m, symbol, expected, detail) == PLT_OK);
    plt_stats_info stats;
    plt_stats(m, &stats);
    int64_t peak = stats.last_peak_bytes;
    CHECK(stats.last_recomputed_steps == 0 && stats.last_spilled_bytes == 0);
    CHECK(plt_least(m, &symbol, &least) == PLT_OK && least <= peak);
    plt_set_limit(m, least - 1);
    int status = call_model(m, symbol, got, detail);
    if (can == PLT_CAN_RECOMPUTE) { /* the least that the search finds, not that is */
        CHECK(status == PLT_OK || (status == PLT_ERR_LIMIT && detail[1] == least));
    } else {
        CHECK(status == PLT_ERR_LIMIT);
        CHECK(detail[1] == least && detail[2] == least - 1);
    }
    for (int64_t k = 0; k <= 8; k++) {
        int64_t limit = least + (peak - least) * k / 8;
        plt_set_limit(m, limit);
        memset(got, 0, sizeof got);
        CHECK(call_model(m, symbol, got, detail) == PLT_OK);
        CHECK(memcmp(got, expected, sizeof got) == 0);
        plt_stats(m, &stats);
        CHECK(stats.last_peak_bytes <= limit);
        CHECK(t.seen_high <= stats.last_arena_bytes);
        plt_plan_info info = {0};
        CHECK(plt_plan(m, &symbol, limit, &info) == PLT_OK);
        CHECK(info.peak_bytes == stats.last_peak_bytes);
        CHECK(info.recomputed_steps == stats.last_recomputed_steps);
        CHECK(info.spilled_bytes == stats.last_spilled_bytes);
        CHECK((info.n_evictions > 0) ==
              (info.spilled_bytes > 0 || info.recomputed_steps > 0));
        CHECK(!(can & PLT_CAN_SPILL) ? info.spilled_bytes == 0 : true);
        CHECK(!(can & PLT_CAN_RECOMPUTE) ? info.recomputed_steps == 0 : true);
        tight += limit < peak && info.n_evictions > 0;
    }
    plt_model_destroy(m);
}

/* A chain there, and back again with every value used once more, as training has it. */
static void make_chain(int64_t length) {
    memset(&t, 0, sizeof t);
    t.n_buffers = 2 * length;
    t.n_steps = 2 * length;
    t.n_orders = 1;
    for (int64_t k = 0; k < t.n_steps; k++) {
        t.bytes[k] = 6400;
        t.buffers[k].size_index = k;
        t.steps[k] = (plt_step_desc){t.n_touches, 0, -1, t.n_buffers + 1, 1};
        if (k > 0) add_touch(k, (int32_t)k - 1, PLT_READS);
        if (k >= length) add_touch(k, (int32_t)(t.n_steps - 1 - k), PLT_READS);
        add_touch(k, k + 1 == t.n_steps ? (int32_t)t.n_buffers : (int32_t)k,
                  PLT_WRITES);
        t.order[0][k] = (int32_t)k;
        t.roots[0][k] = (int32_t)k;
    }
}

/* Recomputing alone needs the square root of the length, and each step once or twice
 * more, not its square. */
static void check_chain(void) {
    make_chain(20);
    int64_t detail[3], symbol = 1;
    uint64_t expected[16], got[16];
    plt_model *m = make_model(PLT_CAN_RECOMPUTE, PLT_FLAG_POISON);
    CHECK(call_model(m, symbol, expected, detail) == PLT_OK);
    plt_stats_info stats;
    plt_stats(m, &stats);
    plt_set_limit(m, stats.last_peak_bytes / 2);
    CHECK(call_model(m, symbol, got, detail) == PLT_OK);
    CHECK(memcmp(got, expected, sizeof got) == 0);
    plt_stats(m, &stats);
    CHECK(stats.last_recomputed_steps > 0 && stats.last_recomputed_steps <= 40);
    printf("chain: %lld of 40 steps again at half the memory\n",
           (long long)stats.last_recomputed_steps);
    plt_model_destroy(m);
}

int main(int argc, char **argv) {
    int64_t count = argc > 1 ? atoll(argv[1]) : 300;
    for (seed_now = 1; (int64_t)seed_now <= count; seed_now++) {
        make_program(seed_now);
#ifdef PLT_NO_FILES
        check_limits(PLT_CAN_RECOMPUTE);
#else
        check_limits((int64_t)(seed_now % 4));
#endif
    }
    printf("%lld limits met by eviction\n", (long long)tight);
    CHECK(tight > count / 2);
    check_chain();
    printf("ok\n");
    return 0;
}
