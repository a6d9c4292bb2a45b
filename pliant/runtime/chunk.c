/* Chooses how many rows a chunk has, in the orders whose steps loop over chunks.
 *
 * An order's memory falls with the level (shape.c) and its cost rises, so the smallest
 * level that fits is searched by halves. A level cuts all of an order's loops alike. So
 * each knob then goes back to the most rows that still fit, if that is cheaper.
 *
 * All this compares sums of live sizes. The cheapest setting of all orders is packed; if
 * its arena has gaps and does not fit, the next one is: the refined setting for a goal
 * below its peak, or the first level, whichever is cheaper. Neither sequence depends on
 * the limit, only where it starts, so a larger limit does not lead to a dearer plan. */
#include "internal.h"

#define PLT_CHUNK_EFFORT 20000 /* of packing one setting */
#define PLT_MOST_REFINED 16    /* settings packed; from then on, only levels are */

typedef struct setting {
    bool open;      /* may still be taken */
    double cost;    /* nanoseconds of the call */
    int64_t peak;   /* sum of live sizes */
    uint8_t levels[PLT_MOST_KNOBS]; /* of the order's knobs; 0 for others */
} setting;

/* An order with knobs, and the settings of it that are to be tried next. */
typedef struct cut {
    int32_t order;
    int64_t level; /* of `uniform` */
    setting uniform, refined;
} cut;

/* Simulates an order; PLT_ERR_LIMIT if the evaluation of its shape has overflowed. */
static int weigh(plt_search *s, int32_t order, int evaluated, const plt_shape *shape,
                 setting *out) {
    if (evaluated == PLT_ERR_OVERFLOW) return PLT_ERR_LIMIT;
    if (evaluated != PLT_OK) return evaluated;
    plt_start(s, (plt_variant){shape, order});
    if (plt_walk_run(s->w, -1) != PLT_WALK_DONE) return PLT_ERR_MEMORY;
    out->peak = s->w->peak;
    out->cost = plt_order_cost(s->w->order, shape->costs);
    return PLT_OK;
}

static int weigh_level(plt_search *s, int32_t order, int64_t level, setting *out) {
    const plt_shape *shape;
    uint64_t knobs = s->w->model->orders[order].knobs;
    for (int64_t k = 0; k < PLT_MOST_KNOBS; k++) {
        int64_t most = knobs >> k & 1 ? s->settings->deepest[k] : 0;
        out->levels[k] = (uint8_t)(level < most ? level : most);
    }
    int evaluated = plt_settings_level(s->settings, level, &shape);
    return weigh(s, order, evaluated, shape, out);
}

static void rows_of(const plt_search *s, const setting *from, int64_t *rows) {
    for (int64_t k = 0; k < s->w->model->n_knobs; k++) {
        rows[k] = plt_rows(s->settings, k, from->levels[k]);
    }
}

static int weigh_trial(plt_search *s, int32_t order, setting *out) {
    int64_t rows[PLT_MOST_KNOBS];
    rows_of(s, out, rows);
    plt_shape *trial = &s->settings->trial;
    const plt_order *o = &s->w->model->orders[order];
    int evaluated = plt_settings_set(s->settings, trial, o, rows);
    return weigh(s, order, evaluated, trial, out);
}

/* The first level from `low` on whose peak is at most goal; if there is none, out is
 * not open. */
static int find_level(plt_search *s, int32_t order, int64_t low, int64_t goal,
                      int64_t *level, setting *out) {
    int64_t high = s->settings->last + 1;
    out->open = false;
    while (low < high) {
        setting made = {.open = true};
        int64_t middle = low + (high - low) / 2;
        int status = weigh_level(s, order, middle, &made);
        if (status != PLT_OK && status != PLT_ERR_LIMIT) return status;
        if (status == PLT_OK && made.peak <= goal) {
            high = *level = middle;
            *out = made;
        } else {
            low = middle + 1;
        }
    }
    return PLT_OK;
}

/* Gives one knob the most rows that fit, if that is cheaper. */
static int raise(plt_search *s, int32_t order, int64_t knob, int64_t goal,
                 setting *best) {
    int64_t low = 0, high = best->levels[knob];
    setting found = *best;
    for (int64_t level = 0; low < high; level = low + (high - low) / 2) {
        setting made = *best;
        made.levels[knob] = (uint8_t)level;
        int status = weigh_trial(s, order, &made);
        if (status != PLT_OK && status != PLT_ERR_LIMIT) return status;
        if (status == PLT_OK && made.peak <= goal) {
            high = level;
            found = made;
        } else {
            low = level + 1;
        }
    }
    if (found.cost < best->cost) *best = found;
    return PLT_OK;
}

/* The cheapest setting whose peak is at most goal. */
static int refine(plt_search *s, cut *c, int64_t goal) {
    int64_t level, low = s->settings->last > 0;
    int status = find_level(s, c->order, low, goal, &level, &c->refined);
    if (status != PLT_OK || !c->refined.open) return status;
    uint64_t knobs = s->w->model->orders[c->order].knobs;
    for (int64_t k = 0; status == PLT_OK && k < s->w->model->n_knobs; k++) {
        if (knobs >> k & 1) status = raise(s, c->order, k, goal, &c->refined);
    }
    return status;
}

static int begin(plt_search *s, cut *c, int64_t limit) {
    int64_t low = s->settings->last > 0;
    int status = find_level(s, c->order, low, limit, &c->level, &c->uniform);
    return status == PLT_OK ? refine(s, c, limit) : status;
}

static setting *cheaper(cut *c) {
    if (!c->refined.open) return &c->uniform;
    bool refined = !c->uniform.open || c->refined.cost <= c->uniform.cost;
    return refined ? &c->refined : &c->uniform;
}

/* Goes on behind a setting that could not be packed. */
static int advance(plt_search *s, cut *c, const setting *failed, bool refining) {
    bool same = !memcmp(c->refined.levels, c->uniform.levels, sizeof failed->levels);
    bool levels = failed == &c->uniform || same;
    int status = PLT_OK;
    if (c->refined.open && (failed == &c->refined || same)) {
        if (refining) status = refine(s, c, c->refined.peak - 1);
        else c->refined.open = false;
    }
    if (status != PLT_OK || !levels || !c->uniform.open) return status;
    c->uniform.open = c->level < s->settings->last;
    if (c->uniform.open) status = weigh_level(s, c->order, ++c->level, &c->uniform);
    if (status == PLT_ERR_LIMIT) c->uniform.open = false;
    return status == PLT_ERR_LIMIT ? PLT_OK : status;
}

/* Packs a setting with the table that its plan would have. */
static int pack_exact(plt_search *s, int32_t order, const setting *from, int64_t limit,
                      plt_choice *out) {
    int64_t rows[PLT_MOST_KNOBS];
    setting made;
    rows_of(s, from, rows);
    plt_shape *exact = &s->settings->exact;
    const plt_order *o = &s->w->model->orders[order];
    int evaluated = plt_settings_set(s->settings, exact, o, rows);
    int status = weigh(s, order, evaluated, exact, &made);
    if (status == PLT_OK) status = plt_pack_walk(s->w, limit, PLT_CHUNK_EFFORT, out);
    if (status != PLT_OK) return status;
    if (out->arena > limit) {
        plt_choice_free(s->w, out);
        return PLT_ERR_LIMIT;
    }
    out->order = order;
    out->shape = exact;
    return PLT_OK;
}

static int search(plt_search *s, cut *cuts, int64_t n, int64_t limit, plt_choice *out) {
    for (int64_t i = 0; i < n; i++) {
        int status = begin(s, &cuts[i], limit);
        if (status != PLT_OK) return status;
    }
    for (int64_t tried = 0;; tried++) {
        cut *best = NULL;
        for (int64_t i = 0; i < n; i++) {
            const setting *now = cheaper(&cuts[i]);
            if (!now->open) continue;
            if (!best || now->cost < cheaper(best)->cost) best = &cuts[i];
        }
        if (!best) return PLT_ERR_LIMIT;
        const setting *now = cheaper(best);
        int status = pack_exact(s, best->order, now, limit, out);
        if (status != PLT_ERR_LIMIT) return status;
        status = advance(s, best, now, tried < PLT_MOST_REFINED);
        if (status != PLT_OK) return status;
    }
}

int plt_choose_chunks(plt_search *s, int64_t limit, plt_choice *out) {
    const plt_model *m = s->w->model;
    size_t bytes = (size_t)m->n_orders * sizeof(cut);
    cut *cuts = plt_allocate(&m->services, bytes);
    if (!cuts) return PLT_ERR_MEMORY;
    int64_t n = 0;
    for (int64_t k = 0; k < m->n_orders; k++) {
        if (m->orders[k].knobs) cuts[n++].order = (int32_t)k;
    }
    int status = search(s, cuts, n, limit, out);
    plt_release(&m->services, cuts, bytes);
    return status;
}
