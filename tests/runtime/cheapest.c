/* What is evicted against every way to evict: small programs, all limits that matter.
 *
 * A way is one of keep, recompute, drop and spill for each gap between uses; its cost is
 * that of the walk. Prints how many choices are the cheapest there is, and how much
 * dearer the others are. */
#include "internal.h"
#include "random.h"

#include <float.h>

enum { STEPS = 12, OBJECTS = 16, TOUCHES = 64, GAPS = 7, LIMITS = 4 };

static struct {
    int64_t n_steps, n_buffers, n_touches;
    plt_step_desc steps[STEPS];
    plt_touch_desc touches[TOUCHES];
    plt_buffer_desc buffers[OBJECTS];
    int64_t sizes[OBJECTS];
    double costs[STEPS];
    int32_t order[STEPS], roots[OBJECTS];
} t;

static int64_t bind(const int64_t *dims, int64_t *symbols) {
    symbols[0] = dims[0];
    return 0;
}

static int64_t sizes(const int64_t *symbols, int64_t *table) {
    (void)symbols;
    for (int64_t i = 0; i <= t.n_buffers; i++) table[i] = t.sizes[i];
    return 0;
}

static void run(plt_call *call) { (void)call; }

static void touch(int64_t k, int64_t object, int32_t flags) {
    const plt_step_desc *s = &t.steps[k];
    for (int64_t i = s->first_touch; i < t.n_touches; i++) {
        if (t.touches[i].object == object) return;
    }
    t.touches[t.n_touches++] = (plt_touch_desc){(int32_t)object, flags};
    t.steps[k].n_touches++;
}

/* Step k writes value k, the last one the output. The second half reads the first half
 * backwards, as training does, with some reads left out and others added. */
static void make_program(uint64_t seed) {
    memset(&t, 0, sizeof t);
    t.n_steps = 6 + below(&seed, STEPS - 5);
    t.n_buffers = t.n_steps - 1;
    for (int64_t k = 0; k < t.n_steps; k++) {
        t.steps[k] = (plt_step_desc){t.n_touches, 0, -1, t.n_buffers, 1};
        t.sizes[k] = 64 * (1 + below(&seed, 8));
        t.buffers[k].size_index = k;
        t.order[k] = t.roots[k] = (int32_t)k;
        t.costs[k] = (double)(1 + below(&seed, below(&seed, 2) ? 10 : 300)) * 1000;
        if (k > 0) touch(k, k - 1, PLT_READS);
        if (k > t.n_steps / 2 && below(&seed, 8)) touch(k, t.n_steps - 1 - k, PLT_READS);
        if (k > 2 && below(&seed, 4) == 0) touch(k, below(&seed, k - 1), PLT_READS);
        touch(k, k, PLT_WRITES);
    }
}

static plt_model *make_model(void) {
    static const plt_input_desc input = {PLT_SCALAR, 0, 0, 0, 0};
    plt_output_desc output = {0, 64, 1, t.n_buffers};
    plt_order_desc order = {t.n_steps, t.order, t.roots, 0};
    plt_services services = {0};
    plt_model_desc d = {
        .n_inputs = 1, .inputs = &input, .n_symbols = 1, .n_table = t.n_buffers + 1,
        .n_buffers = t.n_buffers, .buffers = t.buffers, .n_outputs = 1,
        .outputs = &output, .run = run, .sizes = sizes, .bind = bind, .threads = 1,
        .memory_limit = -1, .n_pinned = 1, .n_steps = t.n_steps, .steps = t.steps,
        .n_touches = t.n_touches, .touches = t.touches, .n_orders = 1,
        .orders = &order, .can = PLT_CAN_RECOMPUTE | PLT_CAN_SPILL,
        .spill_bytes_per_second = 64 / 20e-6, /* 20 us each way for the least value */
    };
    return plt_model_create(&d, &services);
}

/* The arena of the last walk. */
static int64_t packed(const plt_walk *w) {
    static int64_t offsets[4096];
    static plt_interval v[4096];
    const plt_storage *from = w->storages.items;
    int64_t n = w->storages.count, arena, bound;
    CHECK(n <= 4096);
    for (int64_t i = 0; i < n; i++) {
        v[i] = (plt_interval){w->sizes[from[i].object], from[i].first, from[i].last};
    }
    CHECK(plt_pack(&w->model->services, v, n, 0, PLT_PACK_EFFORT, offsets, &arena,
                   &bound) == PLT_OK);
    return arena;
}

/* The gaps in which something else happens; -1 if there are too many. */
static int64_t list_gaps(const plt_order *o, int32_t *gaps) {
    int64_t n = 0;
    for (int32_t x = 0; x < t.n_buffers; x++) {
        for (int32_t k = o->first_use[x]; k + 1 < o->first_use[x + 1]; k++) {
            if (o->uses[k + 1].position == o->uses[k].position + 1) continue;
            if (n == GAPS) return -1;
            gaps[n++] = k;
        }
    }
    return n;
}

static int64_t compared, exact, near, programs;
static double sum, worst;

static void compare(plt_model *m) {
    static double least[LIMITS];
    int64_t limits[LIMITS];
    int32_t gaps[GAPS];
    plt_walk w;
    plt_settings settings = {.model = m, .base = {.sizes = t.sizes, .costs = t.costs}};
    CHECK(plt_walk_init(&w, m));
    w.order = &m->orders[0];
    w.sizes = t.sizes;
    w.costs = t.costs;
    int64_t n = list_gaps(w.order, gaps);
    plt_choice choice;
    if (n >= 0) {
        CHECK(plt_choose(&w, &settings, -1, &choice) == PLT_OK);
        int64_t most = choice.arena;
        plt_choice_free(&w, &choice);
        CHECK(plt_choose_least(&w, &settings, &choice) == PLT_OK);
        for (int64_t k = 0; k < LIMITS; k++) {
            limits[k] = choice.arena + (most - choice.arena) * k / LIMITS;
            least[k] = DBL_MAX;
        }
        plt_choice_free(&w, &choice);
        programs += most > limits[0];
        for (int64_t code = 0; code < (int64_t)1 << 2 * n && most > limits[0]; code++) {
            memset(w.modes, PLT_KEEP, (size_t)t.n_touches);
            for (int64_t k = 0; k < n; k++) w.modes[gaps[k]] = code >> 2 * k & 3;
            if (plt_walk_run(&w, -1) != PLT_WALK_DONE) continue;
            for (int64_t k = 0, arena = -1; k < LIMITS; k++) {
                if (w.peak > limits[k] || w.extra >= least[k]) continue;
                if (arena < 0) arena = packed(&w);
                if (arena <= limits[k]) least[k] = w.extra;
            }
        }
        for (int64_t k = 0; k < LIMITS && most > limits[0]; k++) {
            CHECK(plt_choose(&w, &settings, limits[k], &choice) == PLT_OK);
            CHECK(choice.arena <= limits[k]);
            plt_choice_free(&w, &choice);
            if (least[k] == DBL_MAX) continue; /* adjacent uses had to be parted */
            double ratio = w.extra / least[k];
            compared++;
            exact += ratio < 1.0001;
            near += ratio <= 2;
            sum += ratio;
            if (ratio > worst) worst = ratio;
        }
    }
    plt_walk_free(&w);
}

int main(int argc, char **argv) {
    int64_t count = argc > 1 ? atoll(argv[1]) : 300;
    for (seed_now = 1; (int64_t)seed_now <= count; seed_now++) {
        make_program(seed_now);
        plt_model *m = make_model();
        CHECK(m);
        compare(m);
        plt_model_destroy(m);
    }
    printf("%lld programs, %lld limits, %lld cheapest, mean %.3f, worst %.2f\n",
           (long long)programs, (long long)compared, (long long)exact,
           sum / (double)compared, worst);
    CHECK(programs > count / 2 && exact * 100 >= compared * 95);
    /* the others evict more so that what is left can be packed */
    CHECK(near * 1000 >= compared * 985);
    printf("ok\n");
    return 0;
}
