/* Calls with NumPy's arrays, which are read and made through Python's buffer protocol,
 * so that they need no other package. */
#include "python.h"

#include <string.h>

#define PLT_MOST_RANK 64 /* as plt_model_create takes */

/* ---- element types ---- */

/* The buffer protocol's letter for a DLPack type; NULL if it has none. */
static const char *letter_of(int32_t code, int32_t bits) {
    switch (code << 8 | bits) {
    case kDLFloat << 8 | 16: return "e";
    case kDLFloat << 8 | 32: return "f";
    case kDLFloat << 8 | 64: return "d";
    case kDLInt << 8 | 8: return "b";
    case kDLInt << 8 | 16: return "h";
    case kDLInt << 8 | 32: return "i";
    case kDLInt << 8 | 64: return "q";
    case kDLUInt << 8 | 8: return "B";
    case kDLUInt << 8 | 16: return "H";
    case kDLUInt << 8 | 32: return "I";
    case kDLUInt << 8 | 64: return "Q";
    case kDLBool << 8 | 8: return "?";
    default: return NULL;
    }
}

/* In front of a letter: this machine's order of bytes, whether or not it is aligned. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define PLT_NATIVE "@=^<"
#else
#define PLT_NATIVE "@=^>!"
#endif

/* The DLPack type of a buffer's elements; false if there is none. */
static bool read_type(const Py_buffer *b, plt_arg *a) {
    const char *format = b->format ? b->format : "B";
    if (format[0] && strchr(PLT_NATIVE, format[0])) format++;
    if (!format[0] || format[1]) return false;
    if (strchr("efd", format[0])) a->code = kDLFloat;
    else if (strchr("bhilq", format[0])) a->code = kDLInt;
    else if (strchr("BHILQ", format[0])) a->code = kDLUInt;
    else if (format[0] == '?') a->code = kDLBool;
    else return false;
    a->bits = (int32_t)(8 * b->itemsize);
    a->lanes = 1;
    return true;
}

/* ---- results ---- */

/* A result's memory, which the array that is made of it keeps alive. */
typedef struct memory {
    PyObject_HEAD
    plt_services services; /* it may outlive its model */
    void *data;
    size_t bytes;
    Py_ssize_t item;
    const char *letter;
    int rank;
    Py_ssize_t shape[PLT_MOST_RANK], strides[PLT_MOST_RANK];
} memory;

static int memory_buffer(PyObject *self, Py_buffer *view, int flags) {
    memory *m = (memory *)self;
    (void)flags; /* row-major and writable: it is whatever may be asked for */
    *view = (Py_buffer){
        .buf = m->data,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)m->bytes,
        .itemsize = m->item,
        .ndim = m->rank,
        .format = (char *)m->letter,
        .shape = m->shape,
        .strides = m->strides,
    };
    return 0;
}

static void memory_dealloc(PyObject *self) {
    memory *m = (memory *)self;
    PyTypeObject *type = Py_TYPE(self);
    plt_release(&m->services, m->data, m->bytes);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "A result of a model: numpy.asarray makes an array of it."},
    {Py_bf_getbuffer, memory_buffer},
    {Py_tp_dealloc, memory_dealloc},
    {0},
};

PyType_Spec plt_memory_spec = {
    .name = "pliant.runtime._plt.ResultMemory",
    .basicsize = sizeof(memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots,
};

static void drop_outputs(plt_frame *f) {
    const plt_model *m = f->model;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        int64_t bytes = 0;
        plt_output_bytes(&m->outputs[i], f->plan->table, &bytes);
        plt_release(&m->services, f->slot->handles[i], (size_t)bytes);
        f->slot->handles[i] = NULL;
    }
}

static int make_outputs(plt_frame *f, int64_t *detail) {
    const plt_model *m = f->model;
    memset(f->slot->handles, 0, (size_t)m->n_outputs * sizeof(void *));
    for (int64_t i = 0; i < m->n_outputs; i++) {
        int64_t bytes = 0;
        plt_output_bytes(&m->outputs[i], f->plan->table, &bytes);
        void *data = plt_allocate_raw(&m->services, (size_t)bytes);
        if (!data) {
            drop_outputs(f);
            detail[0] = i;
            detail[1] = bytes;
            return PLT_ERR_MEMORY;
        }
        plt_count(&f->meter, bytes);
        f->slot->handles[i] = f->slot->outputs[i] = data;
    }
    return PLT_OK;
}

/* Output i as an object; consumes its memory. */
static PyObject *give_output(PyTypeObject *type, plt_frame *f, int64_t i) {
    const plt_model *m = f->model;
    const plt_output_desc *o = &m->outputs[i];
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    memory *made = (memory *)make(type, 0);
    if (!made) return NULL;
    int64_t bytes = 0;
    plt_output_bytes(o, f->plan->table, &bytes);
    made->services = m->services;
    made->data = f->slot->handles[i];
    f->slot->handles[i] = NULL;
    made->bytes = (size_t)bytes;
    made->item = made->strides[0] = (o->bits + 7) / 8;
    made->letter = letter_of(o->code, o->bits);
    made->rank = (int)o->rank;
    Py_ssize_t stride = made->item;
    for (int64_t d = o->rank; d-- > 0;) {
        made->shape[d] = (Py_ssize_t)f->plan->table[o->dim_index + d];
        made->strides[d] = stride;
        if (made->shape[d] > 1) stride *= made->shape[d];
    }
    return (PyObject *)made;
}

static PyObject *give_outputs(PyTypeObject *type, plt_frame *f) {
    const plt_model *m = f->model;
    PyObject *all = PyList_New((Py_ssize_t)m->n_outputs);
    for (int64_t i = 0; all && i < m->n_outputs; i++) {
        PyObject *object = give_output(type, f, i);
        if (!object) Py_CLEAR(all);
        else PyList_SetItem(all, (Py_ssize_t)i, object);
    }
    drop_outputs(f); /* those that were not given */
    return all;
}

/* ---- arguments ---- */

typedef struct reading {
    Py_buffer buffer; /* obj is NULL if none is held */
    int64_t dims[PLT_MOST_RANK], strides[PLT_MOST_RANK];
} reading;

/* Reads an argument; false if it is neither an int nor an array of a known type. An
 * array whose strides are no multiples of its elements has no layout. */
static bool read_arg(PyObject *value, bool written, reading *r, plt_arg *a,
                     int *status) {
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        a->kind = PLT_SCALAR;
        a->value = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow;
    }
    int flags = PyBUF_STRIDES | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(value, &r->buffer, flags) != 0) {
        PyErr_Clear();
        r->buffer.obj = NULL;
        return false;
    }
    const Py_buffer *b = &r->buffer;
    if (!read_type(b, a) || b->ndim > PLT_MOST_RANK) return false;
    a->kind = PLT_TENSOR;
    a->rank = b->ndim;
    a->device = kDLCPU;
    a->data = b->buf;
    a->dims = r->dims;
    a->strides = r->strides;
    for (int d = 0; d < b->ndim; d++) {
        r->dims[d] = b->shape[d];
        r->strides[d] = b->strides[d] / b->itemsize;
        if (b->shape[d] > 1 && b->strides[d] % b->itemsize) *status = PLT_ERR_LAYOUT;
    }
    return true;
}

static int run(plt_model *m, plt_frame *f, const plt_arg *args, void *const *weights,
               int64_t *detail) {
    int status = plt_frame_open(m, f, weights);
    if (status == PLT_OK) status = plt_frame_prepare(f, args, detail);
    if (status == PLT_OK) status = make_outputs(f, detail);
    if (status != PLT_OK) return status;
    status = plt_frame_run(f, detail);
    if (status != PLT_OK) drop_outputs(f);
    return status;
}

PyObject *plt_call_arrays(PyTypeObject *type, plt_model *m, PyObject *given,
                          void *const *weights, int64_t *detail, int *status) {
    Py_ssize_t n = PyTuple_Size(given), held = 0;
    if (n != m->n_inputs) {
        *status = plt_mismatch(PLT_ERR_COUNT, detail, m->n_inputs, n);
        return NULL;
    }
    plt_arg *args = PyMem_Calloc((size_t)n + 1, sizeof *args);
    reading *read = PyMem_Calloc((size_t)n + 1, sizeof *read);
    PyObject *result = NULL;
    *status = args && read ? PLT_OK : PLT_ERR_MEMORY;
    for (; *status == PLT_OK && held < n; held++) {
        PyObject *value = PyTuple_GetItem(given, held);
        bool written = m->inputs[held].written;
        detail[0] = held;
        if (!read_arg(value, written, &read[held], &args[held], status)) {
            *status = plt_mismatch(PLT_ERR_KIND, detail, m->inputs[held].kind, -1);
        }
    }
    if (*status == PLT_OK) {
        detail[0] = 0;
        plt_frame f;
        PyThreadState *thread = PyEval_SaveThread();
        *status = run(m, &f, args, weights, detail);
        PyEval_RestoreThread(thread);
        if (*status == PLT_OK) result = give_outputs(type, &f);
        plt_frame_close(&f, *status);
    }
    for (Py_ssize_t i = 0; read && i < held; i++) {
        if (read[i].buffer.obj) PyBuffer_Release(&read[i].buffer);
    }
    PyMem_Free(args);
    PyMem_Free(read);
    return result;
}
