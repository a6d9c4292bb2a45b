/* Shared by the runtime's own files; not installed as an interface. */
#ifndef PLT_INTERNAL_H
#define PLT_INTERNAL_H

#include "rt.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#ifndef PLT_NO_THREADS
#include <pthread.h>
typedef pthread_mutex_t plt_lock;
#define plt_lock_init(l) pthread_mutex_init((l), NULL)
#define plt_lock_take(l) pthread_mutex_lock(l)
#define plt_lock_try(l) (pthread_mutex_trylock(l) == 0)
#define plt_lock_give(l) pthread_mutex_unlock(l)
#define plt_lock_destroy(l) pthread_mutex_destroy(l)
#else
typedef int plt_lock;
#define plt_lock_init(l) ((void)(*(l) = 0))
#define plt_lock_take(l) ((void)(l))
#define plt_lock_try(l) ((void)(l), true)
#define plt_lock_give(l) ((void)(l))
#define plt_lock_destroy(l) ((void)(l))
#endif

#define PLT_ALIGN 64
#define PLT_SMALL (1024 * 1024) /* an idle arena may keep so many bytes */

_Static_assert(sizeof(plt_call) == 11 * 8, "generated code relies on this layout");

/* ---- memory through the services ---- */
void plt_services_copy(plt_services *to, const plt_services *from);
void *plt_allocate_raw(const plt_services *s, size_t bytes); /* 64-byte aligned */
void *plt_allocate(const plt_services *s, size_t bytes);     /* the same, zeroed */
void plt_release(const plt_services *s, void *p, size_t bytes);

/* Rounds up to 64; false on overflow or a negative size. */
static inline bool plt_round(int64_t size, int64_t *out) {
    int64_t up;
    if (size < 0 || __builtin_add_overflow(size, PLT_ALIGN - 1, &up)) return false;
    *out = up & ~(int64_t)(PLT_ALIGN - 1);
    return true;
}

/* Carves typed arrays out of one block. A first pass, with a NULL block, only computes
 * the size of the block. */
typedef struct plt_carver {
    char *block;
    size_t used;
} plt_carver;

static inline void *plt_carve(plt_carver *c, int64_t count, size_t each) {
    size_t at = c->used;
    c->used += ((size_t)count * each + 7) & ~(size_t)7;
    return c->block ? c->block + at : NULL;
}

/* Fills in what was expected and what came; returns the status. */
static inline int plt_mismatch(int status, int64_t *detail, int64_t expected,
                               int64_t got) {
    detail[1] = expected;
    detail[2] = got;
    return status;
}

/* a + b, saturating at INT64_MAX: for amounts that are reported, not allocated. */
static inline int64_t plt_add_up(int64_t a, int64_t b) {
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* Converts the result of plt_bind_fn to a status with its detail[0] and [1]. */
static inline int plt_bound(int64_t failed, int64_t *detail) {
    if (failed == 0) return PLT_OK;
    detail[0] = failed > 0 ? failed - 1 : -(failed + 1);
    detail[1] = failed > 0 ? 0 : PLT_OVER_GUARD;
    return failed > 0 ? PLT_ERR_GUARD : PLT_ERR_OVERFLOW;
}

static inline void plt_copy(void *to, const void *from, int64_t count, size_t each) {
    if (count > 0) memcpy(to, from, (size_t)count * each);
}

/* ---- planner.c ---- */
typedef struct plt_interval {
    int64_t size; /* rounded */
    int64_t first, last;
} plt_interval;

/* Budget of comparisons for trying orders, at some ten nanoseconds each. */
#define PLT_PACK_EFFORT 200000

/* Fills offsets, *arena (the extent) and *bound (the lower bound from lifetimes). Stops
 * improving once the arena has `enough` bytes or less. */
int plt_pack(const plt_services *s, const plt_interval *intervals, int64_t n,
             int64_t enough, int64_t effort, int64_t *offsets, int64_t *arena,
             int64_t *bound);

/* ---- order.c ---- */
typedef struct plt_access {
    int32_t object;
    int32_t flags; /* PLT_READS | PLT_WRITES */
    int32_t until; /* the next position that writes the object; n_steps: none */
    int32_t use;   /* its index in the order's uses */
} plt_access;

typedef struct plt_use {
    int32_t position;
    int32_t flags;
} plt_use;

/* One order of the steps: the objects that each position touches, and the positions
 * that use each object. The gap between use k of an object and its use k + 1 has number
 * k. */
typedef struct plt_order {
    int64_t n_steps;
    uint64_t knobs;       /* those that its steps depend on */
    int32_t *steps;       /* [n_steps] */
    int32_t *roots;       /* [n_buffers] */
    int32_t *first_touch; /* [n_steps + 1] by position */
    plt_access *touches;  /* [n_touches] of distinct objects at each position */
    int32_t *first_use;   /* [n_objects + 1] */
    plt_use *uses;        /* [n_touches] of each object, by position */
    bool *alone;          /* [n_objects] at most one position writes it */
} plt_order;

bool plt_order_well_formed(const plt_model_desc *d);
void plt_order_carve(plt_carver *c, plt_order *o, const plt_model_desc *d,
                     int64_t number);
/* False if a step comes twice. scratch has room for n_objects numbers, and for the
 * model's n_steps. */
bool plt_order_fill(plt_order *o, const plt_model_desc *d, int64_t number,
                    int32_t *scratch);

/* ---- shape.c ---- */
#define PLT_LEVELS 64 /* the most: an extent has 63 bits */

/* The table for one setting of the knobs, and what follows from it. */
typedef struct plt_shape {
    int64_t *symbols; /* [n_symbols + 1 + n_knobs] for plt_sizes_fn */
    int64_t *rows;    /* [n_knobs] the last of them */
    int64_t *table;   /* [n_table] */
    int64_t *sizes;   /* [n_objects] rounded, of the roots' classes */
    double *costs;    /* [n_steps] nanoseconds */
    int64_t output_bytes;
    size_t block_bytes;
    char *block;
} plt_shape;

/* The shapes from which a plan is chosen, each evaluated when it is first needed. */
typedef struct plt_settings {
    struct plt_model *model;
    const int64_t *key;          /* symbols, threads, limit */
    plt_shape base;              /* every knob is 1 */
    plt_shape levels[PLT_LEVELS];
    int status[PLT_LEVELS];      /* of their evaluation */
    plt_shape trial;             /* any setting */
    plt_shape exact;             /* of the plan: its order's knobs, the others at 1 */
    uint8_t deepest[PLT_MOST_KNOBS]; /* the level at which each has its fewest rows */
    int64_t last;                    /* the largest of them */
} plt_settings;

/* Evaluates the base; fails where no plan can be made at all. To be freed in any case. */
int plt_settings_init(plt_settings *s, struct plt_model *m, const int64_t *key,
                      int64_t *detail);
void plt_settings_free(plt_settings *s);
/* The rows of a knob at a level: the extent over 2^level, rounded up, at least 1. */
int64_t plt_rows(const plt_settings *s, int64_t knob, int64_t level);
/* Both return PLT_ERR_OVERFLOW if the setting cannot be used. */
int plt_settings_level(plt_settings *s, int64_t level, const plt_shape **out);
/* Evaluates `trial` or `exact` with an order's knobs at these rows. */
int plt_settings_set(plt_settings *s, plt_shape *shape, const plt_order *order,
                     const int64_t *rows);
/* Nanoseconds of its steps. */
double plt_order_cost(const plt_order *order, const double *costs);

/* ---- walk.c ---- */
/* What happens to an object's memory in a gap. */
enum {
    PLT_KEEP,
    PLT_RECOMPUTE, /* freed; once recomputed, for whatever reason, it is kept */
    PLT_SPILL,     /* written to the file, read when needed */
    PLT_DROP       /* as RECOMPUTE, but freed again if recomputed only for others */
};

enum { PLT_CALL, PLT_WRITE_FILE, PLT_READ_FILE };

typedef struct plt_instruction {
    int32_t kind;
    int32_t number;  /* a step, or an object */
    int32_t storage; /* of the object */
    int32_t file;    /* of the object */
} plt_instruction;

/* An object's memory, or its place in the file, over instructions [first, last]. */
typedef struct plt_storage {
    int32_t object;
    int32_t first, last;
} plt_storage;

typedef struct plt_list {
    void *items;
    int64_t count, room;
    size_t each;
} plt_list;

/* The simulation of one run in an order, with evicted values recomputed or read
 * again. */
typedef struct plt_walk {
    const struct plt_model *model;
    const plt_order *order;
    const int64_t *sizes; /* [n_objects] rounded, of roots */
    const double *costs;  /* [n_steps] nanoseconds */
    uint8_t *modes;       /* [n_touches] by gap */
    /* by object */
    int32_t *open;    /* its storage now, or -1 */
    int32_t *current; /* its last use so far, or -1 */
    int32_t *mark;    /* == stamp: it is restored at this position */
    int32_t *near;    /* == stamp: recomputing others here needs it */
    int32_t *last;    /* the last of this position's instructions to touch it */
    int32_t *parent;  /* the object that it is restored for; itself: for the step */
    int32_t *file;    /* its file storage, or -1 */
    int32_t *stack;
    uint64_t *issued; /* [n_steps] bits by position */
    int32_t stamp, stamp_position;
    int64_t live;
    int32_t time; /* of the instruction under construction */
    int32_t stop; /* time at which to stop; -1: none */
    plt_list storages, instructions, files;
    /* results */
    int64_t peak;
    int32_t peak_time, peak_position;
    bool peak_at_step; /* the peak is at the step itself, not at a repeated one */
    int32_t culprit; /* gap that cannot be recomputed */
    double extra;    /* nanoseconds */
    int64_t recomputed, spilled;
    int64_t effort; /* spent, in touches */
    size_t block_bytes;
    char *block;
} plt_walk;

enum { PLT_WALK_DONE, PLT_WALK_STOPPED, PLT_WALK_ILLEGAL, PLT_WALK_MEMORY };

/* The caller sets order, sizes and costs. */
bool plt_walk_init(plt_walk *w, const struct plt_model *m);
void plt_walk_free(plt_walk *w);
int plt_walk_run(plt_walk *w, int32_t stop);
/* Nanoseconds to write x to the file, or to read it. */
double plt_spill_cost(const plt_walk *w, int32_t x);
/* The use of x at or after a position. */
int32_t plt_next_use(const plt_order *o, int32_t x, int32_t position);

/* ---- evict.c ---- */
/* An order, with the sizes and costs of a setting of its knobs. */
typedef struct plt_variant {
    const plt_shape *shape;
    int32_t order;
} plt_variant;

typedef struct plt_search {
    plt_walk *w;
    plt_settings *settings;
    plt_variant *variants; /* those to choose from */
    int64_t n_variants;
    int64_t until;         /* effort at which to stop */
    double ceiling;        /* nanoseconds of evictions at which to stop */
    uint8_t *banned;       /* [n_touches] the modes that a gap may not have */
    uint8_t *best_modes;   /* [n_touches] of the lowest peak seen */
    uint8_t *chosen_modes; /* [n_touches] */
    uint8_t *before_modes; /* [n_touches] saved, to undo a change */
    int64_t best_peak;
    int64_t least_kept; /* the smallest peak of all variants without evictions */
    struct plt_candidate *heap; /* [max(n_objects, n_touches)] */
    int32_t *listed;            /* positions in an estimate */
    size_t block_bytes;
    char *block;
} plt_search;

bool plt_search_init(plt_search *s, plt_walk *w, plt_settings *settings);
void plt_search_free(plt_search *s);
/* Evicts until the simulated peak is at most goal bytes. */
int plt_evict(plt_search *s, int64_t goal);
/* Undoes evictions that goal does not need, the most expensive first. */
int plt_keep_more(plt_search *s, int64_t goal);
/* Changes how values are evicted, and which, where that is cheaper and still fits. */
int plt_improve(plt_search *s, int64_t goal);

/* ---- remat.c ---- */
/* The choice; the walk has its order and modes, and has been run with them. */
typedef struct plt_choice {
    int32_t order;
    const plt_shape *shape; /* one of the settings */
    int64_t arena, bound; /* bytes */
    int64_t *offsets;     /* [storages] */
    size_t offsets_bytes;
} plt_choice;

/* The cheapest choice found whose arena fits the limit, or PLT_ERR_LIMIT. A limit below
 * 0 means no limit. */
int plt_choose(plt_walk *w, plt_settings *settings, int64_t limit, plt_choice *out);
/* The choice with the smallest arena. */
int plt_choose_least(plt_walk *w, plt_settings *settings, plt_choice *out);
void plt_choice_free(const plt_walk *w, plt_choice *c);
/* Makes the walk one of this variant, without evictions. */
void plt_start(plt_search *s, plt_variant v);
/* Packs the storages that the last walk found, in as little effort as gives `enough`
 * bytes. */
int plt_pack_walk(plt_walk *w, int64_t enough, int64_t effort, plt_choice *out);

/* ---- chunk.c ---- */
/* The cheapest setting of an order with knobs that fits without evictions, or
 * PLT_ERR_LIMIT. */
int plt_choose_chunks(plt_search *s, int64_t limit, plt_choice *out);

/* ---- arena.c ---- */
typedef struct plt_arena {
    char *base;     /* first byte a call may use, 64-byte aligned */
    char *map;      /* what was mapped or allocated */
    int64_t mapped; /* bytes of it */
    int64_t need;   /* of the plan it was last fitted to */
} plt_arena;

/* The bytes mapped or allocated for it, without the unused rest of the last page. */
int64_t plt_arena_held(const plt_arena *arena, const plt_services *s);
/* Makes the arena hold need bytes, in as few pages as possible. On failure it is
 * empty. */
bool plt_arena_fit(plt_arena *arena, const plt_services *s, int64_t need);
/* Frees all beyond need; never grows. */
void plt_arena_shrink(plt_arena *arena, const plt_services *s, int64_t need);

/* ---- plans.c ---- */
/* The kinds of operations that plt_special runs. */
enum { PLT_PLACE, PLT_TO_FILE, PLT_FROM_FILE, PLT_POISON };

typedef struct plt_extra {
    int64_t kind;
    int64_t object;
    int64_t offset; /* bytes into the arena */
    int64_t bytes;
    int64_t at; /* bytes into the file */
} plt_extra;

/* One shape's plan: a single block. The model's lock guards refs and links. */
typedef struct plt_entry {
    struct plt_entry *chain;         /* next in its hash bucket */
    struct plt_entry *newer, *older; /* recency list */
    int64_t refs;                    /* one by the table, and one by each slot */
    bool listed;                     /* in the table and in the recency list */
    uint64_t hash;
    size_t block_bytes;
    int64_t arena_bytes, output_bytes, peak_bytes, lower_bound;
    int64_t order, recomputed, spilled, extra_nanoseconds, nanoseconds;
    int64_t file_bytes; /* of the spill file */
    int64_t n_program, n_extras, n_evictions;
    int64_t *key;     /* [key_length] symbols, threads, limit */
    int64_t *table;   /* [n_table] */
    int64_t *knobs;   /* [n_knobs] rows; 0: not of its order */
    int64_t *offsets; /* [n_buffers] where each starts out */
    int64_t *program; /* [n_program] steps, n_steps + extra, and -1 at the end */
    plt_extra *extras;       /* [n_extras] */
    plt_eviction *evictions; /* [n_evictions] */
} plt_entry;

typedef struct plt_plans {
    int64_t capacity, count, key_length;
    uint64_t mask;
    plt_entry **buckets; /* [mask + 1] */
    plt_entry *newest, *oldest;
} plt_plans;

bool plt_plans_init(plt_plans *p, const plt_services *s, int64_t capacity,
                    int64_t key_length);
void plt_plans_destroy(plt_plans *p, const plt_services *s);
void plt_plans_clear(plt_plans *p, const plt_services *s);
/* Drops every entry without freeing any: for a child forked in mid-update. */
void plt_plans_forget(plt_plans *p);
uint64_t plt_plans_hash(const int64_t *key, int64_t length);
/* Both return an entry the caller holds a reference to, until plt_plans_drop. */
plt_entry *plt_plans_find(plt_plans *p, const int64_t *key, uint64_t hash);
plt_entry *plt_plans_insert(plt_plans *p, const plt_services *s, plt_entry *entry);
/* Drops a reference and marks the entry as the most recently used. */
void plt_plans_leave(plt_plans *p, const plt_services *s, plt_entry *entry);
void plt_plans_drop(const plt_services *s, plt_entry *entry);

/* ---- threads.c ---- */
/* Detects a fork and repairs the pool. Returns a number that each fork increments. */
uint32_t plt_pool_epoch(plt_pool *pool);

/* ---- meter ---- */
/* The bytes that a call has allocated from the system and from its framework, counted
 * at each allocation and independently of the plan. */
typedef struct plt_meter {
    int64_t held, peak;
} plt_meter;

static inline void plt_count(plt_meter *m, int64_t bytes) {
    m->held = plt_add_up(m->held, bytes);
    if (m->held > m->peak) m->peak = m->held;
}

/* ---- rt.c and call.c ---- */
#define PLT_RECENT 8 /* the last calls, which decide how much of an arena is kept */

/* What one call needs besides its plan; kept by the model between calls. */
typedef struct plt_slot {
    struct plt_slot *next;
    plt_arena arena;
    plt_entry *plan;   /* of its last call, held: most calls repeat a shape */
    int64_t last_used; /* the model's call number */
    int64_t counted;   /* bytes of its arena that the budget counts as idle */
    plt_model *model;
    struct plt_slot *before; /* of the part before, in the same call */
    bool hands_over;         /* its outputs are memory of the call */
    size_t block_bytes;
    plt_arg *args;    /* [n_inputs] for the caller's use */
    int64_t *dims;    /* [n_dims] */
    int64_t *symbols; /* [n_symbols + 2] then threads and limit: a plan's key */
    int64_t *offsets; /* [n_buffers] of a run that moves buffers */
    void **inputs;    /* [n_inputs] */
    void **copies;    /* [n_inputs] of inputs that are not row-major; else NULL */
    int64_t *copy_bytes; /* [n_inputs] of each */
    void **outputs;   /* [n_outputs] */
    void **handles;   /* [n_outputs] for the caller's use */
} plt_slot;

struct plt_model {
    struct plt_model *next, *bound; /* of a model in parts */
    int64_t first_weight;
    plt_services services;
    plt_pool *pool;
    bool owns_pool;
    plt_lock lock; /* guards plans, idle, n_idle */
    _Atomic uint32_t epoch;
    size_t block_bytes;
    int64_t n_inputs, n_dims, n_symbols, n_table, n_buffers, n_outputs, n_weights;
    int64_t n_pinned, n_objects, n_steps, n_touches, n_orders, n_knobs, can;
    plt_step_desc *steps;
    plt_order *orders;
    plt_knob_desc *knobs;
    char *spill_folder;
    double ns_per_flop, ns_per_byte, ns_per_spilled_byte;
    plt_input_desc *inputs;
    plt_buffer_desc *buffers;
    plt_output_desc *outputs;
    void **weights;
    plt_run_fn run;
    plt_sizes_fn sizes;
    plt_bind_fn bind;
    _Atomic int64_t threads, memory_limit;
    plt_plans plans;
    _Atomic(plt_slot *) spare; /* the first idle one; taken and left without the lock */
    plt_slot *idle;            /* more of them, most recently used first */
    int64_t n_idle;
    _Atomic bool idle_bytes; /* some of them has an arena */
    _Atomic int64_t sequence; /* number of the call that started last */
    _Atomic int64_t calls, failures, plans_made, plan_hits, arena_bytes;
    _Atomic int64_t last_peak, last_arena, max_peak, last_recomputed, last_spilled;
    _Atomic int64_t last_planned, last_copied;
    _Atomic int64_t recent[PLT_RECENT]; /* what arenas of the last calls held */
    _Atomic uint32_t recent_next;
    struct plt_model *next_in_budget;
    _Atomic int64_t left; /* how many calls have left their arena behind */
    /* Guarded by the budget's lock: how many had when the reaper last checked the
     * arenas, and when it last cut them. */
    int64_t left_then, left_cut;
};

typedef struct plt_frame {
    plt_model *root;  /* the first part: the model that was called */
    plt_model *model; /* the part that runs */
    int64_t part;     /* its number */
    plt_slot *slot;
    const plt_entry *plan; /* the slot's */
    void *const *weights;  /* of all parts */
    int file;        /* of spilled buffers; -1: not open */
    int file_error;  /* errno, 0: none */
    plt_meter meter;
    int64_t copied;   /* bytes of the inputs that are copied */
    int64_t handed;   /* bytes of what earlier parts hand over */
    int64_t reserved; /* bytes taken from the budget */
    /* over all parts so far: the largest plan and arena, and what was done to fit */
    int64_t planned, arena, recomputed, spilled;
    plt_call call;
} plt_frame;

/* ---- plan.c ---- */
int plt_make_plan(plt_model *m, const int64_t *key, plt_entry **out, int64_t *detail);

/* ---- spill.c ---- */
/* Creates the file and allocates the blocks that the plan needs. All three return false
 * and set frame->file_error if a system call fails. */
bool plt_spill_reserve(plt_frame *f);
bool plt_spill_write(plt_frame *f, const plt_extra *e);
bool plt_spill_read(plt_frame *f, const plt_extra *e);
void plt_spill_close(plt_frame *f);

/* ---- inputs.c ---- */
#define PLT_COPY_RANK 64
/* Fills slot->dims, slot->inputs, and f->copied: the bytes of the copies to make. */
int plt_check_args(plt_model *m, plt_frame *f, const plt_arg *args, int64_t *detail);
/* Copies the inputs that are not row-major, on the threads of f->call. */
int plt_copy_args(plt_model *m, plt_frame *f, const plt_arg *args, int64_t *detail);
void plt_drop_copies(plt_slot *s);

/* ---- budget.c; a budget may be NULL: no limit ---- */
void plt_budget_enter(plt_budget *b); /* detects that this is a forked child */
void plt_budget_join(plt_budget *b, plt_model *m);
void plt_budget_leave(plt_budget *b, plt_model *m);
int64_t plt_budget_limit(const plt_budget *b); /* -1: none */
/* Reserves the bytes of a call, the slot's arena included. Returns PLT_OK,
 * PLT_ERR_BUDGET or PLT_ERR_INTERRUPTED. */
int plt_budget_take(plt_budget *b, plt_model *m, plt_slot *slot, int64_t need,
                    int64_t *detail);
/* Reserves more bytes for a call that runs; PLT_ERR_BUDGET if they are not free now. */
int plt_budget_grow(plt_budget *b, plt_slot *slot, int64_t more, int64_t *detail);
void plt_budget_give(plt_budget *b, int64_t bytes);
/* Counts so many bytes of the slot's arena as idle. */
void plt_budget_idle(plt_model *m, plt_slot *slot, int64_t bytes);
/* A call of the model has ended: makes sure that a reaper watches the idle arena. */
void plt_budget_left(plt_model *m);
/* Cuts the arenas of models that have ended no call since the last check. Returns false
 * if no arena is left that may have to be cut. */
bool plt_budget_reap(plt_budget *b);

/* Cuts the arena of an idle slot to `keep` bytes. */
void plt_slot_cut(plt_model *m, plt_slot *slot, int64_t keep);
/* The same for all idle arenas of a model. */
void plt_cut_idle(plt_model *m, int64_t keep);

/* Called first by every entry point: detects that this is a forked child. */
void plt_enter(plt_model *m);
/* Makes slot->plan the plan for slot->symbols (symbols, threads, limit). */
int plt_find_plan(plt_model *m, plt_slot *slot, int64_t *detail);
/* The plan for a key, which the caller holds until plt_leave_plan. */
int plt_take_plan(plt_model *m, const int64_t *key, plt_entry **out, int64_t *detail);
void plt_leave_plan(plt_model *m, plt_entry *plan);
/* The plan of a part's bound, for the first part's symbols. */
int plt_take_bound(plt_model *m, const int64_t *symbols, int64_t threads, int64_t limit,
                   plt_entry **out);
void plt_slot_free(plt_model *m, plt_slot *slot);

/* A call in steps, because plt_invoke and plt_ffi_call allocate outputs differently.
 * detail: [PLT_DETAILS]. */
/* Takes a slot. Without weights, the model's own are used. */
int plt_frame_open(plt_model *m, plt_frame *f, void *const *weights);
/* Runs all parts but the last. args: [n_inputs] */
int plt_frame_prepare(plt_frame *f, const plt_arg *args, int64_t *detail);
/* Writes to slot->outputs, the outputs of f->model, which the caller has allocated. */
int plt_frame_run(plt_frame *f, int64_t *detail);
void plt_frame_close(plt_frame *f, int status);
/* An idle slot, or a new one; NULL if there is no memory. */
plt_slot *plt_slot_take(plt_model *m);
/* Returns a slot to the idle ones. `need` is what its call needed, or -1. */
void plt_slot_leave(plt_slot *slot, int64_t need);
/* Runs the frame's part. */
int plt_run_part(plt_frame *f, int64_t *detail);

/* ---- parts.c ---- */
/* Runs a part that is not the last, and makes the next one the frame's, with the arena.
 * Returns the arguments of the next one in *args. */
int plt_advance(plt_frame *f, const plt_arg **args, int64_t *detail);
/* Adds which part of a model failed, and the sizes that data had decided by then;
 * returns the status. */
int plt_told(const plt_frame *f, int status, int64_t *detail);
/* Returns the slots of later parts; the first part's slot gets the arena back. */
void plt_leave_parts(plt_frame *f);

/* ---- arena.c ---- */
/* Populates the pages of a large block at once, with huge pages where possible: this
 * costs a quarter of the time that as many page faults take. */
void plt_touch(plt_call *call, void *data, int64_t bytes);
bool plt_output_bytes(const plt_output_desc *o, const int64_t *table, int64_t *bytes);

#endif
