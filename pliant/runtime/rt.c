/* A model, its plans and its bookkeeping; call.c runs it. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PLT_DEFAULT_PLANS 64
#define PLT_SPILL_FOLDER "/tmp"
/* Defaults for rates that the model does not state: an ordinary core, its memory, and a
 * file in the page cache. */
#define PLT_ASSUMED_FLOPS 5e10
#define PLT_ASSUMED_BYTES 1e10
#define PLT_ASSUMED_SPILL 1e9

int64_t plt_abi_version(void) { return PLT_ABI_VERSION; }

int64_t plt_clock(plt_call *call) {
    (void)call;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- services ---- */

static void *default_allocate(void *context, size_t bytes) {
    (void)context;
    return malloc(bytes ? bytes : 1);
}

static void default_release(void *context, void *p, size_t bytes) {
    (void)context;
    (void)bytes;
    free(p);
}

void plt_services_copy(plt_services *to, const plt_services *from) {
    *to = from ? *from : (plt_services){0};
    if (!to->allocate) to->allocate = default_allocate;
    if (!to->release) to->release = default_release;
}

/* Blocks are aligned to 64 bytes, for atomics that need a cache line of their own. The
 * pointer that `allocate` returned is stored just below the block. */
void *plt_allocate_raw(const plt_services *s, size_t bytes) {
    size_t total;
    if (__builtin_add_overflow(bytes, PLT_ALIGN + sizeof(void *), &total)) return NULL;
    char *raw = s->allocate(s->context, total);
    if (!raw) return NULL;
    uintptr_t at = (uintptr_t)raw + sizeof(void *) + PLT_ALIGN - 1;
    at &= ~(uintptr_t)(PLT_ALIGN - 1);
    void **p = (void **)at;
    p[-1] = raw;
    return p;
}

void *plt_allocate(const plt_services *s, size_t bytes) {
    void *p = plt_allocate_raw(s, bytes);
    return p ? memset(p, 0, bytes) : NULL;
}

void plt_release(const plt_services *s, void *p, size_t bytes) {
    if (!p) return;
    s->release(s->context, ((void **)p)[-1], bytes + PLT_ALIGN + sizeof(void *));
}

/* ---- model ---- */

/* Whether the inputs of the next part are those of a part, then its outputs. */
static bool is_next(const plt_model_desc *d, const plt_model *next) {
    const plt_model *b = next->bound;
    if (next->n_inputs != d->n_inputs + d->n_outputs || !b) return false;
    for (int64_t i = 0; i < d->n_inputs; i++) {
        const plt_input_desc *in = &next->inputs[i], *same = &d->inputs[i];
        if (in->kind != same->kind || in->rank != same->rank) return false;
    }
    for (int64_t i = 0; i < d->n_outputs; i++) {
        const plt_input_desc *in = &next->inputs[d->n_inputs + i];
        const plt_output_desc *o = &d->outputs[i];
        int64_t rank = in->kind == PLT_SCALAR ? 0 : in->rank;
        if (o->rank != rank || o->bits != in->bits) return false;
        if (in->kind == PLT_SCALAR && o->bits != 64) return false;
    }
    return b->n_symbols == next->n_symbols && b->n_table == next->n_table &&
           b->n_buffers == next->n_buffers && b->n_outputs == next->n_outputs &&
           b->n_steps == next->n_steps && b->n_dims <= next->n_symbols;
}

static bool well_formed(const plt_model_desc *d) {
    const int64_t most = INT32_MAX;
    int64_t counts[] = {d->n_inputs,  d->n_symbols, d->n_table,   d->n_buffers,
                        d->n_outputs, d->n_weights, d->n_pinned,  d->n_steps,
                        d->n_touches, d->n_orders,  d->n_knobs};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (counts[i] < 0 || counts[i] > most) return false;
    }
    if (!d->run || !d->sizes || !d->bind) return false;
    if (d->threads < 1 || d->plan_capacity < 0 || d->plan_capacity > most) return false;
    for (int64_t i = 0; i < d->n_inputs; i++) {
        const plt_input_desc *in = &d->inputs[i];
        if (in->kind != PLT_TENSOR && in->kind != PLT_SCALAR) return false;
        if (in->kind == PLT_TENSOR && (in->rank < 0 || in->rank > 64)) return false;
    }
    for (int64_t i = 0; i < d->n_buffers; i++) {
        const plt_buffer_desc *b = &d->buffers[i];
        if (b->size_index < 0 || b->size_index >= d->n_table) return false;
    }
    for (int64_t i = 0; i < d->n_outputs; i++) {
        const plt_output_desc *o = &d->outputs[i];
        if (o->rank < 0 || o->rank > 64 || o->bits < 1 || o->bits > 255) return false;
        if (o->dim_index < 0 || o->dim_index > d->n_table - o->rank) return false;
    }
    if (d->n_knobs > PLT_MOST_KNOBS) return false;
    for (int64_t i = 0; i < d->n_knobs; i++) {
        const plt_knob_desc *k = &d->knobs[i];
        if (k->extent_index < 0 || k->extent_index >= d->n_table) return false;
        if (k->multiple < 1) return false;
    }
    return plt_order_well_formed(d) && (!d->next || is_next(d, d->next));
}

static void carve_model(plt_model *m, plt_carver *c, const plt_model_desc *d) {
    plt_carve(c, 1, sizeof *m);
    m->inputs = plt_carve(c, d->n_inputs, sizeof *m->inputs);
    m->buffers = plt_carve(c, d->n_buffers, sizeof *m->buffers);
    m->outputs = plt_carve(c, d->n_outputs, sizeof *m->outputs);
    m->weights = plt_carve(c, d->n_weights, sizeof *m->weights);
    m->steps = plt_carve(c, d->n_steps, sizeof *m->steps);
    m->orders = plt_carve(c, d->n_orders, sizeof *m->orders);
    for (int64_t k = 0; k < d->n_orders; k++) {
        plt_order measure;
        plt_order_carve(c, c->block ? &m->orders[k] : &measure, d, k);
    }
    m->knobs = plt_carve(c, d->n_knobs, sizeof *m->knobs);
    const char *folder = d->spill_folder ? d->spill_folder : PLT_SPILL_FOLDER;
    m->spill_folder = plt_carve(c, (int64_t)strlen(folder) + 1, 1);
}

static bool fill_orders(plt_model *m, const plt_model_desc *d) {
    int64_t most = m->n_objects > m->n_steps ? m->n_objects : m->n_steps;
    size_t bytes = (size_t)most * sizeof(int32_t);
    int32_t *scratch = plt_allocate_raw(&m->services, bytes);
    bool good = scratch != NULL;
    for (int64_t k = 0; good && k < d->n_orders; k++) {
        good = plt_order_fill(&m->orders[k], d, k, scratch);
    }
    plt_release(&m->services, scratch, bytes);
    return good;
}

static double ns_per(double per_second, double assumed) {
    return 1e9 / (per_second > 0 ? per_second : assumed);
}

plt_model *plt_model_create(const plt_model_desc *d, const plt_services *services) {
    if (!well_formed(d)) return NULL;
    plt_services s;
    plt_services_copy(&s, services);
    plt_model measure;
    plt_carver c = {0};
    carve_model(&measure, &c, d);
    plt_model *m = plt_allocate(&s, c.used);
    if (!m) return NULL;
    m->block_bytes = c.used;
    c = (plt_carver){.block = (char *)m};
    carve_model(m, &c, d);

    m->services = s;
    m->n_inputs = d->n_inputs;
    m->n_symbols = d->n_symbols;
    m->n_table = d->n_table;
    m->n_buffers = d->n_buffers;
    m->n_outputs = d->n_outputs;
    m->n_weights = d->n_weights;
    m->n_pinned = d->n_pinned;
    m->n_objects = d->n_buffers + d->n_pinned;
    m->n_steps = d->n_steps;
    m->n_touches = d->n_touches;
    m->n_orders = d->n_orders;
    m->n_knobs = d->n_knobs;
    m->can = d->can;
#ifdef PLT_NO_FILES
    m->can &= ~(int64_t)PLT_CAN_SPILL;
#endif
    m->ns_per_flop = ns_per(d->flops_per_second, PLT_ASSUMED_FLOPS);
    m->ns_per_byte = ns_per(d->bytes_per_second, PLT_ASSUMED_BYTES);
    m->ns_per_spilled_byte = ns_per(d->spill_bytes_per_second, PLT_ASSUMED_SPILL);
    strcpy(m->spill_folder, d->spill_folder ? d->spill_folder : PLT_SPILL_FOLDER);
    plt_copy(m->steps, d->steps, d->n_steps, sizeof *m->steps);
    plt_copy(m->knobs, d->knobs, d->n_knobs, sizeof *m->knobs);
    plt_copy(m->inputs, d->inputs, d->n_inputs, sizeof *m->inputs);
    plt_copy(m->buffers, d->buffers, d->n_buffers, sizeof *m->buffers);
    plt_copy(m->outputs, d->outputs, d->n_outputs, sizeof *m->outputs);
    plt_copy(m->weights, d->weights, d->n_weights, sizeof *m->weights);
    for (int64_t i = 0; i < m->n_inputs; i++) {
        m->n_dims += m->inputs[i].kind == PLT_SCALAR ? 1 : m->inputs[i].rank;
    }
    m->next = d->next;
    m->bound = d->bound;
    m->first_weight = d->first_weight;
    m->run = d->run;
    m->sizes = d->sizes;
    m->bind = d->bind;
    m->threads = d->threads;
    m->memory_limit = d->memory_limit;
    m->pool = s.pool;
    plt_lock_init(&m->lock);
    int64_t capacity = d->plan_capacity ? d->plan_capacity : PLT_DEFAULT_PLANS;
    if (!m->pool) {
        m->pool = plt_pool_create(&s);
        m->owns_pool = true;
    }
    if (!m->pool || !plt_plans_init(&m->plans, &s, capacity, m->n_symbols + 2) ||
        !fill_orders(m, d)) {
        plt_model_destroy(m);
        return NULL;
    }
    m->epoch = plt_pool_epoch(m->pool);
    plt_budget_join(s.budget, m);
    return m;
}

void plt_slot_cut(plt_model *m, plt_slot *slot, int64_t keep) {
    int64_t before = slot->arena.mapped;
    plt_arena_shrink(&slot->arena, &m->services, keep);
    atomic_fetch_add(&m->arena_bytes, slot->arena.mapped - before);
    plt_budget_idle(m, slot, slot->arena.need);
}

void plt_slot_free(plt_model *m, plt_slot *slot) {
    if (slot->plan) plt_leave_plan(m, slot->plan);
    plt_slot_cut(m, slot, 0);
    plt_release(&m->services, slot, slot->block_bytes);
}

void plt_model_destroy(plt_model *m) {
    if (!m) return;
    plt_services s = m->services;
    plt_budget_leave(s.budget, m);
    if (m->pool && m->plans.buckets) plt_trim(m);
    plt_plans_destroy(&m->plans, &s);
    if (m->owns_pool) plt_pool_destroy(m->pool);
    plt_lock_destroy(&m->lock);
    plt_release(&s, m, m->block_bytes);
}

/* The bytes mapped by arenas between calls; no other thread may use the model. */
static int64_t idle_mapped(plt_model *m) {
    plt_slot *spare = atomic_load(&m->spare);
    int64_t bytes = spare ? spare->arena.mapped : 0;
    for (plt_slot *s = m->idle; s; s = s->next) bytes += s->arena.mapped;
    return bytes;
}

/* Repairs the model in a child forked since the last call. If another thread held the
 * lock at the fork, the data that it guards may be inconsistent and is dropped. Plans
 * and arenas that running calls used at the fork, or that were being cut, leak: they
 * stay allocated and are no longer counted, because their threads are gone. */
void plt_enter(plt_model *m) {
    uint32_t now = plt_pool_epoch(m->pool), seen = atomic_load(&m->epoch);
    if (seen == now) return;
    const uint32_t repairing = UINT32_MAX;
    if (seen != repairing &&
        atomic_compare_exchange_strong(&m->epoch, &seen, repairing)) {
        if (plt_lock_try(&m->lock)) {
            plt_lock_give(&m->lock);
        } else {
            plt_lock_init(&m->lock);
            plt_plans_forget(&m->plans);
            atomic_store(&m->spare, NULL);
            m->idle = NULL;
            m->n_idle = 0;
        }
        atomic_store(&m->arena_bytes, idle_mapped(m));
        plt_budget_enter(m->services.budget);
        atomic_store(&m->epoch, now);
    }
    while (atomic_load(&m->epoch) != now) {
    }
}

/* ---- plans ---- */

static bool same_key(const int64_t *a, const int64_t *b, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        if (a[i] != b[i]) return false;
    }
    return true;
}

void plt_leave_plan(plt_model *m, plt_entry *plan) {
    plt_lock_take(&m->lock);
    plt_plans_leave(&m->plans, &m->services, plan);
    plt_lock_give(&m->lock);
}

int plt_take_plan(plt_model *m, const int64_t *key, plt_entry **out, int64_t *detail) {
    uint64_t hash = plt_plans_hash(key, m->n_symbols + 2);
    plt_lock_take(&m->lock);
    *out = plt_plans_find(&m->plans, key, hash);
    plt_lock_give(&m->lock);
    if (*out) {
        atomic_fetch_add_explicit(&m->plan_hits, 1, memory_order_relaxed);
        return PLT_OK;
    }
    plt_entry *made = NULL;
    int status = plt_make_plan(m, key, &made, detail);
    if (status != PLT_OK) return status;
    atomic_fetch_add_explicit(&m->plans_made, 1, memory_order_relaxed);
    plt_lock_take(&m->lock);
    *out = plt_plans_insert(&m->plans, &m->services, made);
    plt_lock_give(&m->lock);
    return PLT_OK;
}

int plt_find_plan(plt_model *m, plt_slot *slot, int64_t *detail) {
    const int64_t *key = slot->symbols;
    if (slot->plan && same_key(slot->plan->key, key, m->n_symbols + 2)) {
        atomic_fetch_add_explicit(&m->plan_hits, 1, memory_order_relaxed);
        return PLT_OK;
    }
    if (slot->plan) plt_leave_plan(m, slot->plan);
    slot->plan = NULL;
    return plt_take_plan(m, key, &slot->plan, detail);
}

int plt_take_bound(plt_model *m, const int64_t *symbols, int64_t threads, int64_t limit,
                   plt_entry **out) {
    plt_model *b = m->bound;
    size_t bytes = (size_t)(b->n_symbols + 2) * sizeof(int64_t);
    int64_t *key = plt_allocate(&m->services, bytes), detail[3];
    if (!key) return PLT_ERR_MEMORY;
    int status = plt_bound(b->bind(symbols, key), detail);
    key[b->n_symbols] = threads;
    key[b->n_symbols + 1] = limit;
    if (status == PLT_OK) status = plt_take_plan(b, key, out, detail);
    plt_release(&m->services, key, bytes);
    return status;
}

int plt_plan(plt_model *m, const int64_t *symbols, int64_t limit, plt_plan_info *out) {
    plt_enter(m);
    size_t bytes = (size_t)(m->n_symbols + 2) * sizeof(int64_t);
    memset(out->detail, 0, sizeof out->detail);
    int64_t *key = plt_allocate(&m->services, bytes);
    if (!key) return PLT_ERR_MEMORY;
    plt_copy(key, symbols, m->n_symbols, sizeof *key);
    key[m->n_symbols] = atomic_load(&m->threads);
    key[m->n_symbols + 1] = limit < 0 ? -1 : limit;
    plt_entry *e = NULL;
    int status = plt_make_plan(m, key, &e, out->detail);
    plt_release(&m->services, key, bytes);
    if (status != PLT_OK) return status;

    out->arena_bytes = e->arena_bytes;
    out->output_bytes = e->output_bytes;
    out->peak_bytes = e->peak_bytes;
    out->lower_bound = e->lower_bound;
    out->n_buffers = m->n_buffers;
    out->order = e->order;
    out->recomputed_steps = e->recomputed;
    out->spilled_bytes = e->spilled;
    out->extra_nanoseconds = e->extra_nanoseconds;
    out->nanoseconds = e->nanoseconds;
    out->n_evictions = e->n_evictions;
    if (out->evictions) {
        int64_t n = e->n_evictions < out->max_evictions ? e->n_evictions
                                                        : out->max_evictions;
        plt_copy(out->evictions, e->evictions, n, sizeof *e->evictions);
    }
    if (out->offsets) plt_copy(out->offsets, e->offsets, m->n_buffers, sizeof(int64_t));
    if (out->table) plt_copy(out->table, e->table, m->n_table, sizeof(int64_t));
    if (out->knobs) plt_copy(out->knobs, e->knobs, m->n_knobs, sizeof(int64_t));
    for (int64_t i = 0; out->sizes && i < m->n_buffers; i++) {
        out->sizes[i] = e->table[m->buffers[i].size_index];
    }
    plt_plans_drop(&m->services, e);
    return status;
}

int plt_bind(plt_model *m, const int64_t *dims, int64_t *symbols, int64_t *guard) {
    int64_t detail[3] = {-1};
    int status = plt_bound(m->bind(dims, symbols), detail);
    *guard = detail[0];
    return status;
}

/* ---- bookkeeping ---- */

void plt_stats(plt_model *m, plt_stats_info *out) {
    plt_enter(m);
    plt_lock_take(&m->lock);
    int64_t cached = m->plans.count;
    plt_lock_give(&m->lock);
    *out = (plt_stats_info){
        .calls = atomic_load(&m->calls),
        .failures = atomic_load(&m->failures),
        .plans_made = atomic_load(&m->plans_made),
        .plan_hits = atomic_load(&m->plan_hits),
        .plans_cached = cached,
        .arena_bytes = atomic_load(&m->arena_bytes),
        .last_peak_bytes = atomic_load(&m->last_peak),
        .last_planned_bytes = atomic_load(&m->last_planned),
        .last_copied_bytes = atomic_load(&m->last_copied),
        .last_arena_bytes = atomic_load(&m->last_arena),
        .max_peak_bytes = atomic_load(&m->max_peak),
        .last_recomputed_steps = atomic_load(&m->last_recomputed),
        .last_spilled_bytes = atomic_load(&m->last_spilled),
    };
}

int plt_last_symbols(plt_model *m, int64_t *symbols) {
    plt_enter(m);
    plt_slot *spare = atomic_exchange(&m->spare, NULL), *none = NULL;
    if (!spare) return PLT_ERR_COUNT;
    bool found = spare->plan != NULL;
    if (found) plt_copy(symbols, spare->plan->key, m->n_symbols, sizeof *symbols);
    if (!atomic_compare_exchange_strong(&m->spare, &none, spare)) {
        plt_slot_free(m, spare);
    }
    return found ? PLT_OK : PLT_ERR_COUNT;
}

void plt_cut_idle(plt_model *m, int64_t keep) {
    plt_enter(m);
    plt_slot *spare = atomic_exchange(&m->spare, NULL), *none = NULL;
    if (spare) {
        plt_slot_cut(m, spare, keep);
        if (!atomic_compare_exchange_strong(&m->spare, &none, spare))
            plt_slot_free(m, spare);
    }
    plt_lock_take(&m->lock);
    bool some = false;
    for (plt_slot *s = m->idle; s; s = s->next) {
        plt_slot_cut(m, s, 0); /* a model keeps one small arena, not one a slot */
        some |= s->arena.mapped > 0;
    }
    atomic_store(&m->idle_bytes, some);
    plt_lock_give(&m->lock);
}

void plt_trim(plt_model *m) {
    plt_enter(m);
    plt_slot *spare = atomic_exchange(&m->spare, NULL);
    plt_lock_take(&m->lock);
    plt_slot *idle = m->idle;
    m->idle = NULL;
    atomic_store(&m->idle_bytes, false);
    m->n_idle = 0;
    plt_plans_clear(&m->plans, &m->services);
    plt_lock_give(&m->lock);
    if (spare) plt_slot_free(m, spare);
    while (idle) {
        plt_slot *next = idle->next;
        plt_slot_free(m, idle);
        idle = next;
    }
}

int plt_set_limit(plt_model *m, int64_t limit) {
    atomic_store(&m->memory_limit, limit < 0 ? -1 : limit);
    return PLT_OK;
}

int plt_set_threads(plt_model *m, int64_t threads) {
    if (threads < 1) return PLT_ERR_COUNT;
    atomic_store(&m->threads, threads);
    return PLT_OK;
}
