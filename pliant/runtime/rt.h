/* The Pliant runtime, all that a compiled model needs at run time: argument checks, a
 * memory plan per call shape, one arena, a thread pool.
 *
 * Rules of this library
 *   - no dependency beyond libc and pthreads; no mutable globals;
 *   - the context (model, pool, call) is the first parameter of every function;
 *   - memory comes from plt_services, so a host can replace it; the arena is mapped
 *     pages unless PLT_FLAG_NO_MAP is set or the library is built with PLT_NO_MMAP;
 *   - PLT_NO_THREADS builds a serial runtime (wasm); PLT_NO_MMAP one without mmap,
 *     PLT_NO_FILES one that never spills.
 *
 * It deliberately knows nothing about operators, or devices other than the CPU.
 * Generated code sees only row-major tensors: other inputs are copied.
 * */
#ifndef PLT_RT_H
#define PLT_RT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define PLT_API __declspec(dllexport)
#else
#define PLT_API __attribute__((visibility("default")))
#endif

#define PLT_ABI_VERSION 10

/* ---- What generated code sees ------------------------------------------------- */

/* A pointer that takes eight bytes on every (little-endian) target. */
#if UINTPTR_MAX > 0xFFFFFFFFu
#define PLT_POINTER(type, name) type name
#else
#define PLT_POINTER(type, name) \
    union {                     \
        type name;              \
        uint64_t name##_word;   \
    }
#endif

/* One call: eleven fields of eight bytes; order and size are ABI. The arrays hold
 * pointers of the target's own size. */
typedef struct plt_call {
    PLT_POINTER(void *, pool);             /* 0 thread pool; NULL means serial */
    PLT_POINTER(char *, arena);            /* 1 64-byte aligned; NULL if empty */
    PLT_POINTER(const int64_t *, table);   /* 2 [n_table] the plan's expressions */
    PLT_POINTER(const int64_t *, offsets); /* 3 [n_buffers] bytes into the arena */
    PLT_POINTER(void *const *, inputs);    /* 4 [n_inputs] data; NULL for scalars */
    PLT_POINTER(void *const *, outputs);   /* 5 [n_outputs] data */
    PLT_POINTER(void *const *, weights);   /* 6 [n_weights] constants */
    int64_t threads;                       /* 7 workers available, at least 1 */
    int64_t status;                        /* 8 set positive to fail (PLT_ERR_RUN) */
    PLT_POINTER(const int64_t *, program); /* 9 what to do, in order */
    int64_t value;                         /* 10 the value that caused the status */
} plt_call;

/* Generated code goes through call->program: a number below n_steps is a step, anything
 * else is handed to plt_special, which returns non-zero when the run is over. */
PLT_API int64_t plt_special(plt_call *call, int64_t code);

typedef void (*plt_run_fn)(plt_call *call);

/* Evaluates the table. symbols has n_symbols entries, then the thread count, then the
 * n_knobs values of the knobs, each at least 1. Returns 0, or a positive number, defined
 * by the generated code, if a size overflows int64, is negative, or is too large for the
 * arithmetic of the kernels. Amounts of work (flops_index, bytes_index) that overflow
 * are negative instead. */
typedef int64_t (*plt_sizes_fn)(const int64_t *symbols, int64_t *table);

/* Solves the symbols from dims: the observed sizes of all inputs, flattened in order; a
 * scalar input contributes its value as one entry. Returns 0, 1 + the number of the
 * guard that failed, or a negative number, defined by the generated code, if a guard
 * overflows 64 bits. */
typedef int64_t (*plt_bind_fn)(const int64_t *dims, int64_t *symbols);

/* One chunk [begin, end) of a parallel region; worker is the chunk's number. */
typedef void (*plt_task)(void *args, int64_t begin, int64_t end, int64_t worker);

/* Runs fn over [0, units) in at most call->threads contiguous chunks of at least grain
 * units. Chunk boundaries and worker numbers depend on (units, grain, threads) alone:
 * whether the pool is free, busy or absent never changes a result. The caller takes
 * part as worker 0. A region inside a region runs serially over its own chunks. */
PLT_API void plt_parallel(plt_call *call, plt_task fn, void *args, int64_t units,
                          int64_t grain);

/* Nanoseconds of a monotonic clock, which profiled code reads around each kernel. */
PLT_API int64_t plt_clock(plt_call *call);

/* ---- Status ------------------------------------------------------------------- */

enum {                    /* detail[0], [1], [2] */
    PLT_OK = 0,           /* */
    PLT_ERR_COUNT = 1,    /* -, expected arguments, got */
    PLT_ERR_KIND = 2,     /* argument, expected plt_kind, got (-1: unknown object) */
    PLT_ERR_DTYPE = 3,    /* argument, expected lanes << 16 | code << 8 | bits, got */
    PLT_ERR_RANK = 4,     /* argument, expected rank, got */
    PLT_ERR_DEVICE = 5,   /* argument, expected DLPack device type, got */
    PLT_ERR_LAYOUT = 6,   /* argument, dim (-1: misaligned or no data), - */
    PLT_ERR_GUARD = 7,    /* guard number, -, - */
    PLT_ERR_LIMIT = 8,    /* 1: the budget's; least that can be reached, limit */
    PLT_ERR_OVERFLOW = 9, /* number, of which plt_overflow, - */
    PLT_ERR_MEMORY = 10,  /* output (-1: arena or plan), bytes wanted, - */
    PLT_ERR_RUN = 11,     /* call->status, call->value, - */
    PLT_ERR_CLOSED = 12,  /* the model is gone */
    PLT_ERR_MODEL = 13,   /* the description is malformed */
    PLT_ERR_SPILL = 14,   /* errno of the spill file, its bytes, 1: kernels had run */
    PLT_ERR_BUDGET = 15,  /* the budget, bytes wanted, bytes in use */
    PLT_ERR_INTERRUPTED = 16 /* services.poll returned not 0 */
};

/* What a call that fails tells, in int64_t[PLT_DETAILS]: three numbers as above, then
 * which part of the model failed, how many sizes its data have decided by then, and the
 * first of these sizes. */
enum { PLT_PART = 3, PLT_N_SIZES = 4, PLT_SIZES = 5, PLT_DETAILS = 32 };

/* The sizes of a call that may overflow 64 bits. */
enum plt_overflow {
    PLT_OVER_ALL = 0,    /* buffers and outputs together */
    PLT_OVER_BUFFER = 1, /* the bytes of a buffer, rounded up */
    PLT_OVER_OUTPUT = 2, /* the bytes of a result */
    PLT_OVER_TABLE = 3,  /* what plt_sizes_fn returned, less 1 */
    PLT_OVER_GUARD = 4   /* what plt_bind_fn returned, negated, less 1 */
};

/* ---- Services ----------------------------------------------------------------- */

typedef struct plt_pool plt_pool;
typedef struct plt_model plt_model;
typedef struct plt_budget plt_budget;

enum {
    PLT_FLAG_GUARD_PAGES = 1, /* the arena ends against a page that traps */
    PLT_FLAG_POISON = 2,      /* arena and outputs hold 0xFF (NaN) before each run */
    PLT_FLAG_NO_MAP = 4       /* the arena comes from allocate, not from mmap */
};

/* What the host program provides; copied at creation. NULL means the default. */
typedef struct plt_services {
    void *context; /* passed to allocate and release */
    void *(*allocate)(void *context, size_t bytes);        /* default malloc */
    void (*release)(void *context, void *p, size_t bytes); /* default free */
    plt_pool *pool; /* borrowed, must outlive the model; NULL: the model owns one */
    plt_budget *budget; /* borrowed, must outlive the model; NULL: none */
    int (*poll)(void);  /* polled by a waiting call: not 0 ends the wait */
    int64_t flags;
    int64_t idle_ns; /* arenas that idle so long go back; 0: never; of a budget's models */
    /* tvm-ffi, by address so that nothing is linked; used by plt_ffi_call only */
    void *ffi_env_allocator;  /* TVMFFIEnvGetDLPackManagedTensorAllocator */
    void *ffi_env_alloc;      /* TVMFFIEnvTensorAlloc */
    void *ffi_from_dlpack;    /* TVMFFITensorFromDLPackVersioned */
    void *ffi_function_call;  /* TVMFFIFunctionCall */
    void *ffi_object_decref;  /* TVMFFIObjectDecRef */
    void *ffi_take_error;     /* TVMFFIErrorMoveFromRaised */
    void *ffi_make_array;     /* function object "ffi.Array", borrowed */
    void *ffi_make_shape;     /* function object "ffi.Shape", borrowed */
    /* Threads of another library to run regions on, instead of the pool's own workers:
     * GOMP_parallel, omp_get_thread_num and omp_get_num_threads of the OpenMP library
     * that the framework uses. Its threads spin after each of their regions, so a
     * second set of workers would compete with them for the cores. Not used after a
     * fork. */
    void *team_parallel;
    void *team_number;
    void *team_size;
} plt_services;

/* ---- Thread pool -------------------------------------------------------------- */

/* Workers start when a region first needs them, and again after a fork. One pool may
 * serve many models: a region that finds it busy runs in its caller. */
PLT_API plt_pool *plt_pool_create(const plt_services *services);
PLT_API void plt_pool_destroy(plt_pool *pool); /* joins the workers */

/* ---- Budget ------------------------------------------------------------------- */

/* What the calls of all its models may hold together: arenas (those of calls that run,
 * and idle ones), results while their call runs, and copies of inputs.
 *
 * With services.idle_ns, a thread frees arenas of the budget's models that no call has
 * used for that long, and does so before twice that time has passed. It starts with the
 * first call that leaves a large arena, also after a fork, and sleeps while there is
 * none. */
PLT_API plt_budget *plt_budget_create(const plt_services *services);
PLT_API void plt_budget_destroy(plt_budget *budget); /* no model may use it any more */

/* A call that does not fit now waits for others to end, for wait_ns at most (0: not at
 * all, -1: as long as it takes). A limit of -1 is none. */
PLT_API void plt_budget_set(plt_budget *budget, int64_t limit, int64_t wait_ns);

typedef struct plt_budget_info {
    int64_t limit, wait_ns; /* as set */
    int64_t running;        /* bytes of calls that run */
    int64_t idle;           /* bytes of arenas between calls */
    int64_t waiting;        /* calls */
} plt_budget_info;

PLT_API void plt_budget_read(plt_budget *budget, plt_budget_info *out);

/* ---- Model -------------------------------------------------------------------- */

enum plt_kind { PLT_TENSOR = 0, PLT_SCALAR = 1 };

typedef struct plt_input_desc {
    int32_t kind; /* plt_kind */
    int32_t code; /* DLPack type code; unused for a scalar */
    int32_t bits;
    int32_t rank;
    int32_t written; /* by some step: never a copy */
} plt_input_desc;

/* Memory in the arena, live from the first step that touches it to the last. */
typedef struct plt_buffer_desc {
    int64_t size_index; /* table entry holding its size in bytes */
} plt_buffer_desc;

enum { PLT_READS = 1, PLT_WRITES = 2 };

/* A step's operand. Objects are the buffers, then n_pinned that are always in memory:
 * results, and inputs that some step writes. */
typedef struct plt_touch_desc {
    int32_t object;
    int32_t flags; /* PLT_READS | PLT_WRITES */
} plt_touch_desc;

typedef struct plt_step_desc {
    int64_t first_touch; /* its touches are [first_touch, first_touch + n_touches) */
    int64_t n_touches;
    int64_t flops_index; /* table entries of its work; -1: none */
    int64_t bytes_index;
    int64_t repeatable; /* may be run again: same operands, same results */
} plt_step_desc;

/* An order of some of the steps, each at most once, that computes all results. In it, a
 * buffer may share the memory of another one (its root, of the same size or larger),
 * whose value it overwrites. A buffer that none of its steps touches takes no memory. */
typedef struct plt_order_desc {
    int64_t n_steps;
    const int32_t *steps; /* [n_steps] */
    const int32_t *roots; /* [n_buffers], or NULL: each buffer is its own */
    uint64_t knobs;       /* bit k: its steps and their buffers depend on knob k */
} plt_order_desc;

#define PLT_MOST_KNOBS 64

/* A number that a plan chooses: how many rows a step that loops over chunks of rows
 * computes at a time. It is a multiple of `multiple`, or the whole extent. Fewer rows
 * take less memory and more time. */
typedef struct plt_knob_desc {
    int64_t extent_index; /* table entry of the rows to cut; depends on no knob */
    int64_t multiple;     /* at least 1 */
} plt_knob_desc;

typedef struct plt_output_desc {
    int32_t code;
    int32_t bits;
    int64_t rank;
    int64_t dim_index; /* its dims are table[dim_index .. dim_index + rank) */
} plt_output_desc;

/* A model whose data decide sizes is a chain of parts. The inputs of a part are those of
 * the part before it, then its outputs; an output that is a scalar input of the next
 * part is a size. All parts run in one call of the first one, under its limit and on its
 * threads, and the last one's outputs are the results. What a part hands over is memory
 * of the call until it ends. Only the last part may write inputs.
 *
 * The memory of a part is planned when its sizes are known. Before that, its `bound`
 * knows the most that it takes: a model that is planned and never run, with the same
 * buffers, steps and table, whose n_dims are the symbols of the first part, and whose
 * table holds for each buffer and each dim of an output the largest that it can be. A
 * plan that is larger than that of the bound is replaced by that one. */

/* Copied by plt_model_create; functions, weights and parts must outlive the model. */
typedef struct plt_model_desc {
    int64_t n_inputs;
    const plt_input_desc *inputs;
    int64_t n_symbols;
    int64_t n_table;
    int64_t n_buffers;
    const plt_buffer_desc *buffers;
    int64_t n_outputs;
    const plt_output_desc *outputs;
    int64_t n_weights;
    void *const *weights;
    plt_run_fn run;
    plt_sizes_fn sizes;
    plt_bind_fn bind;
    int64_t threads;       /* at least 1 */
    int64_t memory_limit;  /* bytes, -1: none */
    int64_t plan_capacity; /* plans kept; 0: 64 */
    int64_t n_pinned;
    int64_t n_steps;
    const plt_step_desc *steps;
    int64_t n_touches;
    const plt_touch_desc *touches;
    int64_t n_orders; /* at least 1 without knobs */
    const plt_order_desc *orders;
    int64_t n_knobs; /* at most PLT_MOST_KNOBS */
    const plt_knob_desc *knobs;
    /* What may be done to meet a limit: PLT_CAN_* */
    int64_t can;
    const char *spill_folder;        /* NULL: /tmp */
    double flops_per_second;         /* of one thread */
    double bytes_per_second;         /* of memory */
    double spill_bytes_per_second;   /* of the spill file, each way */
    plt_model *next;      /* the next part; NULL: none */
    plt_model *bound;     /* NULL: the first part */
    int64_t first_weight; /* among the weights of the first part, which has them all */
} plt_model_desc;

enum { PLT_CAN_RECOMPUTE = 1, PLT_CAN_SPILL = 2 };

/* NULL if the description is malformed or memory ran out. */
PLT_API plt_model *plt_model_create(const plt_model_desc *desc,
                                    const plt_services *services);
/* No call may be in flight. */
PLT_API void plt_model_destroy(plt_model *model);

/* A buffer that is evicted between two of its uses. */
typedef struct plt_eviction {
    int64_t buffer;
    int64_t action; /* PLT_CAN_RECOMPUTE or PLT_CAN_SPILL */
    int64_t after, before; /* the steps that use it last and next */
} plt_eviction;

typedef struct plt_plan_info {
    int64_t arena_bytes;  /* max(offset + size rounded up to 64) */
    int64_t output_bytes; /* sum of numel * itemsize */
    int64_t peak_bytes;   /* arena_bytes + output_bytes */
    int64_t lower_bound;  /* largest sum of live rounded sizes + output_bytes */
    int64_t n_buffers;
    int64_t order;            /* the one chosen */
    int64_t recomputed_steps; /* run again */
    int64_t spilled_bytes;    /* written to the spill file */
    int64_t extra_nanoseconds; /* that evictions cost, by the cost model */
    int64_t nanoseconds; /* of the whole call by the cost model: steps and evictions */
    int64_t n_evictions;
    int64_t detail[3];
    /* each is filled if the caller provides an array for it */
    int64_t *offsets; /* [n_buffers] */
    int64_t *sizes;   /* [n_buffers] exact bytes */
    int64_t *table;   /* [n_table] */
    int64_t *knobs;   /* [n_knobs] rows of a chunk; 0: the order does not use it */
    plt_eviction *evictions; /* [max_evictions] */
    int64_t max_evictions;
} plt_plan_info;

/* Plans without running and without touching the plan cache's order. A limit below 0
 * is none; a peak above it gives PLT_ERR_LIMIT with out filled. */
PLT_API int plt_plan(plt_model *model, const int64_t *symbols, int64_t limit,
                     plt_plan_info *out);

/* The smallest peak that any plan for these symbols reaches. */
PLT_API int plt_least(plt_model *model, const int64_t *symbols, int64_t *least);

/* Solves the symbols for these dims, as a call would: PLT_OK, or PLT_ERR_GUARD or
 * PLT_ERR_OVERFLOW with the guard's number in *guard. */
PLT_API int plt_bind(plt_model *model, const int64_t *dims, int64_t *symbols,
                     int64_t *guard);

/* The symbols of the last call that ended: PLT_OK, or PLT_ERR_COUNT if there is none or
 * another call runs. */
PLT_API int plt_last_symbols(plt_model *model, int64_t *symbols);

typedef struct plt_stats_info {
    int64_t calls;            /* that ran to the end */
    int64_t failures;         /* that did not */
    int64_t plans_made;
    int64_t plan_hits;
    int64_t plans_cached;
    int64_t arena_bytes;      /* mapped now, by all arenas of the model */
    int64_t last_peak_bytes;  /* allocated by the last call, as metered */
    int64_t last_planned_bytes; /* the same according to its plan */
    int64_t last_copied_bytes;  /* of its inputs that were not row-major */
    int64_t last_arena_bytes;
    int64_t max_peak_bytes;
    int64_t last_recomputed_steps;
    int64_t last_spilled_bytes;
} plt_stats_info;

/* Whether a folder is in memory (tmpfs), so that spilling there would save nothing. */
PLT_API int plt_folder_in_memory(const char *folder);

PLT_API void plt_stats(plt_model *model, plt_stats_info *out);
PLT_API void plt_trim(plt_model *model); /* gives back every idle arena and plan */
PLT_API int plt_set_limit(plt_model *model, int64_t limit); /* -1: none */
/* PLT_ERR_COUNT if below 1. */
PLT_API int plt_set_threads(plt_model *model, int64_t threads);

/* ---- Calling without a framework ---------------------------------------------- */

typedef struct plt_arg {
    int32_t kind; /* plt_kind */
    int32_t rank;
    int32_t code;
    int32_t bits;
    int32_t lanes;
    int32_t device;         /* DLPack device type; 1 is the CPU */
    int64_t value;          /* of a scalar */
    void *data;             /* of a tensor */
    const int64_t *dims;    /* [rank] */
    const int64_t *strides; /* [rank] in elements, or NULL for row-major */
} plt_arg;

typedef struct plt_output {
    void *data; /* 64-byte aligned */
    int64_t bytes;
    int64_t rank;
    const int64_t *dims; /* [rank] */
} plt_output;

typedef struct plt_result {
    int64_t detail[PLT_DETAILS];
    int64_t n_outputs;
    plt_output *outputs; /* [n_outputs], owned: plt_result_free */
} plt_result;

/* Checks, binds, plans, runs. On failure the result owns nothing. */
PLT_API int plt_invoke(plt_model *model, const plt_arg *args, int32_t n,
                       plt_result *out);
PLT_API void plt_result_free(plt_model *model, plt_result *result);

/* ---- Calling through tvm-ffi -------------------------------------------------- */

/* Gives a model and its next parts the functions of tvm-ffi, which were not known when
 * they were made. Before the first plt_ffi_call of the model. */
PLT_API void plt_use_ffi(plt_model *model, const plt_services *from);

/* A TVMFFISafeCallType. args[0] is the plt_model as an int, args[1] the address of the
 * pointers to its weights, or 0 for those it was made with; the rest its inputs. The
 * result is None, a tensor, or an Array of tensors; a failure is not an ffi error but a
 * Shape of the status and the detail, which no model returns. */
PLT_API int plt_ffi_call(void *self, const void *args, int32_t n, void *result);

/* ---- Machine code from a file ------------------------------------------------- */

typedef struct plt_image_pointer {
    int64_t place, target; /* image[place] becomes the address of image[target] */
} plt_image_pointer;

typedef struct plt_image_import {
    int64_t place; /* image[place] becomes the address */
    const void *address;
} plt_image_import;

/* The bytes are code, then data, both whole pages of 4096 bytes; places are multiples of
 * eight and lie in the data. */
typedef struct plt_image_desc {
    const void *bytes;
    int64_t code_bytes, data_bytes;
    int64_t n_pointers;
    const plt_image_pointer *pointers;
    int64_t n_imports;
    const plt_image_import *imports;
} plt_image_desc;

/* A copy of the image that can be run; NULL if the description is malformed, or the
 * system gives no such memory. */
PLT_API void *plt_image_map(const plt_image_desc *desc);
PLT_API void plt_image_unmap(void *image, int64_t bytes);

/* A sum that any change of one word changes, and any other change but one in 2**64. It
 * finds damage; it does not resist somebody who wants two contents of one sum. */
PLT_API uint64_t plt_checksum(const void *data, int64_t bytes);

PLT_API int64_t plt_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
