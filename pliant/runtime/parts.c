/* A model in parts: what a part gives is memory of the call, and input of the next one.
 *
 * Each part has a slot of its own model, and all use one arena, that of the first slot:
 * it goes from part to part, resized to what each plan needs. */
#include "internal.h"

static int allocate_handed(plt_frame *f, int64_t *detail) {
    const plt_model *m = f->model;
    plt_slot *s = f->slot;
    s->hands_over = true;
    for (int64_t i = 0; i < m->n_outputs; i++) s->outputs[i] = NULL;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        int64_t bytes = 0;
        plt_output_bytes(&m->outputs[i], f->plan->table, &bytes);
        if ((uint64_t)bytes <= SIZE_MAX) {
            s->outputs[i] = plt_allocate_raw(&m->services, (size_t)bytes);
        }
        if (!s->outputs[i]) {
            detail[0] = -1;
            detail[1] = bytes;
            return PLT_ERR_MEMORY;
        }
        plt_count(&f->meter, bytes);
    }
    return PLT_OK;
}

static void drop_handed(plt_slot *s) {
    const plt_model *m = s->model;
    for (int64_t i = 0; s->hands_over && i < m->n_outputs; i++) {
        int64_t bytes = 0;
        plt_output_bytes(&m->outputs[i], s->plan->table, &bytes);
        plt_release(&m->services, s->outputs[i], (size_t)bytes);
        s->outputs[i] = NULL;
    }
    s->hands_over = false;
}

/* The inputs of the next part: those of this one as it read them, then its outputs. */
static void hand_over(const plt_model *m, const plt_slot *from, const plt_arg *args,
                      const plt_model *next, plt_arg *to) {
    for (int64_t i = 0; i < m->n_inputs; i++) {
        to[i] = args[i];
        to[i].data = from->inputs[i];
        to[i].strides = NULL; /* row-major now, if it was not */
    }
    for (int64_t i = 0; i < m->n_outputs; i++) {
        const plt_output_desc *o = &m->outputs[i];
        plt_arg *a = &to[m->n_inputs + i];
        *a = (plt_arg){
            .kind = next->inputs[m->n_inputs + i].kind,
            .rank = (int32_t)o->rank,
            .code = o->code,
            .bits = o->bits,
            .lanes = 1,
            .device = 1,
            .data = from->outputs[i],
            .dims = from->plan->table + o->dim_index,
        };
        if (a->kind == PLT_SCALAR) a->value = *(const int64_t *)a->data;
    }
}

int plt_advance(plt_frame *f, const plt_arg **args, int64_t *detail) {
    plt_model *m = f->model, *next = m->next;
    plt_slot *done = f->slot;
    int status = allocate_handed(f, detail);
    if (status == PLT_OK) status = plt_run_part(f, detail);
    if (status != PLT_OK) return status;
    plt_enter(next);
    plt_slot *s = plt_slot_take(next);
    if (!s) return PLT_ERR_MEMORY;
    f->handed = plt_add_up(f->handed, f->plan->output_bytes);
    f->meter.held -= plt_arena_held(&done->arena, &m->services);
    hand_over(m, done, *args, next, s->args);
    s->arena = done->arena;
    done->arena = (plt_arena){0};
    s->before = done;
    f->slot = s;
    f->model = next;
    f->part++;
    *args = s->args;
    return PLT_OK;
}

int plt_told(const plt_frame *f, int status, int64_t *detail) {
    if (status == PLT_OK || !f->root->next) return status;
    detail[PLT_PART] = f->part;
    int64_t count = 0;
    for (int64_t i = f->root->n_inputs; i < f->model->n_inputs; i++) {
        const plt_arg *a = &f->slot->args[i];
        if (a->kind != PLT_SCALAR || PLT_SIZES + count == PLT_DETAILS) continue;
        detail[PLT_SIZES + count++] = a->value;
    }
    detail[PLT_N_SIZES] = count;
    return status;
}

void plt_leave_parts(plt_frame *f) {
    while (f->slot->before) {
        plt_slot *s = f->slot, *before = s->before;
        before->arena = s->arena;
        s->arena = (plt_arena){0};
        s->before = NULL;
        drop_handed(s);
        plt_slot_leave(s, 0);
        f->slot = before;
    }
    drop_handed(f->slot);
}
