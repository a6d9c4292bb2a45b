/* A call from Python with nothing in between: tensors are read through their
 * framework's C table, results are made by the framework, and no Python code runs
 * unless the call is out of the ordinary.
 *
 * Caller is a base class. A subclass says what happens otherwise, by two methods:
 *   _call_other(args, kwargs)          arguments that are not read here, or keywords
 *   _call_failed(args, status, detail) a status other than PLT_OK
 * This is the only file of the runtime that knows Python, by its stable ABI. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "internal.h"
#include "tensor.h"

#define PLT_MOST_ARGS 32 /* that are read here */
#define PLT_MOST_RANK 64 /* as plt_model_create takes */

/* A framework's tensors. Making one through the exchange table costs twice as much as
 * through torch's own functions (its C interface for compiled models, and the function
 * that makes a tensor a Python object): those are used where they are found. */
typedef struct framework {
    PyTypeObject *type; /* exactly: what a subclass means is not known here */
    const DLPackExchangeAPI *exchange;
    /* all four or none */
    int32_t (*empty)(int64_t rank, const int64_t *sizes, const int64_t *strides,
                     int32_t type, int32_t device, int32_t number, void **out);
    int32_t (*data)(void *tensor, void **out);
    int32_t (*release)(void *tensor);
    PyObject *(*wrap)(void *tensor); /* moves from it; releasing it is left to do */
} framework;

typedef struct caller {
    PyObject_HEAD
    PyObject *target; /* the caller whose model is called; NULL: itself */
    plt_model *model; /* NULL: none, or closed */
    const framework *framework;
} caller;

/* ---- arguments ---- */

static bool read_args(const framework *fw, PyObject *given, Py_ssize_t n,
                      plt_arg *args) {
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *value = PyTuple_GetItem(given, i);
        plt_arg *a = &args[i];
        if (Py_TYPE(value) == fw->type) {
            DLTensor t;
            if (fw->exchange->dltensor_from_py_object_no_sync(value, &t) != 0) {
                PyErr_Clear();
                return false;
            }
            plt_read_tensor(&t, a);
        } else if (PyLong_CheckExact(value)) {
            int overflow = 0;
            a->kind = PLT_SCALAR;
            a->value = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow) return false;
        } else {
            return false;
        }
    }
    return true;
}

/* ---- results ---- */

/* torch's number for a DLPack type; -1: left to the exchange table. */
static int32_t torch_type(const plt_output_desc *o) {
    switch (o->code << 8 | o->bits) {
    case kDLUInt << 8 | 8: return 0;
    case kDLInt << 8 | 8: return 1;
    case kDLInt << 8 | 16: return 2;
    case kDLInt << 8 | 32: return 3;
    case kDLInt << 8 | 64: return 4;
    case kDLFloat << 8 | 16: return 5;
    case kDLFloat << 8 | 32: return 6;
    case kDLFloat << 8 | 64: return 7;
    case kDLBool << 8 | 8: return 11;
    case kDLBfloat << 8 | 16: return 15;
    default: return -1;
    }
}

static bool is_native(const framework *fw, const plt_output_desc *o) {
    return fw->empty && torch_type(o) >= 0;
}

static void no_error(void *context, const char *kind, const char *message) {
    (void)context, (void)kind, (void)message; /* the status says it */
}

static void *make_native(const framework *fw, const plt_output_desc *o,
                         const int64_t *sizes, void **data) {
    int64_t strides[PLT_MOST_RANK], stride = 1;
    for (int64_t d = o->rank; d-- > 0;) {
        strides[d] = stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    void *made = NULL;
    int32_t type = torch_type(o);
    if (fw->empty(o->rank, sizes, strides, type, 0, 0, &made) != 0) return NULL;
    if (fw->data(made, data) == 0) return made;
    fw->release(made);
    return NULL;
}

static void *make_exchanged(const framework *fw, const plt_output_desc *o,
                            const int64_t *sizes, void **data) {
    DLTensor like = {
        .device = {kDLCPU, 0},
        .ndim = (int32_t)o->rank,
        .dtype = {(uint8_t)o->code, (uint8_t)o->bits, 1},
        .shape = (int64_t *)sizes,
    };
    DLManagedTensorVersioned *made = NULL;
    if (fw->exchange->managed_tensor_allocator(&like, &made, NULL, no_error) != 0) {
        return NULL;
    }
    const DLTensor *t = &made->dl_tensor;
    *data = t->data ? (char *)t->data + t->byte_offset : NULL;
    return made;
}

static void drop_outputs(const framework *fw, plt_model *m, plt_frame *f) {
    for (int64_t i = 0; i < m->n_outputs; i++) {
        void *made = f->slot->handles[i];
        f->slot->handles[i] = NULL;
        if (!made) continue;
        if (is_native(fw, &m->outputs[i])) fw->release(made);
        else ((DLManagedTensorVersioned *)made)->deleter(made);
    }
}

static int make_outputs(const framework *fw, plt_model *m, plt_frame *f,
                        int64_t *detail) {
    for (int64_t i = 0; i < m->n_outputs; i++) {
        const plt_output_desc *o = &m->outputs[i];
        const int64_t *sizes = f->plan->table + o->dim_index;
        void **data = &f->slot->outputs[i];
        f->slot->handles[i] = is_native(fw, o) ? make_native(fw, o, sizes, data)
                                               : make_exchanged(fw, o, sizes, data);
        if (f->slot->handles[i]) continue;
        for (int64_t k = i + 1; k < m->n_outputs; k++) f->slot->handles[k] = NULL;
        drop_outputs(fw, m, f);
        detail[0] = i;
        detail[1] = 0;
        plt_output_bytes(o, f->plan->table, &detail[1]);
        return PLT_ERR_MEMORY;
    }
    return PLT_OK;
}

/* Output i as an object of the framework's; the handle is used up. */
static PyObject *give_output(const framework *fw, plt_model *m, plt_frame *f,
                             int64_t i) {
    void *made = f->slot->handles[i], *object = NULL;
    f->slot->handles[i] = NULL;
    if (is_native(fw, &m->outputs[i])) {
        object = fw->wrap(made);
        fw->release(made);
    } else if (fw->exchange->managed_tensor_to_py_object_no_sync(made, &object) != 0) {
        return NULL;
    }
    return object;
}

/* None, a tensor, or a tuple of them. */
static PyObject *give_outputs(const framework *fw, plt_model *m, plt_frame *f) {
    if (m->n_outputs == 0) return Py_NewRef(Py_None);
    if (m->n_outputs == 1) return give_output(fw, m, f, 0);
    PyObject *several = PyTuple_New((Py_ssize_t)m->n_outputs);
    for (int64_t i = 0; several && i < m->n_outputs; i++) {
        PyObject *object = give_output(fw, m, f, i);
        if (!object) Py_CLEAR(several);
        else PyTuple_SetItem(several, (Py_ssize_t)i, object);
    }
    if (!several) drop_outputs(fw, m, f);
    return several;
}

/* ---- the call ---- */

static int run(const framework *fw, plt_model *m, plt_frame *f, const plt_arg *args,
               int64_t *detail) {
    int status = plt_frame_open(m, f);
    if (status != PLT_OK) return status;
    status = plt_frame_prepare(m, f, args, detail);
    if (status != PLT_OK) return status;
    status = make_outputs(fw, m, f, detail);
    if (status != PLT_OK) return status;
    status = plt_frame_run(m, f, detail);
    if (status != PLT_OK) drop_outputs(fw, m, f);
    return status;
}

static PyObject *call(PyObject *self, PyObject *given, PyObject *named) {
    const caller *own = (caller *)self;
    const caller *c = own->target ? (caller *)own->target : own;
    plt_model *m = c->model;
    const framework *fw = c->framework;
    Py_ssize_t n = PyTuple_Size(given);
    plt_arg args[PLT_MOST_ARGS];
    if (!m || !fw || n != m->n_inputs || n > PLT_MOST_ARGS ||
        (named && PyDict_Size(named) > 0) || !read_args(fw, given, n, args)) {
        PyObject *names = named ? Py_NewRef(named) : PyDict_New();
        if (!names) return NULL;
        PyObject *result =
            PyObject_CallMethod(self, "_call_other", "OO", given, names);
        Py_DECREF(names);
        return result;
    }
    plt_frame f;
    int64_t detail[3] = {0};
    PyThreadState *thread = PyEval_SaveThread();
    int status = run(fw, m, &f, args, detail);
    PyEval_RestoreThread(thread);
    PyObject *result = status == PLT_OK ? give_outputs(fw, m, &f) : NULL;
    plt_frame_close(m, &f, status);
    if (status == PLT_OK) return result;
    return PyObject_CallMethod(self, "_call_failed", "Oi(LLL)", given, status,
                               (long long)detail[0], (long long)detail[1],
                               (long long)detail[2]);
}

/* ---- the class ---- */

static PyObject *serve(PyObject *self, PyObject *given) {
    caller *c = (caller *)self;
    unsigned long long model, table;
    if (!PyArg_ParseTuple(given, "KK", &model, &table)) return NULL;
    c->model = (plt_model *)(uintptr_t)model;
    c->framework = (const framework *)(uintptr_t)table;
    Py_RETURN_NONE;
}

static PyObject *delegate(PyObject *self, PyObject *other) {
    if (PyType_GetSlot(Py_TYPE(other), Py_tp_call) != (void *)call) {
        PyErr_SetString(PyExc_TypeError, "delegate() takes a Caller");
        return NULL;
    }
    caller *c = (caller *)self;
    PyObject *before = c->target;
    c->target = Py_NewRef(other);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((caller *)self)->target);
    return 0;
}

static int clear(PyObject *self) {
    Py_CLEAR(((caller *)self)->target);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef caller_methods[] = {
    {"_serve", serve, METH_VARARGS,
     "_serve(model, framework): calls run this plt_model; by address, 0 is none."},
    {"_delegate", delegate, METH_O, "_delegate(caller): calls run that one's model."},
    {0},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_doc, "What is called like a function, and runs a model."},
    {Py_tp_call, call},
    {Py_tp_methods, caller_methods},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {0},
};

static PyType_Spec caller_spec = {
    .name = "pliant.runtime._plt.Caller",
    .basicsize = sizeof(caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = caller_slots,
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&caller_spec);
    if (!type) return -1;
    int status = PyModule_AddObjectRef(module, "Caller", type);
    Py_DECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_plt",
    .m_doc = "The C runtime; as a module it offers Caller alone.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__plt(void) { return PyModuleDef_Init(&module); }
