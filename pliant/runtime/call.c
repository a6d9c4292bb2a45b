/* One call: check the arguments, bind the symbols, find the plan, fit an arena, run. */
#include "internal.h"

#include <string.h>

#define PLT_IDLE_SLOTS 4  /* idle slots kept, each with its arena */
#define PLT_IDLE_CALLS 16 /* after this many calls an unused one is emptied */

static void carve_slot(const plt_model *m, plt_carver *c, plt_slot *s) {
    plt_carve(c, 1, sizeof *s);
    s->args = plt_carve(c, m->n_inputs, sizeof *s->args);
    s->dims = plt_carve(c, m->n_dims, sizeof(int64_t));
    s->symbols = plt_carve(c, m->n_symbols + 2, sizeof(int64_t));
    s->offsets = plt_carve(c, m->n_buffers, sizeof(int64_t));
    s->inputs = plt_carve(c, m->n_inputs, sizeof(void *));
    s->copies = plt_carve(c, m->n_inputs, sizeof(void *));
    s->copy_bytes = plt_carve(c, m->n_inputs, sizeof(int64_t));
    s->outputs = plt_carve(c, m->n_outputs, sizeof(void *));
    s->handles = plt_carve(c, m->n_outputs, sizeof(void *));
}

static plt_slot *slot_new(plt_model *m) {
    plt_slot measure;
    plt_carver c = {0};
    carve_slot(m, &c, &measure);
    plt_slot *s = plt_allocate(&m->services, c.used);
    if (!s) return NULL;
    s->block_bytes = c.used;
    s->model = m;
    c = (plt_carver){.block = (char *)s};
    carve_slot(m, &c, s);
    return s;
}

plt_slot *plt_slot_take(plt_model *m) {
    atomic_fetch_add_explicit(&m->sequence, 1, memory_order_relaxed);
    plt_slot *s = atomic_exchange(&m->spare, NULL);
    if (s) return s;
    plt_lock_take(&m->lock);
    s = m->idle;
    if (s) {
        m->idle = s->next;
        m->n_idle--;
    }
    plt_lock_give(&m->lock);
    return s ? s : slot_new(m);
}

int plt_frame_open(plt_model *m, plt_frame *f, void *const *weights) {
    plt_enter(m);
    f->root = f->model = m;
    f->part = 0;
    f->plan = NULL;
    f->weights = weights ? weights : m->weights;
    f->file = -1;
    f->file_error = 0;
    f->meter = (plt_meter){0};
    f->copied = f->handed = f->reserved = 0;
    f->planned = f->arena = f->recomputed = f->spilled = 0;
    f->slot = plt_slot_take(m);
    return f->slot ? PLT_OK : PLT_ERR_MEMORY;
}

/* With the lock held: idle arenas hold no more than the call now starting, and those
 * that no call has needed for a while hold nothing. */
static void shrink_idle(plt_model *m, int64_t need) {
    bool some = false;
    for (plt_slot *s = m->idle; s; s = s->next) {
        bool stale = m->sequence - s->last_used > PLT_IDLE_CALLS;
        if (stale || s->arena.need > need) plt_slot_cut(m, s, stale ? 0 : need);
        some |= s->arena.mapped > 0;
    }
    atomic_store(&m->idle_bytes, some);
}

/* The bytes that a call holds besides those of the plan: they are subtracted from the
 * limit. */
static int64_t beside(const plt_frame *f) { return plt_add_up(f->copied, f->handed); }

/* Finds the plan under the limit of this call, the model's or the budget's. */
static int find_plan(plt_frame *f, int64_t *detail) {
    plt_model *m = f->model;
    plt_slot *s = f->slot;
    int64_t own = atomic_load_explicit(&f->root->memory_limit, memory_order_relaxed);
    int64_t limit = own, budget = plt_budget_limit(m->services.budget);
    bool shared = budget >= 0 && (own < 0 || budget < own);
    if (shared) limit = budget;
    int64_t more = beside(f), rest = limit > more ? limit - more : 0;
    s->symbols[m->n_symbols + 1] = limit < 0 ? -1 : rest;
    int status = plt_find_plan(m, s, detail);
    if (status == PLT_OK && limit >= 0 && s->plan->peak_bytes > limit - more) {
        status = PLT_ERR_LIMIT;
        detail[1] = s->plan->peak_bytes;
    }
    if (status != PLT_ERR_LIMIT) return status;
    detail[0] = shared;
    detail[1] = plt_add_up(detail[1], more);
    detail[2] = limit;
    return status;
}

/* The most that all parts together can need, or all that the budget has. */
static int64_t most_bytes(const plt_frame *f, int64_t budget) {
    int64_t threads = f->slot->symbols[f->model->n_symbols], limit = budget;
    int64_t own = atomic_load_explicit(&f->root->memory_limit, memory_order_relaxed);
    if (own >= 0 && own < limit) limit = own;
    int64_t held = plt_add_up(f->copied, f->plan->output_bytes), most = 0;
    for (plt_model *m = f->model->next; m; m = m->next) {
        plt_entry *plan;
        int64_t rest = limit > held ? limit - held : 0;
        if (plt_take_bound(m, f->slot->symbols, threads, rest, &plan) != PLT_OK) {
            return limit;
        }
        int64_t need = plt_add_up(held, plan->peak_bytes);
        if (need > most) most = need;
        held = plt_add_up(held, plan->output_bytes);
        plt_leave_plan(m->bound, plan);
    }
    return most < limit ? most : limit;
}

/* Reserves the bytes of the call in the budget. The first part reserves them for all
 * parts, so that no call waits for memory while it holds some. */
static int reserve(plt_frame *f, int64_t need, int64_t *detail) {
    plt_budget *b = f->root->services.budget;
    int64_t limit = plt_budget_limit(b);
    if (f->part == 0) {
        if (f->model->next && limit >= 0) {
            int64_t most = most_bytes(f, limit);
            if (most > need) need = most;
        }
        int status = plt_budget_take(b, f->root, f->slot, need, detail);
        if (status == PLT_OK) f->reserved = need;
        return status;
    }
    if (need > f->reserved) {
        int status = plt_budget_grow(b, f->slot, need - f->reserved, detail);
        if (status != PLT_OK) return status;
    } else if (f->model->next) {
        return PLT_OK; /* a part to come may need it */
    } else {
        plt_budget_give(b, f->reserved - need);
    }
    f->reserved = need;
    return PLT_OK;
}

/* Reserves the bytes of the call, and resizes the slot's arena. */
static int take_memory(plt_frame *f, int64_t *detail) {
    plt_slot *s = f->slot;
    const plt_entry *plan = s->plan;
    const plt_services *services = &f->root->services;
    int64_t need = plt_add_up(plan->peak_bytes, beside(f));
    int status = reserve(f, need, detail);
    if (status != PLT_OK) return status;
    if (need > f->planned) f->planned = need;
    if (plan->arena_bytes > f->arena) f->arena = plan->arena_bytes;
    f->recomputed += plan->recomputed;
    f->spilled += plan->spilled;
    int64_t before = s->arena.mapped;
    bool fitted = plt_arena_fit(&s->arena, services, plan->arena_bytes);
    if (s->arena.mapped != before) {
        atomic_fetch_add(&f->root->arena_bytes, s->arena.mapped - before);
    }
    plt_count(&f->meter, plt_arena_held(&s->arena, services));
    if (fitted) return PLT_OK;
    detail[0] = -1;
    detail[1] = plan->arena_bytes;
    return PLT_ERR_MEMORY;
}

static int prepare_part(plt_frame *f, const plt_arg *args, int64_t *detail) {
    plt_model *m = f->model;
    plt_slot *s = f->slot;
    int status = plt_check_args(m, f, args, detail);
    if (status != PLT_OK) return status;
    status = plt_bound(m->bind(s->dims, s->symbols), detail);
    if (status != PLT_OK) return status;
    int64_t threads = atomic_load_explicit(&f->root->threads, memory_order_relaxed);
    s->symbols[m->n_symbols] = threads;
    status = find_plan(f, detail);
    if (status != PLT_OK) return status;
    const plt_entry *plan = f->plan = s->plan;
    status = take_memory(f, detail);
    if (status != PLT_OK) return status;
    const int64_t *offsets = plan->offsets;
    if (plan->n_extras > 0) { /* buffers move */
        plt_copy(s->offsets, plan->offsets, m->n_buffers, sizeof *offsets);
        offsets = s->offsets;
    }
    f->call = (plt_call){
        .pool = threads > 1 ? m->pool : NULL,
        .arena = s->arena.base,
        .table = plan->table,
        .offsets = offsets,
        .inputs = s->inputs,
        .outputs = s->outputs,
        .weights = f->weights + m->first_weight,
        .threads = threads,
        .program = plan->program,
    };
    return plt_copy_args(m, f, args, detail);
}

int plt_frame_prepare(plt_frame *f, const plt_arg *args, int64_t *detail) {
    int status = prepare_part(f, args, detail);
    while (status == PLT_OK && f->model->next) {
        status = plt_advance(f, &args, detail);
        if (status == PLT_OK) status = prepare_part(f, args, detail);
    }
    return plt_told(f, status, detail);
}

int64_t plt_special(plt_call *call, int64_t code) {
    plt_frame *f = (plt_frame *)(void *)((char *)call - offsetof(plt_frame, call));
    if (code < 0) return 1;
    const plt_extra *e = &f->plan->extras[code - f->model->n_steps];
    switch (e->kind) {
    case PLT_PLACE:
        f->slot->offsets[e->object] = e->offset;
        return 0;
    case PLT_TO_FILE:
        return !plt_spill_write(f, e);
    case PLT_FROM_FILE:
        return !plt_spill_read(f, e);
    default: /* PLT_POISON: it is not read any more */
        memset(call->arena + e->offset, 0xFF, (size_t)e->bytes);
        return 0;
    }
}

static int spill_error(plt_frame *f, int64_t *detail, bool began) {
    plt_spill_close(f);
    detail[0] = f->file_error;
    detail[1] = f->plan->file_bytes;
    detail[2] = began;
    return PLT_ERR_SPILL;
}

int plt_run_part(plt_frame *f, int64_t *detail) {
    const plt_model *m = f->model;
    if (!plt_spill_reserve(f)) return spill_error(f, detail, false);
    if (m->services.flags & PLT_FLAG_POISON) {
        if (f->call.arena) memset(f->call.arena, 0xFF, (size_t)f->plan->arena_bytes);
        for (int64_t i = 0; i < m->n_outputs; i++) {
            int64_t bytes = 0;
            plt_output_bytes(&m->outputs[i], f->plan->table, &bytes);
            if (bytes > 0) memset(f->slot->outputs[i], 0xFF, (size_t)bytes);
        }
    }
    for (int64_t i = 0; i < m->n_outputs; i++) {
        int64_t bytes = 0;
        plt_output_bytes(&m->outputs[i], f->plan->table, &bytes);
        plt_touch(&f->call, f->slot->outputs[i], bytes);
    }
    m->run(&f->call);
    if (f->file_error) return spill_error(f, detail, true);
    plt_spill_close(f);
    if (f->call.status != 0) {
        detail[0] = f->call.status;
        detail[1] = f->call.value;
        return PLT_ERR_RUN;
    }
    return PLT_OK;
}

int plt_frame_run(plt_frame *f, int64_t *detail) {
    return plt_told(f, plt_run_part(f, detail), detail);
}

static void record_peak(const plt_frame *f) {
    const memory_order relaxed = memory_order_relaxed;
    plt_model *m = f->root;
    int64_t peak = f->meter.peak;
    atomic_store_explicit(&m->last_peak, peak, relaxed);
    atomic_store_explicit(&m->last_planned, f->planned, relaxed);
    atomic_store_explicit(&m->last_copied, f->copied, relaxed);
    atomic_store_explicit(&m->last_arena, f->arena, relaxed);
    atomic_store_explicit(&m->last_recomputed, f->recomputed, relaxed);
    atomic_store_explicit(&m->last_spilled, f->spilled, relaxed);
    int64_t most = atomic_load_explicit(&m->max_peak, relaxed);
    while (peak > most && !atomic_compare_exchange_weak(&m->max_peak, &most, peak)) {
    }
}

/* Cuts an arena that is much larger than the calls before needed. This is done at once,
 * because the next call may be a long time away. If one of those calls needed half of
 * the arena, it is kept, because its pages are likely to be needed again. */
static void settle(plt_model *m, plt_slot *slot) {
    const memory_order relaxed = memory_order_relaxed;
    int64_t need = slot->arena.need, most = PLT_SMALL;
    for (int k = 0; k < PLT_RECENT; k++) {
        int64_t recent = atomic_load_explicit(&m->recent[k], relaxed);
        if (recent > most) most = recent;
    }
    uint32_t next = atomic_fetch_add_explicit(&m->recent_next, 1, relaxed);
    atomic_store_explicit(&m->recent[next % PLT_RECENT], need, relaxed);
    if (need / 2 <= most) return;
    int64_t before = slot->arena.mapped;
    plt_arena_shrink(&slot->arena, &m->services, most);
    atomic_fetch_add(&m->arena_bytes, slot->arena.mapped - before);
}

void plt_slot_leave(plt_slot *slot, int64_t need) {
    plt_model *m = slot->model;
    slot->last_used = atomic_load_explicit(&m->sequence, memory_order_relaxed);
    plt_slot *other = atomic_exchange(&m->spare, slot), *excess = NULL;
    if (!other && !atomic_load_explicit(&m->idle_bytes, memory_order_relaxed)) return;
    plt_lock_take(&m->lock);
    if (other && m->n_idle < PLT_IDLE_SLOTS - 1) {
        other->next = m->idle;
        m->idle = other;
        m->n_idle++;
    } else {
        excess = other;
    }
    if (need >= 0) shrink_idle(m, need);
    else atomic_store(&m->idle_bytes, true); /* so that the next call checks */
    plt_lock_give(&m->lock);
    if (excess) plt_slot_free(m, excess);
}

void plt_frame_close(plt_frame *f, int status) {
    plt_model *m = f->root;
    _Atomic int64_t *counter = status == PLT_OK ? &m->calls : &m->failures;
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
    if (status == PLT_OK) record_peak(f);
    if (!f->slot) return;
    if (m->next) plt_leave_parts(f);
    plt_slot *s = f->slot;
    if (f->copied > 0) plt_drop_copies(s);
    int64_t need = s->arena.need; /* before the arena is cut to a reasonable size */
    if (f->reserved) settle(m, s);
    plt_budget_idle(m, s, s->arena.need);
    plt_slot_leave(s, f->plan ? need : -1);
    plt_budget_give(m->services.budget, f->reserved);
    /* Only now: a reaper that counted this call before its arena could be cut would not
     * look at it again. */
    atomic_fetch_add(&m->left, 1);
    plt_budget_left(m);
}

/* ---- calling without a framework ---- */

static int make_outputs(plt_frame *f, plt_result *out) {
    const plt_model *m = f->model;
    size_t meta = (size_t)m->n_outputs * sizeof(plt_output);
    size_t bytes = meta;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        bytes += (size_t)m->outputs[i].rank * sizeof(int64_t);
    }
    out->detail[0] = -1;
    out->outputs = plt_allocate(&m->services, bytes);
    if (!out->outputs) return PLT_ERR_MEMORY;
    out->n_outputs = m->n_outputs;
    int64_t *dims = (int64_t *)((char *)out->outputs + meta);
    for (int64_t i = 0; i < m->n_outputs; i++) {
        plt_output *o = &out->outputs[i];
        o->rank = m->outputs[i].rank;
        o->dims = dims;
        plt_copy(dims, f->plan->table + m->outputs[i].dim_index, o->rank, sizeof *dims);
        dims += o->rank;
        plt_output_bytes(&m->outputs[i], f->plan->table, &o->bytes);
        if ((uint64_t)o->bytes <= SIZE_MAX) {
            o->data = plt_allocate_raw(&m->services, (size_t)o->bytes);
        }
        f->slot->outputs[i] = o->data;
        if (!o->data) {
            out->detail[0] = i;
            out->detail[1] = o->bytes;
            return PLT_ERR_MEMORY;
        }
        plt_count(&f->meter, o->bytes);
    }
    return PLT_OK;
}

void plt_result_free(plt_model *m, plt_result *r) {
    if (!r->outputs) return;
    size_t bytes = (size_t)r->n_outputs * sizeof(plt_output);
    for (int64_t i = 0; i < r->n_outputs; i++) {
        plt_release(&m->services, r->outputs[i].data, (size_t)r->outputs[i].bytes);
        bytes += (size_t)r->outputs[i].rank * sizeof(int64_t);
    }
    plt_release(&m->services, r->outputs, bytes);
    r->outputs = NULL;
    r->n_outputs = 0;
}

int plt_invoke(plt_model *m, const plt_arg *args, int32_t n, plt_result *out) {
    *out = (plt_result){0};
    if (n != m->n_inputs) {
        return plt_mismatch(PLT_ERR_COUNT, out->detail, m->n_inputs, n);
    }
    plt_frame f;
    int status = plt_frame_open(m, &f, NULL);
    if (status == PLT_OK) {
        status = plt_frame_prepare(&f, args, out->detail);
        if (status == PLT_OK) status = make_outputs(&f, out);
        if (status == PLT_OK) status = plt_frame_run(&f, out->detail);
    }
    plt_frame_close(&f, status);
    if (status != PLT_OK) plt_result_free(m, out);
    else memset(out->detail, 0, sizeof out->detail);
    return status;
}
