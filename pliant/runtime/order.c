/* The orders in which a model's steps may run, as tables by position. */
#include "internal.h"

bool plt_order_well_formed(const plt_model_desc *d) {
    int64_t n_objects = d->n_buffers + d->n_pinned;
    if (n_objects > INT32_MAX) return false;
    for (int64_t k = 0; k < d->n_steps; k++) {
        const plt_step_desc *s = &d->steps[k];
        if (s->first_touch < 0 || s->n_touches < 0) return false;
        if (s->first_touch > d->n_touches - s->n_touches) return false;
        if (s->flops_index < -1 || s->flops_index >= d->n_table) return false;
        if (s->bytes_index < -1 || s->bytes_index >= d->n_table) return false;
    }
    for (int64_t k = 0; k < d->n_touches; k++) {
        const plt_touch_desc *t = &d->touches[k];
        if (t->object < 0 || t->object >= n_objects) return false;
        if (t->flags < 1 || t->flags > 3) return false;
    }
    bool plain = false;
    for (int64_t k = 0; k < d->n_orders; k++) {
        const plt_order_desc *o = &d->orders[k];
        if (o->n_steps < 0 || o->n_steps > d->n_steps) return false;
        for (int64_t p = 0; p < o->n_steps; p++) {
            if (o->steps[p] < 0 || o->steps[p] >= d->n_steps) return false;
        }
        if (d->n_knobs < PLT_MOST_KNOBS && o->knobs >> d->n_knobs) return false;
        plain |= o->knobs == 0;
        for (int64_t b = 0; o->roots && b < d->n_buffers; b++) {
            int32_t root = o->roots[b];
            if (root < 0 || root >= d->n_buffers) return false;
            if (o->roots[root] != root) return false;
        }
    }
    return plain;
}

void plt_order_carve(plt_carver *c, plt_order *o, const plt_model_desc *d,
                     int64_t number) {
    int64_t n_objects = d->n_buffers + d->n_pinned;
    int64_t n_steps = d->orders[number].n_steps;
    o->steps = plt_carve(c, n_steps, sizeof *o->steps);
    o->roots = plt_carve(c, d->n_buffers, sizeof *o->roots);
    o->first_touch = plt_carve(c, n_steps + 1, sizeof *o->first_touch);
    o->touches = plt_carve(c, d->n_touches, sizeof *o->touches);
    o->first_use = plt_carve(c, n_objects + 1, sizeof *o->first_use);
    o->uses = plt_carve(c, d->n_touches, sizeof *o->uses);
    o->alone = plt_carve(c, n_objects, sizeof *o->alone);
}

/* Lists the distinct objects at each position; a buffer counts as its root. */
static int32_t fill_touches(plt_order *o, const plt_model_desc *d) {
    int32_t count = 0;
    for (int64_t p = 0; p < o->n_steps; p++) {
        const plt_step_desc *s = &d->steps[o->steps[p]];
        int32_t begin = o->first_touch[p] = count;
        for (int64_t k = 0; k < s->n_touches; k++) {
            plt_touch_desc t = d->touches[s->first_touch + k];
            int32_t x = t.object < d->n_buffers ? o->roots[t.object] : t.object;
            int32_t at = begin;
            while (at < count && o->touches[at].object != x) at++;
            if (at == count) o->touches[count++] = (plt_access){.object = x};
            o->touches[at].flags |= t.flags;
        }
    }
    o->first_touch[o->n_steps] = count;
    return count;
}

/* Whether no step comes twice, and no two steps share a touch, so that the touches of
 * the model are as many as an order can have. */
static bool are_apart(const plt_order *o, const plt_model_desc *d, int32_t *seen) {
    int64_t touches = 0;
    memset(seen, 0, (size_t)d->n_steps * sizeof *seen);
    for (int64_t p = 0; p < o->n_steps; p++) {
        if (seen[o->steps[p]]++) return false;
        touches += d->steps[o->steps[p]].n_touches;
        if (touches > d->n_touches) return false;
    }
    return true;
}

bool plt_order_fill(plt_order *o, const plt_model_desc *d, int64_t number,
                    int32_t *scratch) {
    const plt_order_desc *from = &d->orders[number];
    int64_t n_objects = d->n_buffers + d->n_pinned;
    o->n_steps = from->n_steps;
    o->knobs = from->knobs;
    plt_copy(o->steps, from->steps, o->n_steps, sizeof *o->steps);
    if (!are_apart(o, d, scratch)) return false;
    for (int64_t b = 0; b < d->n_buffers; b++) {
        o->roots[b] = from->roots ? from->roots[b] : (int32_t)b;
    }
    int32_t count = fill_touches(o, d);

    memset(o->first_use, 0, (size_t)(n_objects + 1) * sizeof *o->first_use);
    for (int32_t k = 0; k < count; k++) o->first_use[o->touches[k].object + 1]++;
    for (int64_t x = 0; x < n_objects; x++) {
        o->first_use[x + 1] += o->first_use[x];
        scratch[x] = o->first_use[x];
        o->alone[x] = true;
    }
    for (int32_t p = 0; p < o->n_steps; p++) {
        for (int32_t k = o->first_touch[p]; k < o->first_touch[p + 1]; k++) {
            plt_access *t = &o->touches[k];
            t->use = scratch[t->object]++;
            o->uses[t->use] = (plt_use){p, t->flags};
        }
    }
    for (int64_t x = 0; x < n_objects; x++) scratch[x] = (int32_t)o->n_steps;
    for (int64_t p = o->n_steps; p-- > 0;) {
        for (int32_t k = o->first_touch[p]; k < o->first_touch[p + 1]; k++) {
            plt_access *t = &o->touches[k];
            t->until = scratch[t->object];
            if (!(t->flags & PLT_WRITES)) continue;
            if (t->until < o->n_steps) o->alone[t->object] = false;
            scratch[t->object] = (int32_t)p;
        }
    }
    return true;
}

int32_t plt_next_use(const plt_order *o, int32_t x, int32_t position) {
    int32_t low = o->first_use[x], high = o->first_use[x + 1];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (o->uses[middle].position < position) low = middle + 1;
        else high = middle;
    }
    return low;
}
