/* Simulates a run in which some values are evicted between two uses. Finds the
 * instructions of the run, and the lifetime of each piece of memory.
 *
 * In front of the step at position p, every value that the step needs and that was
 * evicted is restored: read from the file, or recomputed by the steps that wrote it, in
 * their order. These steps may need other values restored. Each step is repeated at
 * most once in front of p. So evicting all that a layer keeps for the backward pass
 * computes the layer once more.
 *
 * A step may be repeated if its operands have the contents that they had at its first
 * run: nothing has written them since, or they are themselves recomputed and go through
 * the same contents again. */
#include "internal.h"

/* Instructions per step; a simulation with more is abandoned. */
#define PLT_LONGEST 24
/* Fixed cost of a read or a write of the file, in addition to its bytes. */
#define PLT_FILE_CALL_NS 5000.0

static void carve_walk(plt_walk *w, plt_carver *c) {
    const plt_model *m = w->model;
    int64_t n = m->n_objects;
    int32_t **tables[] = {&w->open, &w->current, &w->mark,   &w->near,
                          &w->last, &w->parent,  &w->file,   &w->stack};
    for (size_t k = 0; k < sizeof tables / sizeof *tables; k++) {
        *tables[k] = plt_carve(c, n, sizeof(int32_t));
    }
    w->issued = plt_carve(c, m->n_steps / 64 + 1, sizeof(uint64_t));
    w->modes = plt_carve(c, m->n_touches, 1);
}

bool plt_walk_init(plt_walk *w, const plt_model *m) {
    *w = (plt_walk){.model = m};
    w->storages.each = w->files.each = sizeof(plt_storage);
    w->instructions.each = sizeof(plt_instruction);
    plt_carver c = {0};
    carve_walk(w, &c);
    w->block_bytes = c.used;
    w->block = plt_allocate(&m->services, c.used);
    if (!w->block) return false;
    c = (plt_carver){.block = w->block};
    carve_walk(w, &c);
    return true;
}

static void list_free(const plt_services *s, plt_list *l) {
    plt_release(s, l->items, (size_t)l->room * l->each);
    l->items = NULL;
}

void plt_walk_free(plt_walk *w) {
    const plt_services *s = &w->model->services;
    list_free(s, &w->storages);
    list_free(s, &w->instructions);
    list_free(s, &w->files);
    plt_release(s, w->block, w->block_bytes);
    w->block = NULL;
}

static void *append(const plt_walk *w, plt_list *l) {
    if (l->count == l->room) {
        int64_t room = l->room ? 2 * l->room : 256;
        char *items = plt_allocate_raw(&w->model->services, (size_t)room * l->each);
        if (!items) return NULL;
        plt_copy(items, l->items, l->count, l->each);
        plt_release(&w->model->services, l->items, (size_t)l->room * l->each);
        l->items = items;
        l->room = room;
    }
    return (char *)l->items + (size_t)l->count++ * l->each;
}

static bool open_storage(plt_walk *w, int32_t x) {
    plt_storage *s = append(w, &w->storages);
    if (!s) return false;
    *s = (plt_storage){x, w->time, w->time};
    w->open[x] = (int32_t)w->storages.count - 1;
    w->live += w->sizes[x]; /* their sum was checked */
    return true;
}

static void close_storage(plt_walk *w, int32_t x) {
    ((plt_storage *)w->storages.items)[w->open[x]].last = w->time;
    w->open[x] = -1;
    w->live -= w->sizes[x];
}

/* Appends an instruction at the present time; the storages that it needs are open. */
static int emit(plt_walk *w, int32_t position, plt_instruction made) {
    if (w->live > w->peak) {
        w->peak = w->live;
        w->peak_time = w->time;
        w->peak_position = position;
        w->peak_at_step =
            made.kind == PLT_CALL && made.number == w->order->steps[position];
    }
    if (w->time == w->stop) return PLT_WALK_STOPPED;
    plt_instruction *i = append(w, &w->instructions);
    if (!i) return PLT_WALK_MEMORY;
    *i = made;
    return PLT_WALK_DONE;
}

double plt_spill_cost(const plt_walk *w, int32_t x) {
    return (double)w->sizes[x] * w->model->ns_per_spilled_byte + PLT_FILE_CALL_NS;
}

static int read_file(plt_walk *w, int32_t x, int32_t position) {
    if (!open_storage(w, x)) return PLT_WALK_MEMORY;
    ((plt_storage *)w->files.items)[w->file[x]].last = w->time;
    plt_instruction made = {PLT_READ_FILE, x, w->open[x], w->file[x]};
    int status = emit(w, position, made);
    w->extra += plt_spill_cost(w, x);
    if (status == PLT_WALK_DONE) w->time++;
    return status;
}

/* Writes x to the file and frees its memory. */
static int write_file(plt_walk *w, int32_t x, int32_t position) {
    plt_storage *file = append(w, &w->files);
    if (!file) return PLT_WALK_MEMORY;
    *file = (plt_storage){x, w->time, w->time};
    w->file[x] = (int32_t)w->files.count - 1;
    plt_instruction made = {PLT_WRITE_FILE, x, w->open[x], w->file[x]};
    int status = emit(w, position, made);
    if (status != PLT_WALK_DONE) return status;
    w->extra += plt_spill_cost(w, x);
    w->spilled = plt_add_up(w->spilled, w->sizes[x]);
    close_storage(w, x);
    w->time++;
    return PLT_WALK_DONE;
}

static bool in_gap(const plt_walk *w, int32_t x) {
    int32_t k = w->current[x];
    return k >= 0 && k + 1 < w->order->first_use[x + 1];
}

static uint8_t mode_now(const plt_walk *w, int32_t x) {
    return in_gap(w, x) ? w->modes[w->current[x]] : PLT_DROP;
}

static bool from_file(const plt_walk *w, int32_t x) {
    return mode_now(w, x) == PLT_SPILL && w->file[x] >= 0;
}

static void want(plt_walk *w, int32_t x, int32_t parent, int32_t *depth) {
    if (w->mark[x] == w->stamp) return;
    w->mark[x] = w->near[x] = w->stamp;
    w->parent[x] = parent;
    w->stack[(*depth)++] = x;
}

/* The gap of the eviction because of which x is restored. */
static int32_t blame(const plt_walk *w, int32_t x) {
    while (w->parent[x] != x && !in_gap(w, x)) x = w->parent[x];
    return w->current[x];
}

/* Whether the step at q, which writes x, may be repeated in front of p. Pushes the
 * values that it needs onto the stack. */
static bool repeat(plt_walk *w, int32_t x, int32_t q, int32_t p, int32_t *depth) {
    const plt_order *o = w->order;
    if (!w->model->steps[o->steps[q]].repeatable) return false;
    uint64_t bit = (uint64_t)1 << (q & 63);
    if (w->issued[q / 64] & bit) return true;
    w->issued[q / 64] |= bit;
    for (int32_t k = o->first_touch[q]; k < o->first_touch[q + 1]; k++) {
        const plt_access *t = &o->touches[k];
        int32_t y = t->object;
        w->near[y] = w->stamp;
        if (y == x) continue;
        bool there = y >= w->model->n_buffers || w->open[y] >= 0;
        /* memory and the file hold the latest contents */
        bool settled = there || from_file(w, y);
        if (t->flags & PLT_WRITES && settled && !o->alone[y]) return false;
        if (!(t->flags & PLT_READS)) continue;
        if (settled && t->until < p) return false;
        if (!there) want(w, y, x, depth);
    }
    w->effort += o->first_touch[q + 1] - o->first_touch[q];
    return true;
}

/* Finds all that has to be restored in front of p. Marks the objects, and sets in
 * `issued` the steps that recompute them, at positions from *low to *high. */
static int demand(plt_walk *w, int32_t p, int32_t *low, int32_t *high) {
    const plt_order *o = w->order;
    int32_t depth = 0;
    for (int32_t k = o->first_touch[p]; k < o->first_touch[p + 1]; k++) {
        int32_t x = o->touches[k].object;
        if (x < w->model->n_buffers && w->open[x] < 0 && w->current[x] >= 0) {
            want(w, x, x, &depth);
        }
    }
    *low = p;
    *high = -1;
    while (depth > 0) {
        int32_t x = w->stack[--depth];
        if (from_file(w, x)) continue;
        for (int32_t k = o->first_use[x]; k < o->first_use[x + 1]; k++) {
            int32_t q = o->uses[k].position;
            if (q >= p) break;
            if (!(o->uses[k].flags & PLT_WRITES)) continue;
            if (q < *low) *low = q;
            if (q > *high) *high = q;
            if (!repeat(w, x, q, p, &depth)) {
                w->culprit = blame(w, x);
                return PLT_WALK_ILLEGAL;
            }
        }
    }
    return PLT_WALK_DONE;
}

/* The first position from q to high that is to be repeated, or high + 1. */
static int32_t next_issued(const plt_walk *w, int32_t q, int32_t high) {
    while (q <= high) {
        uint64_t word = w->issued[q / 64] >> (q & 63);
        if (word) return q + __builtin_ctzll(word);
        q = (q / 64 + 1) * 64;
    }
    return high + 1;
}

/* One repeated step: opens missing storages, and closes those not needed after it. */
static int repeat_step(plt_walk *w, int32_t q, int32_t p) {
    const plt_order *o = w->order;
    int32_t begin = o->first_touch[q], end = o->first_touch[q + 1];
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        if (x >= w->model->n_buffers || w->open[x] >= 0) continue;
        if (w->mark[x] != w->stamp || !from_file(w, x)) continue;
        int status = read_file(w, x, p);
        if (status != PLT_WALK_DONE) return status;
    }
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        if (x >= w->model->n_buffers || w->open[x] >= 0) continue;
        if (!open_storage(w, x)) return PLT_WALK_MEMORY;
    }
    int32_t step = o->steps[q];
    int status = emit(w, p, (plt_instruction){PLT_CALL, step, -1, -1});
    if (status != PLT_WALK_DONE) return status;
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        if (x >= w->model->n_buffers) continue;
        bool wanted = w->mark[x] == w->stamp;
        /* Storages that were open before stay open. One that was restored only for
         * other steps is closed after the last of them, unless it is to be kept for a
         * later use of its own. */
        bool opened_here = w->last[x] < 0 || wanted;
        if (!opened_here) continue;
        if (wanted && (w->last[x] != q || mode_now(w, x) == PLT_RECOMPUTE)) continue;
        close_storage(w, x);
    }
    w->time++;
    w->extra += w->costs[step];
    w->recomputed++;
    return PLT_WALK_DONE;
}

/* Restores all that the step at p needs. */
static int make_again(plt_walk *w, int32_t p) {
    const plt_order *o = w->order;
    int32_t low, high;
    w->stamp++;
    w->stamp_position = p;
    int status = demand(w, p, &low, &high);
    /* last[x] of a restored object is the last position that needs it; n_steps stands
     * for step p itself. Of other objects it is -1 if they are not in memory, and
     * n_steps if they are and must stay. */
    for (int32_t q = next_issued(w, low, high); q <= high && status == PLT_WALK_DONE;
         q = next_issued(w, q + 1, high)) {
        for (int32_t k = o->first_touch[q]; k < o->first_touch[q + 1]; k++) {
            int32_t x = o->touches[k].object;
            if (x >= w->model->n_buffers) continue;
            bool wanted = w->mark[x] == w->stamp;
            int32_t other = w->open[x] >= 0 ? (int32_t)w->model->n_steps : -1;
            w->last[x] = wanted ? q : other;
        }
    }
    for (int32_t k = o->first_touch[p]; k < o->first_touch[p + 1]; k++) {
        w->last[o->touches[k].object] = (int32_t)w->model->n_steps;
    }
    for (int32_t q = low; (q = next_issued(w, q, high)) <= high;) {
        w->issued[q / 64] &= ~((uint64_t)1 << (q & 63));
        if (status == PLT_WALK_DONE) status = repeat_step(w, q, p);
    }
    return status;
}

static int walk_step(plt_walk *w, int32_t p) {
    const plt_order *o = w->order;
    int32_t begin = o->first_touch[p], end = o->first_touch[p + 1];
    int64_t n_buffers = w->model->n_buffers;
    w->effort += 1 + end - begin;
    bool missing = false;
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        missing |= x < n_buffers && w->open[x] < 0 && w->current[x] >= 0;
    }
    int status = missing ? make_again(w, p) : PLT_WALK_DONE;
    for (int32_t k = begin; missing && k < end && status == PLT_WALK_DONE; k++) {
        int32_t x = o->touches[k].object;
        if (x >= n_buffers || w->open[x] >= 0 || w->current[x] < 0) continue;
        status = read_file(w, x, p);
    }
    if (status != PLT_WALK_DONE) return status;
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        if (x >= n_buffers || w->open[x] >= 0) continue;
        if (!open_storage(w, x)) return PLT_WALK_MEMORY;
    }
    status = emit(w, p, (plt_instruction){PLT_CALL, o->steps[p], -1, -1});
    if (status != PLT_WALK_DONE) return status;
    for (int32_t k = begin; k < end; k++) {
        int32_t x = o->touches[k].object;
        if (x >= n_buffers) continue;
        w->current[x] = o->touches[k].use;
        if (o->touches[k].flags & PLT_WRITES) w->file[x] = -1;
        uint8_t mode = mode_now(w, x);
        bool written = mode == PLT_SPILL && w->file[x] < 0;
        if (mode != PLT_KEEP && !written) close_storage(w, x);
    }
    w->time++;
    for (int32_t k = begin; k < end && status == PLT_WALK_DONE; k++) {
        int32_t x = o->touches[k].object;
        if (x >= n_buffers || w->open[x] < 0 || mode_now(w, x) != PLT_SPILL) continue;
        status = write_file(w, x, p);
    }
    return status;
}

int plt_walk_run(plt_walk *w, int32_t stop) {
    const plt_model *m = w->model;
    w->storages.count = w->instructions.count = w->files.count = 0;
    w->live = w->peak = w->recomputed = w->spilled = 0;
    w->peak_time = w->peak_position = 0;
    w->extra = 0;
    w->time = 0;
    w->stop = stop;
    w->stamp = 0;
    w->stamp_position = -1;
    for (int64_t x = 0; x < m->n_objects; x++) {
        w->open[x] = w->current[x] = w->file[x] = -1;
        w->mark[x] = w->near[x] = 0;
    }
    for (int32_t p = 0; p < w->order->n_steps; p++) {
        int status = walk_step(w, p);
        if (status != PLT_WALK_DONE) return status;
        if (w->time > PLT_LONGEST * (w->order->n_steps + 64)) {
            w->culprit = -1;
            return PLT_WALK_ILLEGAL;
        }
    }
    return PLT_WALK_DONE;
}
