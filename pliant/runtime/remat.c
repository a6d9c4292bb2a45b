/* Finds a plan whose arena fits: the order of the steps, the rows of chunks, the
 * evictions, and the offsets.
 *
 * An order without knobs that fits without evictions is preferred. Otherwise the
 * cheapest is taken of the orders that loop over chunks of rows (chunk.c) and of the
 * others with values evicted (evict.c) until the packed arena fits. If no number of
 * rows is small enough, values of the orders with chunks are evicted too. If that
 * fails, every value is evicted between its uses, which gives the smallest arena: it
 * fits, or nothing does.
 *
 * Effort is counted in touches of objects, never in time, so that the same sizes give
 * the same choice. */
#include "internal.h"

#include <float.h>

#define PLT_SEARCH_EFFORT 400000
/* Effort of packing to fit a limit: failing is cheap, because more can be evicted. */
#define PLT_FIT_EFFORT 50000
/* Evictions that are not needed, or not the cheapest, are undone in the end. Those that
 * cost this many times what a better plan has left for them are given up before. */
#define PLT_UNDONE 4.0

static void copy_modes(const plt_search *s, uint8_t *to, const uint8_t *from) {
    plt_copy(to, from, s->w->model->n_touches, 1);
}

int plt_pack_walk(plt_walk *w, int64_t enough, int64_t effort, plt_choice *out) {
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

static void take(const plt_walk *w, plt_choice *best, plt_choice made, plt_variant v) {
    plt_choice_free(w, best);
    *best = made;
    best->order = v.order;
    best->shape = v.shape;
}

static void set_variant(plt_walk *w, plt_variant v) {
    w->order = &w->model->orders[v.order];
    w->sizes = v.shape->sizes;
    w->costs = v.shape->costs;
}

void plt_start(plt_search *s, plt_variant v) {
    plt_walk *w = s->w;
    set_variant(w, v);
    memset(w->modes, PLT_KEEP, (size_t)w->model->n_touches);
    memset(s->banned, 0, (size_t)w->model->n_touches);
}

static void add_variant(plt_search *s, int64_t order, const plt_shape *shape) {
    s->variants[s->n_variants++] = (plt_variant){shape, (int32_t)order};
}

static void list_plain(plt_search *s) {
    const plt_model *m = s->w->model;
    s->n_variants = 0;
    for (int64_t k = 0; k < m->n_orders; k++) {
        if (!m->orders[k].knobs) add_variant(s, k, &s->settings->base);
    }
}

/* Adds the orders with knobs, at the level where an order has its fewest rows, divided
 * by `part`. */
static int list_chunked(plt_search *s, int64_t part) {
    const plt_model *m = s->w->model;
    for (int64_t k = 0; k < m->n_orders; k++) {
        int64_t last = 0;
        for (int64_t i = 0; i < m->n_knobs; i++) {
            bool own = m->orders[k].knobs >> i & 1;
            if (own && s->settings->deepest[i] > last) last = s->settings->deepest[i];
        }
        if (!m->orders[k].knobs || (part > 1 && last < part)) continue;
        const plt_shape *shape;
        int status = plt_settings_level(s->settings, last / part, &shape);
        if (status == PLT_OK) add_variant(s, k, shape);
        else if (status != PLT_ERR_OVERFLOW) return status;
    }
    return PLT_OK;
}

/* Chooses the variant with the smallest arena without evictions, among those that may
 * fit. If none fits, best has no offsets afterwards. */
static int choose_order(plt_search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    s->least_kept = INT64_MAX;
    for (int64_t k = 0; k < s->n_variants; k++) {
        plt_start(s, s->variants[k]);
        if (plt_walk_run(w, -1) != PLT_WALK_DONE) return PLT_ERR_MEMORY;
        if (w->peak < s->least_kept) s->least_kept = w->peak;
        if (limit >= 0 && w->peak > limit) continue;
        if (best->offsets && w->peak >= best->arena) continue;
        plt_choice made;
        int status = plt_pack_walk(w, 0, PLT_PACK_EFFORT, &made);
        if (status != PLT_OK) return status;
        if (best->offsets && made.arena >= best->arena) plt_choice_free(w, &made);
        else take(w, best, made, s->variants[k]);
    }
    return PLT_OK;
}

/* Sets the modes with the smallest peak: everything is spilled, or, without a spill
 * file, as much as possible is recomputed. */
static int evict_all(plt_search *s) {
    plt_walk *w = s->w;
    if (w->model->can & PLT_CAN_SPILL) {
        const plt_use *uses = w->order->uses;
        for (int64_t k = 0; k + 1 < w->model->n_touches; k++) {
            /* the mode after the last use of an object is ignored */
            bool apart = uses[k + 1].position != uses[k].position + 1;
            w->modes[k] = apart ? PLT_SPILL : PLT_KEEP;
        }
    } else {
        s->best_peak = INT64_MAX;
        s->until = w->effort + PLT_SEARCH_EFFORT;
        if (plt_evict(s, 0) == PLT_ERR_MEMORY) return PLT_ERR_MEMORY;
        copy_modes(s, w->modes, s->best_modes);
    }
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

/* The smallest arena of all variants; its modes are stored in chosen_modes. */
static int choose_least(plt_search *s, plt_choice *best) {
    plt_walk *w = s->w;
    if (!w->model->can) return choose_order(s, -1, best);
    for (int64_t k = 0; k < s->n_variants; k++) {
        plt_start(s, s->variants[k]);
        int status = evict_all(s);
        if (status != PLT_OK) return status;
        if (best->offsets && w->peak >= best->arena) continue;
        plt_choice made;
        status = plt_pack_walk(w, 0, PLT_PACK_EFFORT, &made);
        if (status != PLT_OK) return status;
        if (best->offsets && made.arena >= best->arena) {
            plt_choice_free(w, &made);
        } else {
            take(w, best, made, s->variants[k]);
            copy_modes(s, s->chosen_modes, w->modes);
        }
    }
    /* without evictions the storages may pack into a smaller arena */
    plt_choice kept = {0};
    int status = choose_order(s, best->arena - 1, &kept);
    if (status == PLT_OK && kept.offsets && kept.arena < best->arena) {
        take(w, best, kept, (plt_variant){kept.shape, kept.order});
        memset(s->chosen_modes, PLT_KEEP, (size_t)w->model->n_touches);
    } else {
        plt_choice_free(w, &kept);
    }
    return status;
}

/* Finds the cheapest evictions of a variant whose arena fits, or returns PLT_ERR_LIMIT.
 * Evictions that are not needed are undone if the arena still fits afterwards. */
static int fit(plt_search *s, plt_variant v, int64_t limit, plt_choice *out) {
    plt_walk *w = s->w;
    plt_start(s, v);
    s->best_peak = INT64_MAX;
    s->until = w->effort + PLT_SEARCH_EFFORT / s->n_variants;
    int64_t goal = limit;
    for (;;) {
        int status = plt_evict(s, goal);
        if (status == PLT_OK) status = plt_pack_walk(w, limit, PLT_FIT_EFFORT, out);
        if (status != PLT_OK) return status;
        if (out->arena <= limit) break;
        int64_t over = out->arena - limit, step = goal / 64 + 1;
        plt_choice_free(w, out);
        goal -= over > step ? over : step;
        if (goal <= 0 || w->effort > s->until) return PLT_ERR_LIMIT;
    }
    copy_modes(s, s->best_modes, w->modes);
    plt_choice made;
    int status = plt_keep_more(s, goal);
    if (status == PLT_OK) status = plt_improve(s, goal);
    if (status == PLT_OK) status = plt_pack_walk(w, limit, PLT_FIT_EFFORT, &made);
    if (status == PLT_OK && made.arena <= limit) {
        take(w, out, made, v);
    } else if (status == PLT_OK) {
        plt_choice_free(w, &made);
        copy_modes(s, w->modes, s->best_modes);
        if (plt_walk_run(w, -1) != PLT_WALK_DONE) status = PLT_ERR_MEMORY;
    }
    if (status != PLT_OK) plt_choice_free(w, out);
    return status;
}

/* Whether a variant is worth trying: not if it needs much more memory than another. */
static bool is_promising(plt_search *s, plt_variant v, int64_t limit) {
    plt_walk *w = s->w;
    plt_start(s, v);
    if (plt_walk_run(w, -1) != PLT_WALK_DONE) return false;
    if (w->peak > plt_add_up(s->least_kept, s->least_kept / 32)) return false;
    if (!(w->model->can & PLT_CAN_SPILL)) return true;
    return evict_all(s) == PLT_OK && w->peak <= limit;
}

/* The cheapest fit of all variants, if best is empty or costs more; its modes are then
 * stored in chosen_modes. */
static int choose_fit(plt_search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    double least = DBL_MAX;
    if (best->offsets) {
        least = plt_order_cost(&w->model->orders[best->order], best->shape->costs);
    }
    for (int64_t k = 0; k < s->n_variants; k++) {
        plt_choice made;
        plt_variant v = s->variants[k];
        double cost = plt_order_cost(&w->model->orders[v.order], v.shape->costs);
        if (cost >= least || !is_promising(s, v, limit)) continue;
        s->ceiling = least < DBL_MAX ? PLT_UNDONE * (least - cost) : DBL_MAX;
        int status = fit(s, v, limit, &made);
        s->ceiling = DBL_MAX;
        if (status == PLT_ERR_LIMIT) continue;
        if (status != PLT_OK) return status;
        if (cost + w->extra < least) {
            least = cost + w->extra;
            take(w, best, made, v);
            copy_modes(s, s->chosen_modes, w->modes);
        } else {
            plt_choice_free(w, &made);
        }
    }
    return best->offsets ? PLT_OK : PLT_ERR_LIMIT;
}

/* Runs the walk once more with the choice. */
static int settle(plt_search *s, const plt_choice *best) {
    plt_walk *w = s->w;
    set_variant(w, (plt_variant){best->shape, best->order});
    copy_modes(s, w->modes, s->chosen_modes);
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

/* Settles the choice on the table that its plan will have. The sizes must be the same:
 * they do not depend on knobs of other orders. */
static int finish(plt_search *s, plt_choice *best) {
    plt_walk *w = s->w;
    plt_settings *settings = s->settings;
    int status = settle(s, best);
    bool exact = best->shape == &settings->base || best->shape == &settings->exact;
    if (status != PLT_OK || exact) return status;
    plt_shape *shape = &settings->exact;
    status = plt_settings_set(settings, shape, w->order, best->shape->rows);
    const plt_storage *storages = w->storages.items;
    for (int64_t i = 0; status == PLT_OK && i < w->storages.count; i++) {
        int32_t x = storages[i].object;
        if (shape->sizes[x] != w->sizes[x]) status = PLT_ERR_MODEL;
    }
    best->shape = shape;
    set_variant(w, (plt_variant){shape, best->order});
    return status;
}

/* With everything that may have to be done to reach it. */
static int choose_least_of_all(plt_search *s, plt_choice *best) {
    list_plain(s);
    int status = list_chunked(s, 1);
    return status == PLT_OK ? choose_least(s, best) : status;
}

int plt_choose_least(plt_walk *w, plt_settings *settings, plt_choice *out) {
    plt_search s;
    *out = (plt_choice){0};
    if (!plt_search_init(&s, w, settings)) return PLT_ERR_MEMORY;
    int status = choose_least_of_all(&s, out);
    if (status == PLT_OK) status = finish(&s, out);
    plt_search_free(&s);
    if (status != PLT_OK) plt_choice_free(w, out);
    return status;
}

/* If the smallest arena is below the limit, undoes some of its evictions. */
static int use_room(plt_search *s, int64_t limit, plt_choice *best) {
    plt_walk *w = s->w;
    int status = settle(s, best);
    if (status == PLT_OK) status = plt_keep_more(s, limit - limit / 32);
    if (status == PLT_OK) status = plt_improve(s, limit - limit / 32);
    plt_choice made;
    if (status == PLT_OK) status = plt_pack_walk(w, limit, PLT_FIT_EFFORT, &made);
    if (status != PLT_OK) return status;
    if (made.arena > limit) {
        plt_choice_free(w, &made);
        return PLT_OK;
    }
    take(w, best, made, (plt_variant){best->shape, best->order});
    copy_modes(s, s->chosen_modes, w->modes);
    return PLT_OK;
}

/* Where no order without knobs fits as it is. */
static int choose_cheapest(plt_search *s, int64_t limit, plt_choice *best) {
    const plt_model *m = s->w->model;
    int status = m->n_knobs ? plt_choose_chunks(s, limit, best) : PLT_ERR_LIMIT;
    if (status == PLT_ERR_LIMIT && m->can && m->n_knobs) {
        status = list_chunked(s, 2);
        if (status == PLT_OK) status = list_chunked(s, 1);
        if (status == PLT_OK) status = PLT_ERR_LIMIT;
    }
    bool searched = status == PLT_OK || status == PLT_ERR_LIMIT;
    if (searched && m->can) status = choose_fit(s, limit, best);
    return status;
}

int plt_choose(plt_walk *w, plt_settings *settings, int64_t limit, plt_choice *out) {
    plt_search s;
    *out = (plt_choice){0};
    if (!plt_search_init(&s, w, settings)) return PLT_ERR_MEMORY;
    list_plain(&s);
    int status = choose_order(&s, limit, out);
    bool fits = out->offsets && (limit < 0 || out->arena <= limit);
    if (status == PLT_OK && !fits) {
        plt_choice_free(w, out);
        *out = (plt_choice){0};
        status = choose_cheapest(&s, limit, out);
        if (status == PLT_ERR_LIMIT) {
            /* kept even if it does not fit: the error states its size */
            status = choose_least_of_all(&s, out);
            if (status == PLT_OK && out->arena > limit) status = PLT_ERR_LIMIT;
            if (status == PLT_OK) status = use_room(&s, limit, out);
        }
    }
    if (status == PLT_OK) status = finish(&s, out);
    plt_search_free(&s);
    if (status != PLT_OK && status != PLT_ERR_LIMIT) plt_choice_free(w, out);
    return status;
}
