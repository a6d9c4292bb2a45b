/* Chooses the values to evict so that the arena fits: the cheapest first.
 *
 * The candidates are the values that are live at the peak of a run but not needed until
 * later. Those with the least cost per byte are evicted until the peak fits; then the
 * search continues at the next peak. In the end, evictions that turn out not to be
 * needed are undone, the most expensive first. With a spill file the search always
 * reaches the minimum: if everything is evicted, only the operands of one step are in
 * memory.
 *
 * Effort is counted in touches of objects, never in time, so that the same sizes give
 * the same choice. */
#include "internal.h"

#include <float.h>

#define PLT_PRUNE_EFFORT 60000
#define PLT_IMPROVE_EFFORT 60000
/* The most steps in one estimate of the cost of recomputing a value. */
#define PLT_MOST_REPEATED 400

typedef struct plt_candidate {
    double score; /* nanoseconds per byte */
    double cost;
    int32_t object;
    int32_t gap;
    uint8_t mode;
    bool needed; /* recomputing others at the peak needs it: it must be freed after */
} candidate;

static void carve_search(plt_search *s, plt_carver *c) {
    const plt_model *m = s->w->model;
    int64_t most = m->n_touches > m->n_objects ? m->n_touches : m->n_objects;
    s->heap = plt_carve(c, most, sizeof *s->heap);
    s->listed = plt_carve(c, PLT_MOST_REPEATED, sizeof *s->listed);
    s->banned = plt_carve(c, m->n_touches, 1);
    s->best_modes = plt_carve(c, m->n_touches, 1);
    s->before_modes = plt_carve(c, m->n_touches, 1);
    s->chosen_modes = plt_carve(c, m->n_touches, 1);
    /* an order with knobs comes with few rows, and with a middle number of them */
    s->variants = plt_carve(c, 2 * m->n_orders, sizeof *s->variants);
}

bool plt_search_init(plt_search *s, plt_walk *w, plt_settings *settings) {
    *s = (plt_search){.w = w, .settings = settings, .ceiling = DBL_MAX};
    plt_carver c = {0};
    carve_search(s, &c);
    s->block_bytes = c.used;
    s->block = plt_allocate(&w->model->services, c.used);
    if (!s->block) return false;
    c = (plt_carver){.block = s->block};
    carve_search(s, &c);
    return true;
}

void plt_search_free(plt_search *s) {
    plt_release(&s->w->model->services, s->block, s->block_bytes);
}

/* ---- what an eviction costs ---- */

/* Flags of `banned`: what the search must not do with a gap. */
enum { NOT_RECOMPUTED = 1, NOT_EVICTED = 2, TRIED = 4 };

enum { ABSENT, PRESENT, IN_FILE };

/* Where the contents of z are in front of position u, according to the modes. */
static int whereabouts(const plt_walk *w, int32_t z, int32_t u) {
    const plt_order *o = w->order;
    if (z >= w->model->n_buffers) return PRESENT;
    int32_t k = plt_next_use(o, z, u);
    if (k == o->first_use[z] || k == o->first_use[z + 1]) return ABSENT;
    if (o->uses[k].position == u || w->modes[k - 1] == PLT_KEEP) return PRESENT;
    return w->modes[k - 1] == PLT_SPILL ? IN_FILE : ABSENT;
}

/* Nanoseconds to recompute x in front of u; infinite if that is impossible. */
static double recompute_cost(plt_search *s, int32_t x, int32_t u) {
    plt_walk *w = s->w;
    const plt_order *o = w->order;
    int32_t depth = 0, count = 0;
    double total = 0;
    w->stamp++;
    w->mark[x] = w->stamp;
    w->stack[depth++] = x;
    while (depth > 0 && total < DBL_MAX) {
        int32_t y = w->stack[--depth];
        for (int32_t k = o->first_use[y]; k < o->first_use[y + 1]; k++) {
            int32_t q = o->uses[k].position;
            if (q >= u || total >= DBL_MAX) break;
            if (!(o->uses[k].flags & PLT_WRITES)) continue;
            uint64_t bit = (uint64_t)1 << (q & 63);
            if (w->issued[q / 64] & bit) continue;
            int32_t step = o->steps[q];
            if (count == PLT_MOST_REPEATED || !w->model->steps[step].repeatable) {
                total = DBL_MAX;
                break;
            }
            w->issued[q / 64] |= bit;
            s->listed[count++] = q;
            total += w->costs[step];
            w->effort += o->first_touch[q + 1] - o->first_touch[q];
            for (int32_t e = o->first_touch[q]; e < o->first_touch[q + 1]; e++) {
                const plt_access *t = &o->touches[e];
                int32_t z = t->object;
                if (z == y || w->mark[z] == w->stamp) continue;
                int where = whereabouts(w, z, u);
                bool lost = where != ABSENT && t->until < u && t->flags & PLT_READS;
                bool spoils = where != ABSENT && t->flags & PLT_WRITES && !o->alone[z];
                if (lost || spoils) total = DBL_MAX;
                if (where == PRESENT || !(t->flags & PLT_READS)) continue;
                w->mark[z] = w->stamp;
                if (where == IN_FILE) {
                    total += plt_spill_cost(w, z);
                } else {
                    w->stack[depth++] = z;
                }
            }
        }
    }
    for (int32_t k = 0; k < count; k++) w->issued[s->listed[k] / 64] = 0;
    return total;
}

/* Finds the cheaper way to evict a candidate; false if there is none. The score counts
 * at most `excess` freed bytes. */
static bool price(plt_search *s, candidate *c, int64_t excess) {
    plt_walk *w = s->w;
    const plt_model *m = w->model;
    int32_t u = w->order->uses[c->gap + 1].position;
    c->cost = DBL_MAX;
    if (m->can & PLT_CAN_RECOMPUTE && !(s->banned[c->gap] & NOT_RECOMPUTED)) {
        c->cost = recompute_cost(s, c->object, u);
        c->mode = c->needed || w->modes[c->gap] == PLT_RECOMPUTE ? PLT_DROP
                                                                 : PLT_RECOMPUTE;
    }
    double spill = 2 * plt_spill_cost(w, c->object);
    if (m->can & PLT_CAN_SPILL && spill < c->cost) {
        c->cost = spill;
        c->mode = PLT_SPILL;
    }
    int64_t size = w->sizes[c->object];
    c->score = c->cost / (double)(size < excess ? size : excess);
    return c->cost < DBL_MAX;
}

/* ---- a heap of candidates, the least score first ---- */

static bool cheaper(const candidate *a, const candidate *b) {
    return a->score != b->score ? a->score < b->score : a->gap < b->gap;
}

static void sift_down(candidate *v, int64_t n, int64_t root) {
    for (int64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && cheaper(&v[child + 1], &v[child])) child++;
        if (!cheaper(&v[child], &v[root])) return;
        candidate t = v[root];
        v[root] = v[child];
        v[child] = t;
    }
}

static void make_heap(candidate *v, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) sift_down(v, n, i);
}

/* ---- choosing ---- */

/* Lists what is live but not needed at the peak, where the simulation has stopped. */
static int64_t list_candidates(plt_search *s, int64_t excess) {
    plt_walk *w = s->w;
    const plt_order *o = w->order;
    int32_t p = w->peak_position, stamp = w->stamp;
    int64_t count = 0;
    for (int32_t x = 0; x < w->model->n_buffers; x++) {
        int32_t k = w->current[x];
        if (w->open[x] < 0 || k < 0 || w->sizes[x] == 0) continue;
        if (k + 1 >= o->first_use[x + 1] || o->uses[k + 1].position <= p) continue;
        bool needed = w->near[x] == stamp && w->stamp_position == p;
        if (needed && !w->peak_at_step) continue;
        if (s->banned[k] & NOT_EVICTED) continue;
        if (w->modes[k] != PLT_KEEP && w->modes[k] != PLT_RECOMPUTE) continue;
        s->heap[count++] = (candidate){.object = x, .gap = k, .needed = needed};
    }
    int64_t priced = 0;
    for (int64_t i = 0; i < count; i++) {
        if (price(s, &s->heap[i], excess)) s->heap[priced++] = s->heap[i];
    }
    make_heap(s->heap, priced);
    return priced;
}

/* Evicts the cheapest per byte until excess bytes are freed at the peak. */
static bool evict(plt_search *s, int64_t excess) {
    int64_t n = list_candidates(s, excess);
    bool any = false;
    while (n > 0 && excess > 0) {
        candidate *top = s->heap;
        /* evictions since then may have made it more expensive, or impossible */
        double before = top->score;
        if (!price(s, top, excess)) {
            *top = s->heap[--n];
            sift_down(s->heap, n, 0);
            continue;
        }
        if (top->score > before * 1.0001) {
            sift_down(s->heap, n, 0);
            continue;
        }
        s->w->modes[top->gap] = top->mode;
        excess -= s->w->sizes[top->object];
        any = true;
        *top = s->heap[--n];
        sift_down(s->heap, n, 0);
    }
    return any;
}

/* From now on, spills or keeps a value in a gap instead of recomputing it. */
static void give_up(plt_search *s, int32_t gap) {
    s->banned[gap] |= NOT_RECOMPUTED;
    bool spill = s->w->model->can & PLT_CAN_SPILL;
    s->w->modes[gap] = spill ? PLT_SPILL : PLT_KEEP;
}

static bool is_recomputed(uint8_t mode) {
    return mode == PLT_RECOMPUTE || mode == PLT_DROP;
}

/* The peak is among the repeated steps in front of a step: forbids recomputing the
 * largest value there. */
static bool relieve(plt_search *s) {
    plt_walk *w = s->w;
    int32_t worst = -1;
    for (int32_t x = 0; x < w->model->n_buffers; x++) {
        int32_t k = w->current[x];
        if (w->stamp_position != w->peak_position || w->mark[x] != w->stamp) continue;
        if (k < 0 || k + 1 >= w->order->first_use[x + 1]) continue;
        if (!is_recomputed(w->modes[k])) continue;
        if (worst < 0 || w->sizes[x] > w->sizes[worst]) worst = x;
    }
    if (worst < 0) return false;
    give_up(s, w->current[worst]);
    return true;
}

static bool out_of_reach(plt_search *s, int32_t gap) {
    if (gap >= 0) {
        give_up(s, gap);
        return true;
    }
    bool any = false; /* the run is too long: stop recomputing altogether */
    for (int32_t k = 0; k < s->w->model->n_touches; k++) {
        if (!is_recomputed(s->w->modes[k])) continue;
        give_up(s, k);
        any = true;
    }
    return any;
}

int plt_evict(plt_search *s, int64_t goal) {
    plt_walk *w = s->w;
    for (;;) {
        int status = plt_walk_run(w, -1);
        if (status == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
        if (status == PLT_WALK_ILLEGAL) {
            if (!out_of_reach(s, w->culprit)) return PLT_ERR_LIMIT;
            continue;
        }
        if (w->peak < s->best_peak) {
            s->best_peak = w->peak;
            plt_copy(s->best_modes, w->modes, w->model->n_touches, 1);
        }
        if (w->peak <= goal) return PLT_OK;
        if (w->effort > s->until || w->extra > s->ceiling) return PLT_ERR_LIMIT;
        if (plt_walk_run(w, w->peak_time) == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
        bool lowered = evict(s, w->live - goal);
        if (!lowered) {
            /* the estimates have overwritten the marks of the walk */
            if (plt_walk_run(w, w->peak_time) == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
            lowered = relieve(s);
        }
        if (!lowered) return PLT_ERR_LIMIT;
    }
}

/* Lists the evictions as a heap, the most expensive on top, but none whose gap has one
 * of the flags `without`. */
static int64_t list_evicted(plt_search *s, uint8_t without) {
    plt_walk *w = s->w;
    const plt_order *o = w->order;
    int64_t n = 0;
    for (int32_t x = 0; x < w->model->n_buffers; x++) {
        for (int32_t k = o->first_use[x]; k + 1 < o->first_use[x + 1]; k++) {
            if (w->modes[k] == PLT_KEEP || s->banned[k] & without) continue;
            candidate c = {.object = x, .gap = k, .mode = w->modes[k]};
            bool spilled = c.mode == PLT_SPILL;
            c.cost = spilled ? 2 * plt_spill_cost(w, x)
                             : recompute_cost(s, x, o->uses[k + 1].position);
            c.score = -c.cost;
            s->heap[n++] = c;
        }
    }
    make_heap(s->heap, n);
    return n;
}

static int keep_more(plt_search *s, int64_t goal, int64_t until) {
    plt_walk *w = s->w;
    int64_t n = list_evicted(s, 0);
    while (n > 0 && w->effort < until) {
        candidate c = s->heap[0];
        s->heap[0] = s->heap[--n];
        sift_down(s->heap, n, 0);
        w->modes[c.gap] = PLT_KEEP;
        int status = plt_walk_run(w, -1);
        if (status == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
        if (status != PLT_WALK_DONE || w->peak > goal) w->modes[c.gap] = c.mode;
    }
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

int plt_keep_more(plt_search *s, int64_t goal) {
    return keep_more(s, goal, s->w->effort + PLT_PRUNE_EFFORT);
}

/* Whether the present modes fit, and cost less than the cheapest so far. */
static bool is_cheaper(plt_search *s, int64_t goal, double *cost) {
    plt_walk *w = s->w;
    bool done = plt_walk_run(w, -1) == PLT_WALK_DONE;
    if (!done || w->peak > goal || w->extra >= *cost) return false;
    *cost = w->extra;
    return true;
}

/* Tries the other ways to evict in a gap. Where one does not fit, also tries it with
 * values freed again that were recomputed only for others. */
static bool change_mode(plt_search *s, int32_t gap, int64_t goal, double *cost) {
    plt_walk *w = s->w;
    int64_t n = w->model->n_touches;
    bool any = false;
    plt_copy(s->before_modes, w->modes, n, 1);
    for (uint8_t other = PLT_RECOMPUTE; other <= PLT_DROP; other++) {
        int64_t needs = other == PLT_SPILL ? PLT_CAN_SPILL : PLT_CAN_RECOMPUTE;
        if (other == s->before_modes[gap] || !(w->model->can & needs)) continue;
        w->modes[gap] = other;
        bool good = is_cheaper(s, goal, cost);
        if (!good && w->peak > goal && other != PLT_SPILL) {
            for (int64_t k = 0; k < n; k++) {
                if (k != gap && w->modes[k] == PLT_RECOMPUTE) w->modes[k] = PLT_DROP;
            }
            good = is_cheaper(s, goal, cost);
        }
        any |= good;
        plt_copy(good ? s->before_modes : w->modes, good ? w->modes : s->before_modes,
                 n, 1);
    }
    return any;
}

/* Keeps the value in a gap, and evicts others to make room for it. */
static bool exchange(plt_search *s, int32_t gap, int64_t goal, double *cost) {
    plt_walk *w = s->w;
    plt_copy(s->before_modes, w->modes, w->model->n_touches, 1);
    w->modes[gap] = PLT_KEEP;
    s->banned[gap] |= NOT_EVICTED;
    bool good = plt_evict(s, goal) == PLT_OK && keep_more(s, goal, s->until) == PLT_OK &&
                is_cheaper(s, goal, cost);
    s->banned[gap] &= (uint8_t)~NOT_EVICTED;
    if (!good) plt_copy(w->modes, s->before_modes, w->model->n_touches, 1);
    return good;
}

int plt_improve(plt_search *s, int64_t goal) {
    plt_walk *w = s->w;
    double cost = w->extra;
    s->best_peak = 0; /* so that best_modes are not recorded */
    s->until = w->effort + PLT_IMPROVE_EFFORT;
    /* a gap that failed beside other evictions may work now */
    memset(s->banned, 0, (size_t)w->model->n_touches);
    while (w->effort < s->until && list_evicted(s, TRIED) > 0) {
        int32_t gap = s->heap[0].gap;
        bool any = change_mode(s, gap, goal, &cost) || exchange(s, gap, goal, &cost);
        s->banned[gap] |= TRIED;
        for (int64_t k = 0; any && k < w->model->n_touches; k++) {
            s->banned[k] &= (uint8_t)~TRIED;
        }
    }
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}
