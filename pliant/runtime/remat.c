/* Finds a plan whose arena fits: the order of the steps, the evictions, and the
 * offsets.
 *
 * An order that fits without evictions is preferred. Otherwise values are evicted
 * (evict.c) until the packed arena fits, in each order that may be cheapest. If that
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

static void copy_modes(const plt_search *s, uint8_t *to, const uint8_t *from) {
    plt_copy(to, from, s->w->model->n_touches, 1);
}

/* Packs the storages that the last walk found. */
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

static void start(plt_search *s, int64_t order) {
    plt_walk *w = s->w;
    w->order = &w->model->orders[order];
    memset(w->modes, PLT_KEEP, (size_t)w->model->n_touches);
    memset(s->banned, 0, (size_t)w->model->n_touches);
}

/* Chooses the order with the smallest arena without evictions, among those that may
 * fit. If none fits, best has no offsets afterwards. */
static int choose_order(plt_search *s, int64_t limit, plt_choice *best) {
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

/* The smallest arena of all orders; its modes are stored in chosen_modes. */
static int choose_least(plt_search *s, plt_choice *best) {
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
    /* without evictions the storages may pack into a smaller arena */
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

/* Finds the cheapest evictions of one order whose arena fits, or returns PLT_ERR_LIMIT.
 * Evictions that are not needed are undone if the arena still fits afterwards. */
static int fit(plt_search *s, int64_t order, int64_t limit, plt_choice *out) {
    plt_walk *w = s->w;
    start(s, order);
    s->best_peak = INT64_MAX;
    s->until = w->effort + PLT_SEARCH_EFFORT / w->model->n_orders;
    int64_t goal = limit;
    for (;;) {
        int status = plt_evict(s, goal);
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
    int status = plt_keep_more(s, goal);
    if (status == PLT_OK) status = plt_improve(s, goal);
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

/* Whether an order is worth trying: not if it needs much more memory than another. */
static bool is_promising(plt_search *s, int64_t order, int64_t limit) {
    plt_walk *w = s->w;
    start(s, order);
    if (plt_walk_run(w, -1) != PLT_WALK_DONE) return false;
    if (w->peak > plt_add_up(s->least_kept, s->least_kept / 32)) return false;
    if (!(w->model->can & PLT_CAN_SPILL)) return true;
    return evict_all(s) == PLT_OK && w->peak <= limit;
}

/* The cheapest fit of all orders; its modes are stored in chosen_modes. */
static int choose_fit(plt_search *s, int64_t limit, plt_choice *best) {
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

/* Runs the walk once more with the choice. */
static int settle(plt_search *s, const plt_choice *best) {
    plt_walk *w = s->w;
    w->order = &w->model->orders[best->order];
    copy_modes(s, w->modes, s->chosen_modes);
    return plt_walk_run(w, -1) == PLT_WALK_DONE ? PLT_OK : PLT_ERR_MEMORY;
}

int plt_choose_least(plt_walk *w, plt_choice *out) {
    plt_search s;
    *out = (plt_choice){0};
    if (!plt_search_init(&s, w)) return PLT_ERR_MEMORY;
    int status = choose_least(&s, out);
    if (status == PLT_OK) status = settle(&s, out);
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
    plt_search s;
    *out = (plt_choice){0};
    if (!plt_search_init(&s, w)) return PLT_ERR_MEMORY;
    int status = choose_order(&s, limit, out);
    bool fits = out->offsets && (limit < 0 || out->arena <= limit);
    if (status == PLT_OK && !fits) {
        plt_choice_free(w, out);
        *out = (plt_choice){0};
        status = w->model->can ? choose_fit(&s, limit, out) : PLT_ERR_LIMIT;
        if (status == PLT_ERR_LIMIT) {
            /* kept even if it does not fit: the error states its size */
            plt_choice_free(w, out);
            *out = (plt_choice){0};
            status = choose_least(&s, out);
            if (status == PLT_OK && out->arena > limit) status = PLT_ERR_LIMIT;
            if (status == PLT_OK) status = use_room(&s, limit, out);
        }
    }
    if (status == PLT_OK) status = settle(&s, out);
    plt_search_free(&s);
    if (status != PLT_OK && status != PLT_ERR_LIMIT) plt_choice_free(w, out);
    return status;
}
