/* The plan of one shape: its table, offsets and program, in a single block. */
#include "internal.h"

/* ---- the program ---- */

/* The buffers of each object and the storages that end at each instruction, as chains;
 * and the offsets in the file. */
typedef struct layout {
    const plt_walk *w;
    const plt_choice *choice;
    const int64_t *places; /* [files] bytes into the file */
    int32_t *member;       /* [n_buffers] a root's first buffer */
    int32_t *next;         /* [n_buffers] the next of the same root, or -1 */
    int32_t *ending;       /* [instructions] a storage that ends there, or -1 */
    int32_t *also;         /* [storages] another that ends there, or -1 */
    bool *seen;            /* [n_buffers] has been placed */
    bool poison;
    plt_entry *entry; /* filled in the second pass */
    int64_t n_program, n_extras;
} layout;

static void add_code(layout *l, int64_t code) {
    if (l->entry->program) l->entry->program[l->n_program] = code;
    l->n_program++;
}

static void add_extra(layout *l, plt_extra extra) {
    add_code(l, l->w->model->n_steps + l->n_extras);
    if (l->entry->program) l->entry->extras[l->n_extras] = extra;
    l->n_extras++;
}

static void place(layout *l, int32_t root, int64_t offset, int64_t bytes) {
    bool first = !l->seen[root];
    l->seen[root] = true;
    for (int32_t b = l->member[root]; b >= 0; b = l->next[b]) {
        if (!first) add_extra(l, (plt_extra){PLT_PLACE, b, offset, bytes, 0});
        else if (l->entry->program) l->entry->offsets[b] = offset;
    }
}

static void lay_out(layout *l) {
    const plt_walk *w = l->w;
    const plt_storage *storages = w->storages.items;
    const plt_instruction *made = w->instructions.items;
    l->n_program = l->n_extras = 0;
    memset(l->seen, 0, (size_t)w->model->n_buffers);
    int64_t opened = 0;
    for (int64_t i = 0; i < w->instructions.count; i++) {
        for (; opened < w->storages.count && storages[opened].first == i; opened++) {
            int32_t root = storages[opened].object;
            place(l, root, l->choice->offsets[opened], w->sizes[root]);
        }
        if (made[i].kind == PLT_CALL) {
            add_code(l, made[i].number);
        } else {
            int32_t root = made[i].number;
            bool out = made[i].kind == PLT_WRITE_FILE;
            add_extra(l, (plt_extra){out ? PLT_TO_FILE : PLT_FROM_FILE, root,
                                     l->choice->offsets[made[i].storage],
                                     w->sizes[root], l->places[made[i].file]});
        }
        for (int32_t k = l->poison ? l->ending[i] : -1; k >= 0; k = l->also[k]) {
            int32_t root = storages[k].object;
            if (w->sizes[root] == 0) continue; /* there may be no arena */
            add_extra(l, (plt_extra){PLT_POISON, root, l->choice->offsets[k],
                                     w->sizes[root], 0});
        }
    }
    add_code(l, -1);
}

static void carve_layout(layout *l, plt_carver *c) {
    const plt_model *m = l->w->model;
    l->member = plt_carve(c, m->n_buffers, sizeof(int32_t));
    l->next = plt_carve(c, m->n_buffers, sizeof(int32_t));
    l->ending = plt_carve(c, l->w->instructions.count, sizeof(int32_t));
    l->also = plt_carve(c, l->w->storages.count, sizeof(int32_t));
    l->seen = plt_carve(c, m->n_buffers, sizeof(bool));
}

static void chain(layout *l) {
    const plt_walk *w = l->w;
    const plt_storage *storages = w->storages.items;
    int64_t n = w->model->n_buffers;
    for (int64_t b = 0; b < n; b++) l->member[b] = l->next[b] = -1;
    for (int64_t b = n; b-- > 0;) {
        int32_t root = w->order->roots[b];
        l->next[b] = l->member[root];
        l->member[root] = (int32_t)b;
    }
    for (int64_t i = 0; i < w->instructions.count; i++) l->ending[i] = -1;
    for (int64_t k = w->storages.count; k-- > 0;) {
        int32_t at = storages[k].last;
        l->also[k] = l->ending[at];
        l->ending[at] = (int32_t)k;
    }
}

static bool is_evicted(const plt_walk *w, int32_t x, int32_t k) {
    bool gap = k + 1 < w->order->first_use[x + 1];
    return gap && w->modes[k] != PLT_KEEP && w->sizes[x] > 0;
}

static int64_t list_evictions(const plt_walk *w, plt_eviction *out) {
    const plt_order *o = w->order;
    int64_t count = 0;
    for (int32_t x = 0; x < w->model->n_buffers; x++) {
        for (int32_t k = o->first_use[x]; k < o->first_use[x + 1]; k++) {
            if (!is_evicted(w, x, k)) continue;
            bool spill = w->modes[k] == PLT_SPILL;
            if (out) {
                out[count] = (plt_eviction){
                    x, spill ? PLT_CAN_SPILL : PLT_CAN_RECOMPUTE,
                    o->steps[o->uses[k].position], o->steps[o->uses[k + 1].position]};
            }
            count++;
        }
    }
    return count;
}

/* Computes the offsets of spilled values in the file, and the file's length. */
static int place_files(const plt_walk *w, int64_t *places, int64_t *extent) {
    const plt_services *s = &w->model->services;
    int64_t n = w->files.count, bound;
    const plt_storage *files = w->files.items;
    size_t bytes = (size_t)n * sizeof(plt_interval);
    plt_interval *v = plt_allocate_raw(s, bytes);
    if (!v) return PLT_ERR_MEMORY;
    for (int64_t i = 0; i < n; i++) {
        v[i] = (plt_interval){w->sizes[files[i].object], files[i].first, files[i].last};
    }
    int status = plt_pack(s, v, n, INT64_MAX, 0, places, extent, &bound);
    plt_release(s, v, bytes);
    return status;
}

static void carve_entry(const plt_model *m, plt_carver *c, plt_entry *e) {
    plt_carve(c, 1, sizeof *e);
    e->key = plt_carve(c, m->n_symbols + 2, sizeof(int64_t));
    e->table = plt_carve(c, m->n_table, sizeof(int64_t));
    e->knobs = plt_carve(c, m->n_knobs, sizeof(int64_t));
    e->offsets = plt_carve(c, m->n_buffers, sizeof(int64_t));
    e->program = plt_carve(c, e->n_program, sizeof(int64_t));
    e->extras = plt_carve(c, e->n_extras, sizeof(plt_extra));
    e->evictions = plt_carve(c, e->n_evictions, sizeof(plt_eviction));
}

static plt_entry *allocate_entry(const plt_model *m, plt_entry counts) {
    plt_carver c = {0};
    plt_entry sizes = counts;
    carve_entry(m, &c, &sizes);
    plt_entry *e = plt_allocate(&m->services, c.used);
    if (!e) return NULL;
    *e = counts;
    e->block_bytes = c.used;
    e->refs = 1;
    c = (plt_carver){.block = (char *)e};
    carve_entry(m, &c, e);
    return e;
}

/* An entry with room for what the first pass counted. */
static plt_entry *new_entry(layout *l, int64_t n_evictions) {
    plt_entry counts = {.n_evictions = n_evictions};
    l->entry = &counts;
    lay_out(l);
    counts.n_program = l->n_program;
    counts.n_extras = l->n_extras;
    return allocate_entry(l->w->model, counts);
}

static int write_entry(const plt_walk *w, const plt_choice *choice, plt_entry **out) {
    const plt_model *m = w->model;
    size_t places_bytes = (size_t)w->files.count * sizeof(int64_t);
    int64_t *places = plt_allocate(&m->services, places_bytes);
    if (!places) return PLT_ERR_MEMORY;
    int64_t file_bytes = 0;
    int status = place_files(w, places, &file_bytes);
    layout l = {.w = w, .choice = choice, .places = places};
    l.poison = m->services.flags & PLT_FLAG_POISON;
    plt_carver c = {0};
    carve_layout(&l, &c);
    size_t bytes = c.used;
    char *block = plt_allocate(&m->services, bytes);
    if (!block && status == PLT_OK) status = PLT_ERR_MEMORY;
    if (status == PLT_OK) {
        c = (plt_carver){.block = block};
        carve_layout(&l, &c);
        chain(&l);
        *out = l.entry = new_entry(&l, list_evictions(w, NULL));
        if (!*out) status = PLT_ERR_MEMORY;
    }
    if (status == PLT_OK) {
        lay_out(&l);
        list_evictions(w, (*out)->evictions);
        (*out)->file_bytes = file_bytes;
    }
    plt_release(&m->services, block, bytes);
    plt_release(&m->services, places, places_bytes);
    return status;
}

/* ---- plans ---- */

static int64_t whole(double nanoseconds) {
    return nanoseconds < 9e18 ? (int64_t)nanoseconds : INT64_MAX;
}

/* What depends on the sizes of the shape; arena_bytes is there. */
static void fill_sizes(plt_entry *e, const plt_settings *s, const plt_shape *shape) {
    const plt_model *m = s->model;
    plt_copy(e->key, s->key, m->n_symbols + 2, sizeof *e->key);
    e->hash = plt_plans_hash(e->key, m->n_symbols + 2);
    plt_copy(e->table, shape->table, m->n_table, sizeof *e->table);
    e->output_bytes = s->base.output_bytes;
    e->peak_bytes = plt_add_up(e->arena_bytes, s->base.output_bytes);
}

static void fill_entry(const plt_walk *w, const plt_settings *s, const plt_choice *c,
                       plt_entry *e) {
    const plt_model *m = w->model;
    e->arena_bytes = c->arena;
    fill_sizes(e, s, c->shape);
    for (int64_t k = 0; k < m->n_knobs; k++) {
        e->knobs[k] = w->order->knobs >> k & 1 ? c->shape->rows[k] : 0;
    }
    e->lower_bound = c->bound + s->base.output_bytes;
    e->order = c->order;
    e->recomputed = w->recomputed;
    e->spilled = w->spilled;
    e->extra_nanoseconds = whole(w->extra);
    e->nanoseconds = whole(plt_order_cost(w->order, w->costs) + w->extra);
}

static int choose_plan(plt_settings *s, plt_entry **out, int64_t *detail) {
    plt_model *m = s->model;
    plt_walk w;
    detail[0] = -1;
    if (!plt_walk_init(&w, m)) return PLT_ERR_MEMORY;
    int64_t limit = s->key[m->n_symbols + 1], room = limit, rest = s->base.output_bytes;
    if (limit >= 0) room = limit > rest ? limit - rest : 0;
    plt_choice choice;
    int status = plt_choose(&w, s, room, &choice);
    bool chosen = status == PLT_OK || status == PLT_ERR_LIMIT;
    /* an arena with gaps may be larger than the sum of its buffers */
    int64_t peak = chosen ? plt_add_up(choice.arena, rest) : 0;
    if (status == PLT_OK && peak == INT64_MAX) status = PLT_ERR_OVERFLOW;
    if (status == PLT_OK && limit >= 0 && peak > limit) status = PLT_ERR_LIMIT;
    if (status == PLT_ERR_LIMIT) {
        detail[0] = 0;
        plt_mismatch(status, detail, peak, limit);
    }
    if (status == PLT_OK) status = write_entry(&w, &choice, out);
    if (status == PLT_OK) fill_entry(&w, s, &choice, *out);
    plt_choice_free(&w, &choice);
    plt_walk_free(&w);
    return status;
}

/* The program and the offsets of a plan of the bound, which has a place for everything
 * at its largest, with the sizes of this shape. */
static plt_entry *borrowed(const plt_settings *s, const plt_entry *from) {
    const plt_model *m = s->model;
    plt_entry *e = allocate_entry(m, (plt_entry){
        .arena_bytes = from->arena_bytes,
        .lower_bound = from->lower_bound - from->output_bytes + s->base.output_bytes,
        .order = from->order,
        .recomputed = from->recomputed,
        .spilled = from->spilled,
        .extra_nanoseconds = from->extra_nanoseconds,
        .nanoseconds = from->nanoseconds,
        .file_bytes = from->file_bytes,
        .n_program = from->n_program,
        .n_extras = from->n_extras,
        .n_evictions = from->n_evictions,
    });
    if (!e) return NULL;
    plt_copy(e->offsets, from->offsets, m->n_buffers, sizeof *e->offsets);
    plt_copy(e->program, from->program, e->n_program, sizeof *e->program);
    plt_copy(e->extras, from->extras, e->n_extras, sizeof *e->extras);
    plt_copy(e->evictions, from->evictions, e->n_evictions, sizeof *e->evictions);
    fill_sizes(e, s, &s->base);
    return e;
}

/* Replaces a plan that is larger than that of the bound, or that does not fit: packing
 * smaller buffers may need more memory, or evict others. So no call takes more than is
 * planned for the largest sizes. */
static int stay_within(const plt_settings *s, int status, plt_entry **out) {
    plt_model *m = s->model;
    plt_entry *most = NULL;
    const int64_t *last = s->key + m->n_symbols;
    int found = plt_take_bound(m, s->key, last[0], last[1], &most);
    if (found != PLT_OK) return status;
    if (status != PLT_OK || (*out)->peak_bytes > most->peak_bytes) {
        plt_entry *e = borrowed(s, most);
        if (e && status == PLT_OK) plt_plans_drop(&m->services, *out);
        if (e) *out = e;
        if (e) status = PLT_OK;
    }
    plt_leave_plan(m->bound, most);
    return status;
}

int plt_make_plan(plt_model *m, const int64_t *key, plt_entry **out, int64_t *detail) {
    plt_settings s;
    int status = plt_settings_init(&s, m, key, detail);
    if (status == PLT_OK) {
        status = choose_plan(&s, out, detail);
        if (m->bound && (status == PLT_OK || status == PLT_ERR_LIMIT)) {
            status = stay_within(&s, status, out);
        }
    }
    plt_settings_free(&s);
    return status;
}

int plt_least(plt_model *m, const int64_t *symbols, int64_t *least) {
    size_t bytes = (size_t)(m->n_symbols + 2) * sizeof(int64_t);
    int64_t *key = plt_allocate(&m->services, bytes), detail[3];
    if (!key) return PLT_ERR_MEMORY;
    plt_copy(key, symbols, m->n_symbols, sizeof *key);
    key[m->n_symbols] = atomic_load(&m->threads);
    plt_settings s;
    plt_walk w;
    int status = plt_settings_init(&s, m, key, detail);
    if (status == PLT_OK && !plt_walk_init(&w, m)) {
        status = PLT_ERR_MEMORY;
    } else if (status == PLT_OK) {
        plt_choice choice;
        status = plt_choose_least(&w, &s, &choice);
        *least = plt_add_up(choice.arena, s.base.output_bytes);
        plt_choice_free(&w, &choice);
        plt_walk_free(&w);
    }
    plt_settings_free(&s);
    plt_release(&m->services, key, bytes);
    return status;
}
