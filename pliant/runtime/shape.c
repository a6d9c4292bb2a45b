/* The sizes and costs of one call shape, under settings of the knobs.
 *
 * A level is a setting of all knobs: at level j, a chunk has the rows of its extent over
 * 2^j, rounded up to what the knob asks for. The table is evaluated once for a level,
 * for all orders, because an order depends on none but its own knobs; the plan's table
 * is evaluated with all others at 1. */
#include "internal.h"

#define PLT_STEP_NS 500.0 /* fixed cost of any step */

bool plt_output_bytes(const plt_output_desc *o, const int64_t *table, int64_t *bytes) {
    int64_t n = 1;
    bool empty = false;
    for (int64_t d = 0; d < o->rank; d++) {
        int64_t dim = table[o->dim_index + d];
        if (dim < 0) return false;
        if (dim == 0) empty = true;
        else if (__builtin_mul_overflow(n, dim, &n)) return false;
    }
    if (empty) n = 0;
    if (o->bits % 8 == 0) return !__builtin_mul_overflow(n, o->bits / 8, bytes);
    if (__builtin_mul_overflow(n, o->bits, &n)) return false;
    if (__builtin_add_overflow(n, 7, &n)) return false;
    *bytes = n / 8;
    return true;
}

static void carve_shape(const plt_model *m, plt_carver *c, plt_shape *s) {
    s->symbols = plt_carve(c, m->n_symbols + 1 + m->n_knobs, sizeof(int64_t));
    s->table = plt_carve(c, m->n_table, sizeof(int64_t));
    s->sizes = plt_carve(c, m->n_objects, sizeof(int64_t));
    s->costs = plt_carve(c, m->n_steps, sizeof(double));
}

static double amount(const int64_t *table, int64_t index, double each) {
    if (index < 0) return 0;
    int64_t count = table[index];
    return each * (double)(count < 0 ? INT64_MAX : count); /* < 0: it overflowed */
}

static int overflow(int64_t *detail, int64_t of, int64_t number) {
    detail[0] = number;
    detail[1] = of;
    return PLT_ERR_OVERFLOW;
}

/* Fills in sizes, costs and the bytes of the results. */
static int measure(const plt_model *m, plt_shape *s, int64_t *detail) {
    int64_t wrong = m->sizes(s->symbols, s->table), sum = 0;
    if (wrong != 0) return overflow(detail, PLT_OVER_TABLE, wrong - 1);
    for (int64_t i = 0; i < m->n_buffers; i++) {
        if (!plt_round(s->table[m->buffers[i].size_index], &s->sizes[i])) {
            return overflow(detail, PLT_OVER_BUFFER, i);
        }
        if (__builtin_add_overflow(sum, s->sizes[i], &sum)) {
            return overflow(detail, PLT_OVER_ALL, -1);
        }
    }
    s->output_bytes = 0;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        int64_t bytes;
        if (!plt_output_bytes(&m->outputs[i], s->table, &bytes)) {
            return overflow(detail, PLT_OVER_OUTPUT, i);
        }
        if (__builtin_add_overflow(s->output_bytes, bytes, &s->output_bytes)) {
            return overflow(detail, PLT_OVER_ALL, -1);
        }
    }
    /* From here on no sum of sizes that live together can overflow. */
    if (__builtin_add_overflow(sum, s->output_bytes, &sum)) {
        return overflow(detail, PLT_OVER_ALL, -1);
    }
    double threads = (double)s->symbols[m->n_symbols];
    for (int64_t k = 0; k < m->n_steps; k++) {
        const plt_step_desc *step = &m->steps[k];
        double flops = amount(s->table, step->flops_index, m->ns_per_flop) / threads;
        double bytes = amount(s->table, step->bytes_index, m->ns_per_byte);
        double cost = (flops > bytes ? flops : bytes) + PLT_STEP_NS;
        /* whole nanoseconds: their sum is the same in every order of the steps */
        s->costs[k] = cost < 9e15 ? (double)(int64_t)cost : cost;
    }
    return PLT_OK;
}

/* Evaluates the table with these rows, into a shape that may have been used before. */
static int evaluate(plt_settings *s, plt_shape *shape, const int64_t *rows,
                    int64_t *detail) {
    const plt_model *m = s->model;
    if (!shape->block) {
        plt_carver c = {0};
        carve_shape(m, &c, shape);
        shape->block_bytes = c.used;
        detail[0] = -1;
        shape->block = plt_allocate(&m->services, c.used);
        if (!shape->block) return PLT_ERR_MEMORY;
        c = (plt_carver){.block = shape->block};
        carve_shape(m, &c, shape);
        plt_copy(shape->symbols, s->key, m->n_symbols + 1, sizeof *s->key);
        shape->rows = shape->symbols + m->n_symbols + 1;
    }
    plt_copy(shape->rows, rows, m->n_knobs, sizeof *rows);
    return measure(m, shape, detail);
}

/* Only the base may fail: another setting that overflows is one that does not fit. */
static int evaluate_setting(plt_settings *s, plt_shape *shape, const int64_t *rows) {
    int64_t detail[3];
    int status = evaluate(s, shape, rows, detail);
    if (status == PLT_OK && shape->output_bytes != s->base.output_bytes) {
        status = PLT_ERR_MODEL;
    }
    return status;
}

/* The first level at which a knob has its fewest rows. */
static uint8_t deepest(int64_t extent, int64_t multiple) {
    uint8_t level = 0;
    for (; extent > multiple; extent -= extent / 2) level++;
    return level;
}

int plt_settings_init(plt_settings *s, plt_model *m, const int64_t *key,
                      int64_t *detail) {
    *s = (plt_settings){.model = m, .key = key};
    int64_t rows[PLT_MOST_KNOBS];
    for (int64_t k = 0; k < m->n_knobs; k++) rows[k] = 1;
    int status = evaluate(s, &s->base, rows, detail);
    for (int64_t k = 0; status == PLT_OK && k < m->n_knobs; k++) {
        int64_t extent = s->base.table[m->knobs[k].extent_index];
        s->deepest[k] = deepest(extent, m->knobs[k].multiple);
        if (s->deepest[k] > s->last) s->last = s->deepest[k];
    }
    return status;
}

void plt_settings_free(plt_settings *s) {
    const plt_services *services = &s->model->services;
    plt_shape *single[] = {&s->base, &s->trial, &s->exact};
    for (size_t k = 0; k < sizeof single / sizeof *single; k++) {
        plt_release(services, single[k]->block, single[k]->block_bytes);
    }
    for (int64_t j = 0; j < PLT_LEVELS; j++) {
        plt_release(services, s->levels[j].block, s->levels[j].block_bytes);
    }
}

int64_t plt_rows(const plt_settings *s, int64_t knob, int64_t level) {
    const plt_knob_desc *k = &s->model->knobs[knob];
    int64_t extent = s->base.table[k->extent_index], rows = extent, up;
    for (; level > 0 && rows > 1; level--) rows -= rows / 2;
    int64_t rest = rows % k->multiple;
    if (__builtin_add_overflow(rows, rest ? k->multiple - rest : 0, &up)) up = extent;
    if (up > extent) up = extent;
    return up > 1 ? up : 1;
}

int plt_settings_level(plt_settings *s, int64_t level, const plt_shape **out) {
    plt_shape *shape = &s->levels[level];
    *out = shape;
    if (shape->block) return s->status[level];
    int64_t rows[PLT_MOST_KNOBS];
    for (int64_t k = 0; k < s->model->n_knobs; k++) rows[k] = plt_rows(s, k, level);
    return s->status[level] = evaluate_setting(s, shape, rows);
}

int plt_settings_set(plt_settings *s, plt_shape *shape, const plt_order *order,
                     const int64_t *rows) {
    int64_t own[PLT_MOST_KNOBS];
    for (int64_t k = 0; k < s->model->n_knobs; k++) {
        own[k] = order->knobs >> k & 1 ? rows[k] : 1;
    }
    return evaluate_setting(s, shape, own);
}

double plt_order_cost(const plt_order *order, const double *costs) {
    double sum = 0;
    for (int64_t p = 0; p < order->n_steps; p++) sum += costs[order->steps[p]];
    return sum;
}
