/* One call: check the arguments, bind the symbols, find the plan, fit an arena, run. */
#include "internal.h"

#include <string.h>

#define PLT_CPU 1         /* kDLCPU */
#define PLT_IDLE_SLOTS 4  /* arenas kept for calls to come */
#define PLT_IDLE_CALLS 16 /* after this many calls an unused one is emptied */

static void carve_slot(const plt_model *m, plt_carver *c, plt_slot *s) {
    plt_carve(c, 1, sizeof *s);
    s->args = plt_carve(c, m->n_inputs, sizeof *s->args);
    s->dims = plt_carve(c, m->n_dims, sizeof(int64_t));
    s->symbols = plt_carve(c, m->n_symbols + 2, sizeof(int64_t));
    s->offsets = plt_carve(c, m->n_buffers, sizeof(int64_t));
    s->inputs = plt_carve(c, m->n_inputs, sizeof(void *));
    s->outputs = plt_carve(c, m->n_outputs, sizeof(void *));
    s->handles = plt_carve(c, m->n_outputs, sizeof(void *));
}

static plt_slot *slot_new(const plt_model *m) {
    plt_slot measure;
    plt_carver c = {0};
    carve_slot(m, &c, &measure);
    plt_slot *s = plt_allocate(&m->services, c.used);
    if (!s) return NULL;
    s->block_bytes = c.used;
    c = (plt_carver){.block = (char *)s};
    carve_slot(m, &c, s);
    return s;
}

int plt_frame_open(plt_model *m, plt_frame *f) {
    plt_enter(m);
    f->model = m;
    f->plan = NULL;
    f->file = -1;
    f->file_error = 0;
    atomic_fetch_add_explicit(&m->sequence, 1, memory_order_relaxed);
    f->slot = atomic_exchange(&m->spare, NULL);
    if (!f->slot) {
        plt_lock_take(&m->lock);
        f->slot = m->idle;
        if (f->slot) {
            m->idle = f->slot->next;
            m->n_idle--;
        }
        plt_lock_give(&m->lock);
    }
    if (!f->slot) f->slot = slot_new(m);
    return f->slot ? PLT_OK : PLT_ERR_MEMORY;
}

/* Row-major, ignoring strides of dims that have at most one element. */
static int check_layout(const plt_arg *a, int64_t *detail) {
    int64_t stride = 1;
    for (int64_t d = a->rank; d-- > 0;) {
        if (a->dims[d] < 0) {
            detail[1] = d;
            return PLT_ERR_LAYOUT;
        }
        if (a->dims[d] == 0) return PLT_OK;
    }
    for (int64_t d = a->rank; d-- > 0;) {
        if ((a->dims[d] != 1 && a->strides && a->strides[d] != stride) ||
            __builtin_mul_overflow(stride, a->dims[d], &stride)) {
            detail[1] = d;
            return PLT_ERR_LAYOUT;
        }
    }
    uintptr_t item = a->bits > 8 ? (uintptr_t)(a->bits + 7) / 8 : 1;
    if ((item & (item - 1)) == 0 && ((uintptr_t)a->data & (item - 1)) == 0 && a->data) {
        return PLT_OK;
    }
    detail[1] = -1;
    return PLT_ERR_LAYOUT;
}

static int check_tensor(const plt_input_desc *in, const plt_arg *a, int64_t *detail) {
    if (a->device != PLT_CPU) {
        return plt_mismatch(PLT_ERR_DEVICE, detail, PLT_CPU, a->device);
    }
    if (a->code != in->code || a->bits != in->bits || a->lanes != 1) {
        int64_t expected = 1 << 16 | in->code << 8 | in->bits;
        int64_t got = (int64_t)a->lanes << 16 | a->code << 8 | a->bits;
        return plt_mismatch(PLT_ERR_DTYPE, detail, expected, got);
    }
    if (a->rank != in->rank) {
        return plt_mismatch(PLT_ERR_RANK, detail, in->rank, a->rank);
    }
    return check_layout(a, detail);
}

static int check_args(plt_model *m, plt_slot *s, const plt_arg *args,
                      int64_t *detail) {
    int64_t *dims = s->dims;
    for (int64_t i = 0; i < m->n_inputs; i++) {
        const plt_input_desc *in = &m->inputs[i];
        const plt_arg *a = &args[i];
        detail[0] = i;
        if (a->kind != in->kind) {
            return plt_mismatch(PLT_ERR_KIND, detail, in->kind, a->kind);
        }
        if (in->kind == PLT_SCALAR) {
            *dims++ = a->value;
            s->inputs[i] = NULL;
            continue;
        }
        int status = check_tensor(in, a, detail);
        if (status != PLT_OK) return status;
        for (int32_t d = 0; d < in->rank; d++) *dims++ = a->dims[d];
        s->inputs[i] = a->data;
    }
    return PLT_OK;
}

/* With the lock held: idle arenas hold no more than the call now starting, and those
 * that no call has needed for a while hold nothing. */
static void shrink_idle(plt_model *m, int64_t need) {
    bool some = false;
    for (plt_slot *s = m->idle; s; s = s->next) {
        bool stale = m->sequence - s->last_used > PLT_IDLE_CALLS;
        int64_t before = s->arena.mapped;
        if (stale || s->arena.need > need) {
            plt_arena_shrink(&s->arena, &m->services, stale ? 0 : need);
            atomic_fetch_add(&m->arena_bytes, s->arena.mapped - before);
        }
        some |= s->arena.mapped > 0;
    }
    atomic_store(&m->idle_bytes, some);
}

int plt_frame_prepare(plt_model *m, plt_frame *f, const plt_arg *args,
                      int64_t *detail) {
    plt_slot *s = f->slot;
    int status = check_args(m, s, args, detail);
    if (status != PLT_OK) return status;
    status = plt_bound(m->bind(s->dims, s->symbols), detail);
    if (status != PLT_OK) return status;
    int64_t threads = atomic_load_explicit(&m->threads, memory_order_relaxed);
    s->symbols[m->n_symbols] = threads;
    s->symbols[m->n_symbols + 1] =
        atomic_load_explicit(&m->memory_limit, memory_order_relaxed);
    status = plt_find_plan(m, s, detail);
    if (status != PLT_OK) return status;

    const plt_entry *plan = f->plan = s->plan;
    int64_t before = s->arena.mapped;
    bool fitted = plt_arena_fit(&s->arena, &m->services, plan->arena_bytes);
    if (s->arena.mapped != before) {
        atomic_fetch_add(&m->arena_bytes, s->arena.mapped - before);
    }
    if (!fitted) {
        detail[0] = -1;
        detail[1] = plan->arena_bytes;
        return PLT_ERR_MEMORY;
    }
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
        .weights = m->weights,
        .threads = threads,
        .program = plan->program,
    };
    return PLT_OK;
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
    default: /* PLT_POISON: nobody reads it any more */
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

int plt_frame_run(plt_model *m, plt_frame *f, int64_t *detail) {
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

static void record_peak(plt_model *m, const plt_entry *plan) {
    const memory_order relaxed = memory_order_relaxed;
    atomic_store_explicit(&m->last_peak, plan->peak_bytes, relaxed);
    atomic_store_explicit(&m->last_arena, plan->arena_bytes, relaxed);
    atomic_store_explicit(&m->last_recomputed, plan->recomputed, relaxed);
    atomic_store_explicit(&m->last_spilled, plan->spilled, relaxed);
    int64_t most = atomic_load_explicit(&m->max_peak, relaxed);
    while (plan->peak_bytes > most &&
           !atomic_compare_exchange_weak(&m->max_peak, &most, plan->peak_bytes)) {
    }
}

void plt_frame_close(plt_model *m, plt_frame *f, int status) {
    _Atomic int64_t *counter = status == PLT_OK ? &m->calls : &m->failures;
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
    if (status == PLT_OK) record_peak(m, f->plan);
    if (!f->slot) return;
    f->slot->last_used = atomic_load_explicit(&m->sequence, memory_order_relaxed);
    int64_t need = f->slot->arena.need;
    plt_slot *other = atomic_exchange(&m->spare, f->slot), *excess = NULL;
    if (!other && !atomic_load_explicit(&m->idle_bytes, memory_order_relaxed)) return;
    plt_lock_take(&m->lock);
    if (other && m->n_idle < PLT_IDLE_SLOTS - 1) {
        other->next = m->idle;
        m->idle = other;
        m->n_idle++;
    } else {
        excess = other;
    }
    if (f->plan) shrink_idle(m, need);
    else atomic_store(&m->idle_bytes, true); /* the next call looks */
    plt_lock_give(&m->lock);
    if (excess) plt_slot_free(m, excess);
}

/* ---- calling without a framework ---- */

static int make_outputs(plt_model *m, plt_frame *f, plt_result *out) {
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
    }
    return PLT_OK;
}

void plt_result_free(plt_model *m, plt_result *r) {
    if (!r->outputs) return;
    size_t bytes = (size_t)r->n_outputs * sizeof(plt_output);
    for (int64_t i = 0; i < r->n_outputs; i++) {
        plt_release(&m->services, r->outputs[i].data, (size_t)r->outputs[i].bytes);
        bytes += (size_t)m->outputs[i].rank * sizeof(int64_t);
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
    int status = plt_frame_open(m, &f);
    if (status == PLT_OK) {
        status = plt_frame_prepare(m, &f, args, out->detail);
        if (status == PLT_OK) status = make_outputs(m, &f, out);
        if (status == PLT_OK) status = plt_frame_run(m, &f, out->detail);
    }
    plt_frame_close(m, &f, status);
    if (status != PLT_OK) plt_result_free(m, out);
    else memset(out->detail, 0, sizeof out->detail);
    return status;
}
