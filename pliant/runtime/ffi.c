/* The tvm-ffi entry: unpacks arguments, allocates outputs where the caller's framework
 * wants them, packs results. Every tvm-ffi function is reached by an address given in
 * plt_services, so this library links against none of it. */
#include "internal.h"
#include "tensor.h"

#include <string.h>
#include <tvm/ffi/c_api.h>

typedef DLPackManagedTensorAllocator (*env_allocator_fn)(void);
typedef int (*env_alloc_fn)(DLTensor *, TVMFFIObjectHandle *);
typedef int (*from_dlpack_fn)(DLManagedTensorVersioned *, int32_t, int32_t,
                              TVMFFIObjectHandle *);
typedef int (*function_call_fn)(TVMFFIObjectHandle, TVMFFIAny *, int32_t, TVMFFIAny *);
typedef int (*object_decref_fn)(TVMFFIObjectHandle);
typedef void (*take_error_fn)(TVMFFIObjectHandle *);

static DLTensor *tensor_of(TVMFFIObjectHandle object) {
    return (DLTensor *)((char *)object + sizeof(TVMFFIObject));
}

static void read_arg(const TVMFFIAny *any, plt_arg *a) {
    switch (any->type_index) {
    case kTVMFFITensor:
        plt_read_tensor(tensor_of(any->v_obj), a);
        break;
    case kTVMFFIDLTensorPtr:
        plt_read_tensor(any->v_ptr, a);
        break;
    case kTVMFFIInt:
    case kTVMFFIBool:
        a->kind = PLT_SCALAR;
        a->value = any->v_int64;
        break;
    default:
        a->kind = -1;
    }
}

static void drop(const plt_services *s, TVMFFIObjectHandle object) {
    if (object) ((object_decref_fn)s->ffi_object_decref)(object);
}

/* A failed ffi function leaves an error in thread-local storage; we report our own. */
static void drop_error(const plt_services *s) {
    TVMFFIObjectHandle error = NULL;
    if (s->ffi_take_error) ((take_error_fn)s->ffi_take_error)(&error);
    drop(s, error);
}

/* ---- outputs of our own, when no framework allocates ---- */

typedef struct own_tensor {
    DLManagedTensorVersioned managed;
    plt_services services; /* the tensor may outlive its model */
    size_t block_bytes;
    int64_t dims[]; /* [2 * ndim]: shape, then strides */
} own_tensor;

static void own_delete(DLManagedTensorVersioned *managed) {
    own_tensor *t = managed->manager_ctx;
    plt_services s = t->services;
    plt_release(&s, t, t->block_bytes);
}

static TVMFFIObjectHandle own_alloc(const plt_services *s, const DLTensor *like,
                                    int64_t bytes) {
    size_t rank = (size_t)like->ndim;
    size_t head = sizeof(own_tensor) + 2 * rank * sizeof(int64_t), total;
    head = (head + PLT_ALIGN - 1) & ~(size_t)(PLT_ALIGN - 1);
    if ((uint64_t)bytes > SIZE_MAX) return NULL;
    if (__builtin_add_overflow(head, (size_t)bytes, &total)) return NULL;
    own_tensor *t = plt_allocate_raw(s, total);
    if (!t) return NULL;
    memset(t, 0, head);
    t->services = *s;
    t->block_bytes = total;
    DLManagedTensorVersioned *managed = &t->managed;
    managed->version.major = DLPACK_MAJOR_VERSION;
    managed->version.minor = DLPACK_MINOR_VERSION;
    managed->manager_ctx = t;
    managed->deleter = own_delete;
    managed->dl_tensor = *like;
    managed->dl_tensor.data = (char *)t + head;
    managed->dl_tensor.shape = t->dims;
    managed->dl_tensor.strides = t->dims + rank;
    int64_t stride = 1;
    for (size_t d = rank; d-- > 0;) {
        t->dims[d] = like->shape[d];
        t->dims[rank + d] = stride;
        if (like->shape[d] > 1) stride *= like->shape[d];
    }
    TVMFFIObjectHandle out = NULL;
    if (((from_dlpack_fn)s->ffi_from_dlpack)(managed, 0, 0, &out) != 0) {
        drop_error(s);
        own_delete(managed);
        return NULL;
    }
    return out;
}

static TVMFFIObjectHandle env_alloc(const plt_services *s, DLTensor *like) {
    TVMFFIObjectHandle out = NULL;
    if (((env_alloc_fn)s->ffi_env_alloc)(like, &out) == 0) return out;
    drop_error(s);
    return NULL;
}

static int make_outputs(plt_frame *f, int64_t *detail) {
    const plt_model *m = f->model;
    const plt_services *s = &m->services;
    memset(f->slot->handles, 0, (size_t)m->n_outputs * sizeof(void *));
    bool framework = s->ffi_env_allocator && s->ffi_env_alloc &&
                     ((env_allocator_fn)s->ffi_env_allocator)() != NULL;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        const plt_output_desc *o = &m->outputs[i];
        int64_t bytes = 0;
        plt_output_bytes(o, f->plan->table, &bytes);
        DLTensor like = {
            .device = {kDLCPU, 0},
            .ndim = (int32_t)o->rank,
            .dtype = {(uint8_t)o->code, (uint8_t)o->bits, 1},
            .shape = (int64_t *)(f->plan->table + o->dim_index),
        };
        TVMFFIObjectHandle h =
            framework ? env_alloc(s, &like) : own_alloc(s, &like, bytes);
        if (!h) {
            detail[0] = i;
            detail[1] = bytes;
            return PLT_ERR_MEMORY;
        }
        DLTensor *t = tensor_of(h);
        plt_count(&f->meter, plt_tensor_bytes(t));
        f->slot->handles[i] = h;
        f->slot->outputs[i] = t->data ? (char *)t->data + t->byte_offset : NULL;
    }
    return PLT_OK;
}

static void drop_outputs(plt_frame *f) {
    const plt_model *m = f->model;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        drop(&m->services, f->slot->handles[i]);
        f->slot->handles[i] = NULL;
    }
}

/* ---- results ---- */

static void give_int(TVMFFIAny *result, int64_t value) {
    *result = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value};
}

/* Moves the outputs into the result. */
static int give_outputs(plt_frame *f, TVMFFIAny *result) {
    const plt_model *m = f->model;
    enum { ON_STACK = 16 };
    TVMFFIAny stack[ON_STACK], *views = stack;
    size_t bytes = (size_t)m->n_outputs * sizeof(TVMFFIAny);
    if (m->n_outputs == 0) return PLT_OK; /* the caller preset None */
    if (m->n_outputs > ON_STACK && !(views = plt_allocate(&m->services, bytes))) {
        return PLT_ERR_MEMORY;
    }
    for (int64_t i = 0; i < m->n_outputs; i++) {
        TVMFFIObject *object = f->slot->handles[i];
        views[i] = (TVMFFIAny){.type_index = kTVMFFITensor, .v_obj = object};
    }
    int status = PLT_OK;
    if (m->n_outputs == 1) {
        *result = views[0];
        f->slot->handles[0] = NULL;
    } else {
        const plt_services *s = &m->services;
        if (((function_call_fn)s->ffi_function_call)(s->ffi_make_array, views,
                                                     (int32_t)m->n_outputs, result)) {
            drop_error(s);
            status = PLT_ERR_MEMORY;
        }
        drop_outputs(f); /* the array holds its own references */
    }
    if (views != stack) plt_release(&m->services, views, bytes);
    return status;
}

static void give_failure(const plt_services *s, int status, const int64_t *detail,
                         TVMFFIAny *result) {
    TVMFFIAny parts[PLT_DETAILS];
    int32_t count = PLT_N_SIZES + (int32_t)detail[PLT_N_SIZES];
    give_int(&parts[0], status);
    for (int i = 0; i < count; i++) {
        give_int(&parts[i + 1], detail[i < PLT_N_SIZES ? i : i + 1]);
    }
    if (s->ffi_make_shape && ((function_call_fn)s->ffi_function_call)(
                                 s->ffi_make_shape, parts, count + 1, result) == 0) {
        return;
    }
    if (s->ffi_make_shape) drop_error(s);
    give_int(result, (int64_t)status << 32 | (uint32_t)detail[0]);
}

void plt_use_ffi(plt_model *m, const plt_services *from) {
    for (; m; m = m->next) {
        m->services.ffi_env_allocator = from->ffi_env_allocator;
        m->services.ffi_env_alloc = from->ffi_env_alloc;
        m->services.ffi_from_dlpack = from->ffi_from_dlpack;
        m->services.ffi_function_call = from->ffi_function_call;
        m->services.ffi_object_decref = from->ffi_object_decref;
        m->services.ffi_take_error = from->ffi_take_error;
        m->services.ffi_make_array = from->ffi_make_array;
        m->services.ffi_make_shape = from->ffi_make_shape;
    }
}

int plt_ffi_call(void *self, const void *packed, int32_t n, void *out) {
    (void)self;
    const TVMFFIAny *args = packed;
    TVMFFIAny *result = out;
    bool given = n > 0 && args[0].type_index == kTVMFFIInt && args[0].v_int64 != 0;
    if (!given) {
        give_int(result, (int64_t)PLT_ERR_CLOSED << 32);
        return 0;
    }
    plt_model *m = (plt_model *)(uintptr_t)args[0].v_int64;
    void *const *weights = NULL;
    if (n > 1 && args[1].type_index == kTVMFFIInt) {
        weights = (void *const *)(uintptr_t)args[1].v_int64;
    }
    int64_t detail[PLT_DETAILS];
    memset(detail, 0, PLT_SIZES * sizeof *detail);
    if (n - 2 != m->n_inputs) {
        detail[1] = m->n_inputs;
        detail[2] = n - 2;
        give_failure(&m->services, PLT_ERR_COUNT, detail, result);
        return 0;
    }
    plt_frame f;
    int status = plt_frame_open(m, &f, weights);
    if (status == PLT_OK) {
        for (int32_t i = 2; i < n; i++) read_arg(&args[i], &f.slot->args[i - 2]);
        status = plt_frame_prepare(&f, f.slot->args, detail);
        if (status == PLT_OK) {
            status = make_outputs(&f, detail);
            if (status == PLT_OK) status = plt_frame_run(&f, detail);
            if (status == PLT_OK) status = give_outputs(&f, result);
            if (status != PLT_OK) drop_outputs(&f);
        }
    }
    plt_frame_close(&f, status);
    if (status == PLT_ERR_INTERRUPTED) return -2; /* a Python exception is set */
    if (status != PLT_OK) give_failure(&m->services, status, detail, result);
    return 0;
}
