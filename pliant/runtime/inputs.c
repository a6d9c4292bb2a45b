/* The arguments of a call: checks them against the model's inputs, reads their sizes,
 * and copies those that are not row-major.
 *
 * A copy counts as memory of its call: it is planned from the strides before anything
 * is allocated, counted against the limit, and freed when the call ends. Inputs that a
 * step writes are never copied, because the result would be lost with the copy. */
#include "internal.h"

#include <string.h>

#define PLT_CPU 1    /* kDLCPU */
#define PLT_GRAIN 16384 /* elements that are worth a thread */

static int64_t item_bytes(const plt_arg *a) {
    return a->bits > 8 ? (a->bits + 7) / 8 : 1;
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
    uintptr_t item = (uintptr_t)item_bytes(a);
    if ((item & (item - 1)) == 0 && ((uintptr_t)a->data & (item - 1)) == 0 && a->data) {
        return PLT_OK;
    }
    detail[1] = -1;
    return PLT_ERR_LAYOUT;
}

/* The bytes of a row-major copy; false if no copy can be made. */
static bool copy_bytes(const plt_arg *a, int64_t *bytes) {
    *bytes = item_bytes(a);
    if (!a->data || a->rank > PLT_COPY_RANK) return false;
    for (int64_t d = 0; d < a->rank; d++) {
        if (a->dims[d] < 0 || __builtin_mul_overflow(*bytes, a->dims[d], bytes))
            return false;
    }
    return true;
}

static int check_tensor(const plt_input_desc *in, const plt_arg *a, int64_t *copied,
                        int64_t *detail) {
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
    int status = check_layout(a, detail);
    if (status == PLT_OK || in->written || !copy_bytes(a, copied)) return status;
    detail[1] = 0;
    return PLT_OK;
}

int plt_check_args(plt_model *m, plt_frame *f, const plt_arg *args, int64_t *detail) {
    plt_slot *s = f->slot;
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
        int64_t copied = 0;
        int status = check_tensor(in, a, &copied, detail);
        if (status != PLT_OK) return status;
        f->copied = plt_add_up(f->copied, copied);
        for (int32_t d = 0; d < in->rank; d++) *dims++ = a->dims[d];
        s->inputs[i] = a->data;
    }
    return PLT_OK;
}

/* ---- copies ---- */

typedef struct copying {
    const plt_arg *from;
    char *to;
    int64_t item, inner; /* bytes of an element, elements of a row */
} copying;

static void copy_row(char *to, const char *from, int64_t n, int64_t step,
                     int64_t item) {
    if (step == item) {
        memcpy(to, from, (size_t)(n * item));
        return;
    }
    switch (item) {
    case 1:
        for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
        break;
    case 2:
        for (int64_t i = 0; i < n; i++) memcpy(to + 2 * i, from + i * step, 2);
        break;
    case 4:
        for (int64_t i = 0; i < n; i++) memcpy(to + 4 * i, from + i * step, 4);
        break;
    case 8:
        for (int64_t i = 0; i < n; i++) memcpy(to + 8 * i, from + i * step, 8);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(to + item * i, from + i * step, (size_t)item);
    }
}

/* Rows [begin, end) of all but the last dim. */
static void copy_rows(void *p, int64_t begin, int64_t end, int64_t worker) {
    (void)worker;
    const copying *c = p;
    const plt_arg *a = c->from;
    int64_t last = a->rank - 1, step = a->strides ? a->strides[last] : 1;
    for (int64_t row = begin; row < end; row++) {
        int64_t rest = row, at = 0, stride = c->inner;
        for (int64_t d = last; d-- > 0;) {
            at += rest % a->dims[d] * (a->strides ? a->strides[d] : stride);
            rest /= a->dims[d];
            stride *= a->dims[d];
        }
        copy_row(c->to + row * c->inner * c->item, (const char *)a->data + at * c->item,
                 c->inner, step * c->item, c->item);
    }
}

static void copy_tensor(plt_call *call, const plt_arg *a, char *to, int64_t bytes) {
    copying c = {a, to, item_bytes(a), a->rank > 0 ? a->dims[a->rank - 1] : 1};
    if (a->rank == 0) {
        memcpy(to, a->data, (size_t)bytes);
        return;
    }
    int64_t rows = bytes / (c.item * c.inner);
    plt_parallel(call, copy_rows, &c, rows, PLT_GRAIN / c.inner + 1);
}

int plt_copy_args(plt_model *m, plt_frame *f, const plt_arg *args, int64_t *detail) {
    for (int64_t i = 0; f->copied > 0 && i < m->n_inputs; i++) {
        const plt_arg *a = &args[i];
        int64_t bytes = 0, ignored[3];
        if (m->inputs[i].kind == PLT_SCALAR || check_layout(a, ignored) == PLT_OK)
            continue;
        copy_bytes(a, &bytes);
        char *copy = plt_allocate_raw(&m->services, (size_t)bytes);
        if (!copy) {
            detail[0] = -1;
            detail[1] = bytes;
            return PLT_ERR_MEMORY;
        }
        plt_count(&f->meter, bytes);
        f->slot->copies[i] = copy;
        f->slot->copy_bytes[i] = bytes;
        f->slot->inputs[i] = copy;
        if (bytes > 0) copy_tensor(&f->call, a, copy, bytes);
    }
    return PLT_OK;
}

void plt_drop_copies(plt_slot *s) {
    for (int64_t i = 0; i < s->model->n_inputs; i++) {
        if (!s->copies[i]) continue;
        plt_release(&s->model->services, s->copies[i], (size_t)s->copy_bytes[i]);
        s->copies[i] = NULL;
    }
}
