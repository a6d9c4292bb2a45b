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

_Static_assert(sizeof(plt_call) == 9 * 8, "generated code relies on this layout");

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

/* Carves typed arrays out of one block: a first pass with a NULL block adds up. */
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

static inline void plt_copy(void *to, const void *from, int64_t count, size_t each) {
    if (count > 0) memcpy(to, from, (size_t)count * each);
}

/* ---- planner.c ---- */
typedef struct plt_interval {
    int64_t size; /* rounded */
    int64_t first, last;
} plt_interval;

/* Fills offsets, *arena (the extent) and *bound (the live lower bound). */
int plt_pack(const plt_services *s, const plt_interval *intervals, int64_t n,
             int64_t *offsets, int64_t *arena, int64_t *bound);

/* ---- arena.c ---- */
typedef struct plt_arena {
    char *base;     /* first byte a call may use, 64-byte aligned */
    char *map;      /* what was mapped or allocated */
    int64_t mapped; /* bytes of it */
    int64_t need;   /* of the plan it was last fitted to */
} plt_arena;

/* Makes the arena hold need bytes and no page more. On failure it is empty. */
bool plt_arena_fit(plt_arena *arena, const plt_services *s, int64_t need);
/* Gives back what lies beyond need; never grows. */
void plt_arena_shrink(plt_arena *arena, const plt_services *s, int64_t need);

/* ---- plans.c ---- */
/* One shape's plan: a single block. refs and links belong to the model's lock. */
typedef struct plt_entry {
    struct plt_entry *chain;         /* next in its hash bucket */
    struct plt_entry *newer, *older; /* recency list */
    int64_t refs;                    /* the table's own, plus one per call using it */
    uint64_t hash;
    size_t block_bytes;
    int64_t arena_bytes, output_bytes, peak_bytes, lower_bound;
    int64_t *key;     /* [key_length] symbols, then threads */
    int64_t *table;   /* [n_table] */
    int64_t *offsets; /* [n_buffers] */
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
/* Both return an entry the caller holds a reference to. */
plt_entry *plt_plans_find(plt_plans *p, const int64_t *key, uint64_t hash);
plt_entry *plt_plans_insert(plt_plans *p, const plt_services *s, plt_entry *entry);
void plt_plans_drop(const plt_services *s, plt_entry *entry);

/* ---- threads.c ---- */
/* Notices a fork and repairs the pool; the number grows by one with each fork. */
uint32_t plt_pool_epoch(plt_pool *pool);

/* ---- rt.c and call.c ---- */
/* What one call needs besides its plan; kept by the model between calls. */
typedef struct plt_slot {
    struct plt_slot *next;
    plt_arena arena;
    int64_t last_used; /* the model's call number */
    size_t block_bytes;
    plt_arg *args;    /* [n_inputs] */
    int64_t *dims;    /* [n_dims] */
    int64_t *symbols; /* [n_symbols + 1] */
    void **inputs;    /* [n_inputs] */
    void **outputs;   /* [n_outputs] */
    void **handles;   /* [n_outputs] for the caller's use */
} plt_slot;

struct plt_model {
    plt_services services;
    plt_pool *pool;
    bool owns_pool;
    plt_lock lock; /* guards plans, idle, n_idle, sequence */
    _Atomic uint32_t epoch;
    size_t block_bytes;
    int64_t n_inputs, n_dims, n_symbols, n_table, n_buffers, n_outputs, n_weights;
    plt_input_desc *inputs;
    plt_buffer_desc *buffers;
    plt_output_desc *outputs;
    void **weights;
    plt_run_fn run;
    plt_sizes_fn sizes;
    plt_bind_fn bind;
    _Atomic int64_t threads, memory_limit;
    plt_plans plans;
    plt_slot *idle; /* most recently used first */
    int64_t n_idle;
    int64_t sequence;
    _Atomic int64_t calls, failures, plans_made, plan_hits, arena_bytes;
    _Atomic int64_t last_peak, last_arena, max_peak;
};

typedef struct plt_frame {
    plt_slot *slot;
    plt_entry *plan;
    plt_call call;
} plt_frame;

/* First thing in every entry: notices that this is a forked child. */
void plt_enter(plt_model *m);
/* The plan for key (symbols, then threads), with a reference for the caller. */
int plt_find_plan(plt_model *m, const int64_t *key, plt_entry **out, int64_t *detail);
void plt_slot_free(plt_model *m, plt_slot *slot);

/* A call in parts, as plt_invoke and plt_ffi_call allocate outputs in their own way. */
int plt_frame_open(plt_model *m, plt_frame *f); /* takes a slot */
/* Reads slot->args, as the caller filled them in. */
int plt_frame_prepare(plt_model *m, plt_frame *f, int64_t *detail);
/* Writes to slot->outputs, as the caller allocated them. */
int plt_frame_run(plt_model *m, plt_frame *f, int64_t *detail);
void plt_frame_close(plt_model *m, plt_frame *f, int status);
/* Makes the pages of a large block present at once, which costs about half of what as
 * many page faults cost. */
void plt_touch(plt_call *call, void *data, int64_t bytes);
bool plt_output_bytes(const plt_output_desc *o, const int64_t *table, int64_t *bytes);

#endif
