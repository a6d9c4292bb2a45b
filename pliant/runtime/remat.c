/* Which values give their memory back, so that the arena fits: cheapest first.
 *
 * At the highest moment of a run, what is live but not needed until later is a
 * candidate. Those that cost least per byte are evicted until that moment fits; then the
 * next highest moment is looked at. What turns out not to be needed is taken back, the
 * dearest first. With a spill file there is always an end: evicting everything leaves
 * each step with its own operands, the least memory there is.
 *
 * Effort is counted in touches of objects, never in time: same sizes, same choice. */
#include "internal.h"

#include <float.h>

#define PLT_SEARCH_EFFORT 400000
#define PLT_PRUNE_EFFORT 60000
/* Packing to fit a limit: giving up is cheap, as more can be evicted. */
#define PLT_FIT_EFFORT 50000
/* Steps in one estimate of what it takes to compute a value again. */
#define PLT_MOST_REPEATED 400
#define PLT_SPILL_CALL_NS 10000.0

typedef struct candidate {
    double score; /* nanoseconds per byte */
    double cost;
    int32_t object;
    int32_t gap;
    uint8_t mode;
    bool needed; /* to make others again at the peak, so it may not stay after that */
} candidate;

typedef struct search {
    plt_walk *w;
    int64_t until;         /* effort at which to stop */
    uint8_t *banned;       /* [n_touches] gaps that cannot be recomputed */
    uint8_t *best_modes;   /* [n_touches] of the lowest peak seen */
    uint8_t *chosen_modes; /* [n_touches] */
    int64_t best_peak;
    int64_t least_kept; /* of all orders, when nothing is evicted */
    candidate *heap;  /* [max(n_objects, n_touches)] */
    int32_t *listed;  /* [PLT_MOST_REPEATED] positions in an estimate */
    size_t block_bytes;
    char *block;
} search;

static void carve_search(search *s, plt_carver *c) {
    const plt_model *m = s->w->model;
    int64_t most = m->n_touches > m->n_objects ? m->n_touches : m->n_objects;
    s->heap = plt_carve(c, most, sizeof *s->heap);
    s->listed = plt_carve(c, PLT_MOST_REPEATED, sizeof *s->listed);
    s->banned = plt_carve(c, m->n_touches, 1);
    s->best_modes = plt_carve(c, m->n_touches, 1);
    s->chosen_modes = plt_carve(c, m->n_touches, 1);
}

static bool search_init(search *s, plt_walk *w) {
    *s = (search){.w = w};
    plt_carver c = {0};
    carve_search(s, &c);
    s->block_bytes = c.used;
    s->block = plt_allocate(&w->model->services, c.used);
    if (!s->block) return false;
    c = (plt_carver){.block = s->block};
    carve_search(s, &c);
    return true;
}

static void search_free(search *s) {
    plt_release(&s->w->model->services, s->block, s->block_bytes);
}

/* ---- what an eviction costs ---- */

enum { ABSENT, PRESENT, IN_FILE };

/* Where z's contents are in front of position u, as far as the modes say. */
static int whereabouts(const plt_walk *w, int32_t z, int32_t u) {
    const plt_order *o = w->order;
    if (z >= w->model->n_buffers) return PRESENT;
    int32_t k = plt_next_use(o, z, u);
    if (k == o->first_use[z] || k == o->first_use[z + 1]) return ABSENT;
    if (o->uses[k].position == u || w->modes[k - 1] == PLT_KEEP) return PRESENT;
    return w->modes[k - 1] == PLT_SPILL ? IN_FILE : ABSENT;
}

/* Nanoseconds to compute x again in front of u; infinite if that cannot be. */
static double recompute_cost(search *s, int32_t x, int32_t u) {
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
                    total += (double)w->sizes[z] * w->model->ns_per_spilled_byte;
                } else {
                    w->stack[depth++] = z;
                }
            }
        }
    }
    for (int32_t k = 0; k < count; k++) w->issued[s->listed[k] / 64] = 0;
    return total;
}

/* The cheaper way to evict; false if there is none. */
static bool price(search *s, candidate *c) {
    plt_walk *w = s->w;
    const plt_model *m = w->model;
    int32_t u = w->order->uses[c->gap + 1].position;
    double size = (double)w->sizes[c->object];
    c->cost = DBL_MAX;
    if (m->can & PLT_CAN_RECOMPUTE && !s->banned[c->gap]) {
        c->cost = recompute_cost(s, c->object, u);
        c->mode = c->needed || w->modes[c->gap] == PLT_RECOMPUTE ? PLT_DROP
                                                                 : PLT_RECOMPUTE;
    }
    double spill = 2 * size * m->ns_per_spilled_byte + PLT_SPILL_CALL_NS;
    if (m->can & PLT_CAN_SPILL && spill < c->cost) {
        c->cost = spill;
        c->mode = PLT_SPILL;
    }
    c->score = c->cost / size;
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

/* What is live at the peak, where the walk has stopped, and not needed there. */
static int64_t list_candidates(search *s) {
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
        if (w->modes[k] != PLT_KEEP && w->modes[k] != PLT_RECOMPUTE) continue;
        s->heap[count++] = (candidate){.object = x, .gap = k, .needed = needed};
    }
    int64_t priced = 0;
    for (int64_t i = 0; i < count; i++) {
        if (price(s, &s->heap[i])) s->heap[priced++] = s->heap[i];
    }
    make_heap(s->heap, priced);
    return priced;
}

/* Evicts the cheapest per byte until excess bytes are freed at the peak. */
static bool evict(search *s, int64_t excess) {
    int64_t n = list_candidates(s);
    bool any = false;
    while (n > 0 && excess > 0) {
        candidate *top = s->heap;
        /* what was evicted since may have made it dearer, or impossible */
        double before = top->score;
        if (!price(s, top)) {
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

/* A gap whose recomputing is of no use is spilled, or kept, from now on. */
static void give_up(search *s, int32_t gap) {
    s->banned[gap] = 1;
    bool spill = s->w->model->can & PLT_CAN_SPILL;
    s->w->modes[gap] = spill ? PLT_SPILL : PLT_KEEP;
}

static bool is_recomputed(uint8_t mode) {
    return mode == PLT_RECOMPUTE || mode == PLT_DROP;
}

/* The peak lies in what is made again in front of a step: its largest value is not
 * recomputed any more. */
static bool relieve(search *s) {
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

static bool out_of_reach(search *s, int32_t gap) {
    if (gap >= 0) {
        give_up(s, gap);
        return true;
    }
    bool any = false; /* too long: nothing is recomputed any more */
    for (int32_t k = 0; k < s->w->model->n_touches; k++) {
        if (!is_recomputed(s->w->modes[k])) continue;
        give_up(s, k);
        any = true;
    }
    return any;
}

static void copy_modes(const search *s, uint8_t *to, const uint8_t *from) {
    plt_copy(to, from, s->w->model->n_touches, 1);
}

/* Evicts until no moment needs more than goal bytes. */
static int reduce(search *s, int64_t goal) {
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
            copy_modes(s, s->best_modes, w->modes);
        }
        if (w->peak <= goal) return PLT_OK;
        if (w->effort > s->until) return PLT_ERR_LIMIT;
        if (plt_walk_run(w, w->peak_time) == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
        bool lowered = evict(s, w->live - goal);
        if (!lowered) {
            /* estimates used its marks */
            if (plt_walk_run(w, w->peak_time) == PLT_WALK_MEMORY) return PLT_ERR_MEMORY;
            lowered = relieve(s);
        }
        if (!lowered) return PLT_ERR_LIMIT;
    }
}

/* Takes evictions back that goal does not need, the dearest first. */
static int prune(search *s, int64_t goal) {
    plt_walk *w = s->w;
    const plt_order *o = w->order;
    int64_t n = 0, until = w->effort + PLT_PRUNE_EFFORT;
    for (int32_t x = 0; x < w->model->n_buffers; x++) {
        for (int32_t k = o->first_use[x]; k + 1 < o->first_use[x + 1]; k++) {
            if (w->modes[k] == PLT_KEEP) continue;
            candidate c = {.object = x, .gap = k, .mode = w->modes[k]};
            bool spilled = c.mode == PLT_SPILL;
            c.cost = spilled ? 2 * (double)w->sizes[x] * w->model->ns_per_spilled_byte
                             : recompute_cost(s, x, o->uses[k + 1].position);
            c.score = -c.cost;
            s->heap[n++] = c;
        }
    }
    make_heap(s->heap, n);
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

/* Offsets for what the last walk found. */
static int pack(plt_walk *w, int64_t enough, int64_t effort, plt_choice *out) {
    const plt_services *s = &w->model->services;
    int64_t n = w->storages.count;
    const plt_storage *from = w->storages.items;
    size_t bytes = (size_t)n * sizeof(plt_interval);
    plt_interval *v = plt_allocate_raw(s, bytes);
    plt_choice made = {.offsets_bytes = (size_t)n * sizeof(int64_t)};
    made.offsets = plt_allocate_raw(s, made.offsets_bytes);
    int status = v && made.offsets ? PLT_OK : PLT_ERR_MEMORY;
    for (int64_t i = 0; status == PLT_OK && i < n; i++) {
        v[i] = (plt_interval){w->sizes[from[i].object], from[i].first, from[i].last};
    }
    if (status == PLT_OK) {
        status =
            plt_pack(s, v, n, enough, effort, made.offsets, &made.arena, &made.bound);
    }
    plt_release(s, v, bytes);
    if (status == PLT_OK) *out = made;
    else plt_release(s, made.offsets, made.offsets_bytes);
    return status;
}

void plt_choice_free(const plt_walk *w, plt_choice *c) {
    plt_release(&w->model->services, c->offsets, c->offsets_bytes);
    c->offsets = NULL;
}

static void take(const plt_walk *w, plt_choice *best, plt_choice made, int64_t order) {
    plt_choice_free(w, best);
    *best = made;
    best->order = (int32_t)order;
}

static void start(search *s, int64_t order) {
    plt_walk *w = s->w;
    w->order = &w->model->orders[order];
    memset(w->modes, PLT_KEEP, (size_t)w->model->n_touches);
    memset(s->banned, 0, (size_t)w->model->n_touches);
}

/* The order with the smallest arena when nothing is evicted, of those that may fit.
 * None does if best has no offsets then. */
static int choose_order(search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    s->least_kept = INT64_MAX;
    for (int64_t k = 0; k < w->model->n_orders; k++) {
        start(s, k);
        if (plt_walk_run(w, -1) != PLT_WALK_DONE) return PLT_ERR_MEMORY;
        if (w->peak < s->least_kept) s->least_kept = w->peak;
        if (limit >= 0 && w->peak > limit) continue;
        if (best->offsets && w->peak >= best->arena) continue;
        plt_choice made;
        int status = pack(w, 0, PLT_PACK_EFFORT, &made);
        if (status != PLT_OK) return status;
        if (best->offsets && made.arena >= best->arena) plt_choice_free(w, &made);
        else take(w, best, made, k);
    }
    return PLT_OK;
}

/* Modes with the least peak: everything is spilled, or as much as possible computed
 * again. */
static int evict_all(search *s) {
    plt_walk *w = s->w;
    if (w->model->can & PLT_CAN_SPILL) {
        const plt_use *uses = w->order->uses;
        for (int64_t k = 0; k + 1 < w->model->n_touches; k++) {
            /* of the last use of an object, the mode means nothing */
            bool apart = uses[k + 1].position != uses[k].position + 1;
            w->modes[k] = apart ? PLT_SPILL : PLT_KEEP;
        }
    } else {
        s->best_peak = INT64_MAX;
        s->until = w->effort + PLT_SEARCH_EFFORT;
        if (reduce(s, 0) == PLT_ERR_MEMORY) return PLT_ERR_MEMORY;
        copy_modes(s, w->modes, s->best_modes);
    }
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

/* The least arena of all orders; chosen_modes are its modes. */
static int choose_least(search *s, plt_choice *best) {
    plt_walk *w = s->w;
    if (!w->model->can) return choose_order(s, -1, best);
    for (int64_t k = 0; k < w->model->n_orders; k++) {
        start(s, k);
        int status = evict_all(s);
        if (status != PLT_OK) return status;
        if (best->offsets && w->peak >= best->arena) continue;
        plt_choice made;
        status = pack(w, 0, PLT_PACK_EFFORT, &made);
        if (status != PLT_OK) return status;
        if (best->offsets && made.arena >= best->arena) {
            plt_choice_free(w, &made);
        } else {
            take(w, best, made, k);
            copy_modes(s, s->chosen_modes, w->modes);
        }
    }
    /* where what is kept lies closer than what is evicted */
    plt_choice kept = {0};
    int status = choose_order(s, best->arena - 1, &kept);
    if (status == PLT_OK && kept.offsets && kept.arena < best->arena) {
        take(w, best, kept, kept.order);
        memset(s->chosen_modes, PLT_KEEP, (size_t)w->model->n_touches);
    } else {
        plt_choice_free(w, &kept);
    }
    return status;
}

/* The cheapest evictions of one order whose arena fits; PLT_ERR_LIMIT if none is
 * found. What is not needed is taken back where the rest still fits then. */
static int fit(search *s, int64_t order, int64_t limit, plt_choice *out) {
    plt_walk *w = s->w;
    start(s, order);
    s->best_peak = INT64_MAX;
    s->until = w->effort + PLT_SEARCH_EFFORT / w->model->n_orders;
    int64_t goal = limit;
    for (;;) {
        int status = reduce(s, goal);
        if (status == PLT_OK) status = pack(w, limit, PLT_FIT_EFFORT, out);
        if (status != PLT_OK) return status;
        if (out->arena <= limit) break;
        int64_t over = out->arena - limit, step = goal / 64 + 1;
        plt_choice_free(w, out);
        goal -= over > step ? over : step;
        if (goal <= 0 || w->effort > s->until) return PLT_ERR_LIMIT;
    }
    copy_modes(s, s->best_modes, w->modes);
    plt_choice made;
    int status = prune(s, goal);
    if (status == PLT_OK) status = pack(w, limit, PLT_FIT_EFFORT, &made);
    if (status == PLT_OK && made.arena <= limit) {
        take(w, out, made, order);
    } else if (status == PLT_OK) {
        plt_choice_free(w, &made);
        copy_modes(s, w->modes, s->best_modes);
        if (plt_walk_run(w, -1) != PLT_WALK_DONE) status = PLT_ERR_MEMORY;
    }
    if (status != PLT_OK) plt_choice_free(w, out);
    return status;
}

/* An order that needs much more than another is not looked at. */
static bool is_promising(search *s, int64_t order, int64_t limit) {
    plt_walk *w = s->w;
    start(s, order);
    if (plt_walk_run(w, -1) != PLT_WALK_DONE) return false;
    if (w->peak > s->least_kept + s->least_kept / 32) return false;
    if (!(w->model->can & PLT_CAN_SPILL)) return true;
    return evict_all(s) == PLT_OK && w->peak <= limit;
}

/* The cheapest fit of all orders; chosen_modes are its modes. */
static int choose_fit(search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    double cost = DBL_MAX;
    for (int64_t k = 0; k < w->model->n_orders; k++) {
        plt_choice made;
        if (!is_promising(s, k, limit)) continue;
        int status = fit(s, k, limit, &made);
        if (status == PLT_ERR_LIMIT) continue;
        if (status != PLT_OK) return status;
        if (w->extra < cost) {
            cost = w->extra;
            take(w, best, made, k);
            copy_modes(s, s->chosen_modes, w->modes);
        } else {
            plt_choice_free(w, &made);
        }
    }
    return cost < DBL_MAX ? PLT_OK : PLT_ERR_LIMIT;
}

/* Walks once more as was chosen. */
static int settle(search *s, const plt_choice *best) {
    plt_walk *w = s->w;
    w->order = &w->model->orders[best->order];
    copy_modes(s, w->modes, s->chosen_modes);
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

int plt_choose_least(plt_walk *w, plt_choice *out) {
    search s;
    *out = (plt_choice){0};
    if (!search_init(&s, w)) return PLT_ERR_MEMORY;
    int status = choose_least(&s, out);
    if (status == PLT_OK) status = settle(&s, out);
    search_free(&s);
    if (status != PLT_OK) plt_choice_free(w, out);
    return status;
}

/* The least arena of all leaves room: some of what it evicts may stay. */
static int use_room(search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    int status = settle(s, best);
    if (status == PLT_OK) status = prune(s, limit - limit / 32);
    plt_choice made;
    if (status == PLT_OK) status = pack(w, limit, PLT_FIT_EFFORT, &made);
    if (status != PLT_OK) return status;
    if (made.arena > limit) {
        plt_choice_free(w, &made);
        return PLT_OK;
    }
    take(w, best, made, best->order);
    copy_modes(s, s->chosen_modes, w->modes);
    return PLT_OK;
}

int plt_choose(plt_walk *w, int64_t limit, plt_choice *out) {
    search s;
    *out = (plt_choice){0};
    if (!search_init(&s, w)) return PLT_ERR_MEMORY;
    int status = choose_order(&s, limit, out);
    bool fits = out->offsets && (limit < 0 || out->arena <= limit);
    if (status == PLT_OK && !fits) {
        plt_choice_free(w, out);
        *out = (plt_choice){0};
        status = w->model->can ? choose_fit(&s, limit, out) : PLT_ERR_LIMIT;
        if (status == PLT_ERR_LIMIT) {
            /* kept even where it does not fit: it tells the least there is */
            plt_choice_free(w, out);
            *out = (plt_choice){0};
            status = choose_least(&s, out);
            if (status == PLT_OK && out->arena > limit) status = PLT_ERR_LIMIT;
            if (status == PLT_OK) status = use_room(&s, limit, out);
        }
    }
    if (status == PLT_OK) status = settle(&s, out);
    search_free(&s);
    if (status != PLT_OK && status != PLT_ERR_LIMIT) plt_choice_free(w, out);
    return status;
}
