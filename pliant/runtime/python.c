/* The fast path of a call from Python: tensors are read through their framework's C
 * table, the framework allocates the results, and no Python code runs in the common
 * case.
 *
 * A model may change tensors of its own, which are its last inputs: those calls take
 * turns, and are refused or left to Python unless the tensors are where they were.
 *
 * Caller is a base class. A subclass handles the other cases by three methods:
 *   _call_other(args, kwargs)          arguments that are not read here, or keywords
 *   _call_failed(args, status, detail) a status other than PLT_OK
 *   _renew()                           weights have changed: sets new ones (_hold)
 * Only this file, arrays.c and watch.c use Python's C API. */
#include "python.h"

#include "tensor.h"

#define PLT_FEW_ARGS 32  /* up to this many need no allocation */
#define PLT_MOST_RANK 64 /* as plt_model_create takes */

typedef struct caller {
    PyObject_HEAD
    PyObject *target; /* the caller whose model is called; NULL: itself */
    PyObject *rebuild; /* called with the results, to nest them; NULL: as they are */
    plt_model *model; /* NULL: none, or closed */
    const framework *framework;
    PyObject *weights; /* (bytes of pointers, their owners); NULL: the model's own */
    PyObject *watch;   /* on the weights' sources; NULL: they never change */
    PyObject *state;   /* the tensors that calls change, see `state`; NULL: none */
} caller;

/* ---- arguments ---- */

/* Whether a tensor's sizes and strides stay inside its storage. */
static bool fits_storage(const framework *fw, void *tensor, const DLTensor *t) {
    int64_t bytes, last, item = (t->dtype.bits + 7) / 8;
    if (fw->storage_bytes(tensor, &bytes) != 0) return false;
    if (fw->storage_offset(tensor, &last) != 0 || last < 0) return false;
    for (int32_t d = 0; d < t->ndim; d++) {
        int64_t reach = 0;
        if (t->shape[d] == 0) return true;
        if (t->strides) {
            if (__builtin_mul_overflow(t->shape[d] - 1, t->strides[d], &reach)) {
                return false;
            }
        }
        if (__builtin_add_overflow(last, reach, &last)) return false;
    }
    return !__builtin_mul_overflow(last, item, &last) && last <= bytes - item;
}

/* Whether a tensor is described completely by its bytes: it is not lazily negated or
 * conjugated, is no wrapper of a transform, needs no gradient, carries no tangent, and
 * its sizes stay inside its storage. */
static bool is_plain(const framework *fw, PyObject *value, const DLTensor *t) {
    void *tensor = plt_tensor_of(fw, value);
    const char *impl = plt_impl_of(fw, value);
    if (plt_keys_of(fw, value) & ~fw->plain) return false;
    if (fw->needs_gradient(impl) && fw->grad_mode()) return false;
    if (*fw->tangent(impl, 0, tensor) != fw->no_tangent) return false;
    return fits_storage(fw, tensor, t);
}

/* How an argument was read. A torch tensor that is not plain must not be read in
 * another way either, because that would use its bytes as they are. */
typedef enum reading { READ, NOT_READ, NOT_PLAIN } reading;

static reading read_arg(const framework *fw, PyObject *value, plt_arg *a) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == fw->type || type == fw->parameter) {
        DLTensor t;
        if (plt_keys_of(fw, value) & ~fw->plain) return NOT_PLAIN;
        if (fw->exchange->dltensor_from_py_object_no_sync(value, &t) != 0) {
            PyErr_Clear();
            return NOT_PLAIN;
        }
        plt_read_tensor(&t, a);
        return is_plain(fw, value, &t) ? READ : NOT_PLAIN;
    }
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        a->kind = PLT_SCALAR;
        a->value = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? NOT_READ : READ;
    }
    return PyType_IsSubtype(type, fw->type) ? NOT_PLAIN : NOT_READ;
}

static reading read_args(const framework *fw, const plt_model *m, PyObject *given,
                         plt_arg *args, int64_t *detail) {
    Py_ssize_t n = PyTuple_Size(given);
    for (Py_ssize_t i = 0; i < n; i++) {
        reading how = read_arg(fw, PyTuple_GetItem(given, i), &args[i]);
        if (how == READ) continue;
        detail[0] = i;
        plt_mismatch(PLT_ERR_KIND, detail, m->inputs[i].kind, -1);
        return how;
    }
    return READ;
}

/* ---- state ---- */

/* Parts of `state`: how calls take turns, a watch on where the tensors are found, the
 * tensors, and for each a byte that is not 0 if calls write it. */
enum { ACQUIRE, RELEASE, WHERE, TENSORS, WRITTEN, STATE_PARTS };

static PyObject *part(const caller *c, Py_ssize_t which) {
    return PyTuple_GetItem(c->state, which);
}

static Py_ssize_t state_size(const caller *c) {
    return c->state ? PyTuple_Size(part(c, TENSORS)) : 0;
}

/* Whether it is this call's turn at once; with an exception set it is not. */
static bool take_turn(const caller *c) {
    PyObject *got = PyObject_CallFunctionObjArgs(part(c, ACQUIRE), Py_False, NULL);
    bool taken = got == Py_True;
    Py_XDECREF(got);
    return taken;
}

static void end_turn(PyObject *state) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallFunctionObjArgs(PyTuple_GetItem(state, RELEASE), NULL));
    PyErr_Restore(type, value, trace);
}

/* Whether compiled code can write a tensor where it is. */
static bool is_in_place(const plt_arg *a) {
    int64_t stride = 1, item = (a->bits + 7) / 8;
    if (item == 0 || (uintptr_t)a->data % (uintptr_t)item != 0) return false;
    for (int32_t d = a->rank; a->strides && d-- > 0;) {
        if (a->dims[d] != 1 && a->strides[d] != stride) return false;
        stride *= a->dims[d];
    }
    return true;
}

typedef struct memory {
    uintptr_t begin, end;
} memory;

/* All the memory that a tensor is a part of; false if that cannot be told. */
static bool find_memory(const framework *fw, PyObject *value, const plt_arg *a,
                        memory *out) {
    void *tensor = plt_tensor_of(fw, value);
    int64_t bytes, offset;
    if (fw->storage_bytes(tensor, &bytes) != 0) return false;
    if (fw->storage_offset(tensor, &offset) != 0) return false;
    out->begin = (uintptr_t)a->data - (uintptr_t)(offset * ((a->bits + 7) / 8));
    out->end = out->begin + (uintptr_t)bytes;
    return true;
}

static bool is_apart(const framework *fw, PyObject *given, const plt_arg *args,
                     memory own) {
    Py_ssize_t n = PyTuple_Size(given);
    for (Py_ssize_t i = 0; i < n; i++) {
        memory other;
        if (args[i].kind != PLT_TENSOR) continue;
        if (!find_memory(fw, PyTuple_GetItem(given, i), &args[i], &other)) return false;
        if (own.begin < other.end && other.begin < own.end) return false;
    }
    return true;
}

/* Reads the state behind the arguments; false if a call cannot use it as it is. */
static bool read_state(const caller *own, const framework *fw, PyObject *given,
                       plt_arg *args) {
    PyObject *tensors = part(own, TENSORS);
    const char *written = PyBytes_AsString(part(own, WRITTEN));
    Py_ssize_t first = PyTuple_Size(given), n = PyTuple_Size(tensors);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *value = PyTuple_GetItem(tensors, i);
        plt_arg *a = &args[first + i];
        memory where;
        if (read_arg(fw, value, a) != READ || a->kind != PLT_TENSOR) return false;
        if (!written[i]) continue;
        if (!plt_counter_of(fw, value) || !is_in_place(a)) return false;
        if (!find_memory(fw, value, a, &where)) return false;
        if (!is_apart(fw, given, args, where)) return false;
    }
    return true;
}

/* Counts a change of the tensors that the call has written, as torch does. */
static void count_writes(const framework *fw, PyObject *state) {
    PyObject *tensors = PyTuple_GetItem(state, TENSORS);
    const char *written = PyBytes_AsString(PyTuple_GetItem(state, WRITTEN));
    Py_ssize_t n = PyTuple_Size(tensors);
    for (Py_ssize_t i = 0; i < n; i++) {
        _Atomic uint32_t *count = plt_counter_of(fw, PyTuple_GetItem(tensors, i));
        if (written[i] && count) atomic_fetch_add(count, 1);
    }
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
    (void)context, (void)kind, (void)message; /* the status is reported instead */
}

static void *make_native(const framework *fw, const plt_output_desc *o,
                         const int64_t *sizes, void **data, plt_meter *meter) {
    int64_t strides[PLT_MOST_RANK], stride = 1;
    for (int64_t d = o->rank; d-- > 0;) {
        strides[d] = stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    void *made = NULL;
    int32_t type = torch_type(o);
    if (fw->empty(o->rank, sizes, strides, type, 0, 0, &made) != 0) return NULL;
    int64_t bytes = 0;
    bool known = fw->storage_bytes(made, &bytes) == 0;
    plt_count(meter, bytes);
    if (known && fw->data(made, data) == 0) return made;
    fw->release(made);
    return NULL;
}

static void *make_exchanged(const framework *fw, const plt_output_desc *o,
                            const int64_t *sizes, void **data, plt_meter *meter) {
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
    plt_count(meter, plt_tensor_bytes(t));
    *data = t->data ? (char *)t->data + t->byte_offset : NULL;
    return made;
}

static void drop_outputs(const framework *fw, plt_frame *f) {
    const plt_model *m = f->model;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        void *made = f->slot->handles[i];
        f->slot->handles[i] = NULL;
        if (!made) continue;
        if (is_native(fw, &m->outputs[i])) fw->release(made);
        else ((DLManagedTensorVersioned *)made)->deleter(made);
    }
}

static int make_outputs(const framework *fw, plt_frame *f, int64_t *detail) {
    const plt_model *m = f->model;
    for (int64_t i = 0; i < m->n_outputs; i++) {
        const plt_output_desc *o = &m->outputs[i];
        const int64_t *sizes = f->plan->table + o->dim_index;
        void **data = &f->slot->outputs[i];
        f->slot->handles[i] = is_native(fw, o)
                                  ? make_native(fw, o, sizes, data, &f->meter)
                                  : make_exchanged(fw, o, sizes, data, &f->meter);
        if (f->slot->handles[i]) continue;
        for (int64_t k = i + 1; k < m->n_outputs; k++) f->slot->handles[k] = NULL;
        drop_outputs(fw, f);
        detail[0] = i;
        detail[1] = 0;
        plt_output_bytes(o, f->plan->table, &detail[1]);
        return PLT_ERR_MEMORY;
    }
    return PLT_OK;
}

/* Output i as an object of the framework; consumes the handle. */
static PyObject *give_output(const framework *fw, plt_frame *f, int64_t i) {
    const plt_model *m = f->model;
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
static PyObject *give_outputs(const framework *fw, plt_frame *f) {
    const plt_model *m = f->model;
    if (m->n_outputs == 0) return Py_NewRef(Py_None);
    if (m->n_outputs == 1) return give_output(fw, f, 0);
    PyObject *several = PyTuple_New((Py_ssize_t)m->n_outputs);
    for (int64_t i = 0; several && i < m->n_outputs; i++) {
        PyObject *object = give_output(fw, f, i);
        if (!object) Py_CLEAR(several);
        else PyTuple_SetItem(several, (Py_ssize_t)i, object);
    }
    if (!several) drop_outputs(fw, f);
    return several;
}

/* ---- the call ---- */

/* For services.poll: runs signal handlers; not 0 if one raised an exception. */
PLT_API int plt_python_poll(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

static int run(const framework *fw, plt_model *m, plt_frame *f, const plt_arg *args,
               void *const *weights, int64_t *detail) {
    int status = plt_frame_open(m, f, weights);
    if (status != PLT_OK) return status;
    status = plt_frame_prepare(f, args, detail);
    if (status != PLT_OK) return status;
    status = make_outputs(fw, f, detail);
    if (status != PLT_OK) return status;
    status = plt_frame_run(f, detail);
    if (status != PLT_OK) drop_outputs(fw, f);
    return status;
}

static PyObject *call_other(PyObject *self, PyObject *given, PyObject *named) {
    PyObject *names = named ? Py_NewRef(named) : PyDict_New();
    if (!names) return NULL;
    PyObject *result = PyObject_CallMethod(self, "_call_other", "OO", given, names);
    Py_DECREF(names);
    return result;
}

/* Recomputes the weights if their sources have changed; false with an exception set. */
static bool renew_weights(const caller *c) {
    if (!c->watch) return true;
    int changed = plt_watch_changed(c->watch);
    if (changed <= 0) return changed == 0;
    PyObject *done = PyObject_CallMethod((PyObject *)c, "_renew", NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* The call itself. It holds a reference to the present weights, so other threads may
 * replace them meanwhile. */
static PyObject *call_read(const caller *c, const plt_arg *args, int64_t *detail,
                           int *status) {
    plt_model *m = c->model;
    const framework *fw = c->framework;
    PyObject *held = Py_XNewRef(c->weights);
    void *const *weights = NULL;
    if (held) weights = (void *const *)PyBytes_AsString(PyTuple_GetItem(held, 0));
    plt_frame f;
    PyThreadState *thread = PyEval_SaveThread();
    *status = run(fw, m, &f, args, weights, detail);
    PyEval_RestoreThread(thread);
    PyObject *result = *status == PLT_OK ? give_outputs(fw, &f) : NULL;
    plt_frame_close(&f, *status);
    Py_XDECREF(held);
    return result;
}

/* The results in the structure that the model returns; consumes them. */
static PyObject *rebuilt(const caller *own, PyObject *results) {
    if (!results || !own->rebuild) return results;
    PyObject *rebuild = Py_NewRef(own->rebuild);
    PyObject *nested = PyObject_CallFunctionObjArgs(rebuild, results, NULL);
    Py_DECREF(rebuild);
    Py_DECREF(results);
    return nested;
}

/* The detail of a status as a tuple: three numbers, the part, sizes of data. */
static PyObject *failure(const int64_t *detail) {
    int64_t sizes = detail[PLT_N_SIZES];
    PyObject *numbers = PyTuple_New((Py_ssize_t)(PLT_N_SIZES + sizes));
    for (int64_t i = 0; numbers && i < PLT_N_SIZES + sizes; i++) {
        int64_t number = detail[i < PLT_N_SIZES ? i : i + 1];
        PyObject *object = PyLong_FromLongLong(number);
        if (!object) Py_CLEAR(numbers);
        else PyTuple_SetItem(numbers, (Py_ssize_t)i, object);
    }
    return numbers;
}

/* A call of a model that changes tensors of its own. What cannot be run here, and what
 * fails, is left to Python: nothing is written before all checks have passed. */
static PyObject *call_state(const caller *own, const caller *c, PyObject *given,
                            plt_arg *args, bool *done) {
    PyObject *state = Py_NewRef(own->state), *result = NULL;
    int64_t detail[PLT_DETAILS];
    memset(detail, 0, PLT_SIZES * sizeof *detail);
    int status = PLT_OK;
    *done = false;
    if (!take_turn(own)) {
        *done = PyErr_Occurred() != NULL;
        Py_DECREF(state);
        return NULL;
    }
    int moved = plt_watch_changed(PyTuple_GetItem(state, WHERE));
    bool ready = moved == 0 && renew_weights(c);
    *done = !ready && PyErr_Occurred() != NULL;
    /* Python may have run meanwhile. */
    ready = ready && own->state == state && c->model && c->framework &&
            read_args(c->framework, c->model, given, args, detail) == READ &&
            read_state(own, c->framework, given, args);
    if (ready) {
        const framework *fw = c->framework;
        result = call_read(c, args, detail, &status);
        *done = status == PLT_OK || status == PLT_ERR_INTERRUPTED;
        if (*done) count_writes(fw, state);
    }
    end_turn(state);
    Py_DECREF(state);
    return rebuilt(own, result);
}

/* _run_arrays(type, args): a list of results, or (status, detail). */
static PyObject *run_arrays(PyObject *self, PyObject *named) {
    const caller *c = (caller *)self;
    PyObject *type, *given;
    if (!PyArg_ParseTuple(named, "O!O!", &PyType_Type, &type, &PyTuple_Type, &given)) {
        return NULL;
    }
    if (!renew_weights(c)) return NULL;
    int64_t detail[PLT_DETAILS];
    memset(detail, 0, PLT_SIZES * sizeof *detail);
    int status = PLT_ERR_CLOSED;
    PyObject *result = NULL;
    if (c->model) {
        PyObject *held = Py_XNewRef(c->weights);
        void *const *weights = NULL;
        if (held) weights = (void *const *)PyBytes_AsString(PyTuple_GetItem(held, 0));
        result = plt_call_arrays((PyTypeObject *)type, c->model, given, weights, detail,
                                 &status);
        Py_XDECREF(held);
    }
    if (status == PLT_OK || status == PLT_ERR_INTERRUPTED) return result;
    PyObject *numbers = failure(detail);
    return numbers ? Py_BuildValue("iN", status, numbers) : NULL;
}

static PyObject *call_plain(PyObject *self, const caller *c, PyObject *given,
                            plt_arg *args) {
    const caller *own = (caller *)self;
    PyObject *result = NULL;
    int64_t detail[PLT_DETAILS];
    memset(detail, 0, PLT_SIZES * sizeof *detail);
    int status = PLT_OK;
    reading how = NOT_READ;
    if (!renew_weights(c)) return NULL;
    bool open = c->model && c->framework; /* checked again: Python may have run */
    if (open) how = read_args(c->framework, c->model, given, args, detail);
    if (how == READ) result = rebuilt(own, call_read(c, args, detail, &status));
    else if (how == NOT_READ) return call_other(self, given, NULL);
    else status = PLT_ERR_KIND;
    if (status == PLT_OK) return result;
    if (status == PLT_ERR_INTERRUPTED) return NULL; /* already raised */
    PyObject *numbers = failure(detail);
    if (!numbers) return NULL;
    return PyObject_CallMethod(self, "_call_failed", "OiN", given, status, numbers);
}

static PyObject *call(PyObject *self, PyObject *given, PyObject *named) {
    const caller *own = (caller *)self;
    const caller *c = own->target ? (caller *)own->target : own;
    Py_ssize_t n = PyTuple_Size(given) + state_size(own);
    if (!c->model || !c->framework || n != c->model->n_inputs ||
        (named && PyDict_Size(named) > 0)) {
        return call_other(self, given, named);
    }
    plt_arg few[PLT_FEW_ARGS], *args = few;
    if (n > PLT_FEW_ARGS) args = PyMem_Malloc((size_t)n * sizeof *args);
    if (!args) return PyErr_NoMemory();
    PyObject *result;
    if (own->state) {
        bool done;
        result = call_state(own, c, given, args, &done);
        if (!done) result = call_other(self, given, NULL);
    } else {
        result = call_plain(self, c, given, args);
    }
    if (args != few) PyMem_Free(args);
    return result;
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

static void put(PyObject **place, PyObject *value) {
    PyObject *before = *place;
    *place = value == Py_None ? NULL : Py_NewRef(value);
    Py_XDECREF(before);
}

/* Whether an object is what `state` is described to be. */
static bool is_state(PyObject *given) {
    if (!PyTuple_Check(given) || PyTuple_Size(given) != STATE_PARTS) return false;
    PyObject *tensors = PyTuple_GetItem(given, TENSORS);
    PyObject *written = PyTuple_GetItem(given, WRITTEN);
    return PyTuple_Check(tensors) && PyBytes_Check(written) &&
           PyTuple_Size(tensors) == PyBytes_Size(written);
}

static PyObject *delegate(PyObject *self, PyObject *given) {
    PyObject *other, *rebuild, *state = Py_None;
    if (!PyArg_ParseTuple(given, "OO|O", &other, &rebuild, &state)) return NULL;
    bool fits = other == Py_None ||
                PyType_GetSlot(Py_TYPE(other), Py_tp_call) == (void *)call;
    if (!fits || (state != Py_None && !is_state(state))) {
        PyErr_SetString(PyExc_TypeError, "_delegate() takes a Caller, and a state");
        return NULL;
    }
    put(&((caller *)self)->target, other);
    put(&((caller *)self)->rebuild, rebuild);
    put(&((caller *)self)->state, state);
    Py_RETURN_NONE;
}

static PyObject *hold(PyObject *self, PyObject *held) {
    if (held != Py_None) {
        bool fits = PyTuple_Check(held) && PyTuple_Size(held) > 0 &&
                    PyBytes_Check(PyTuple_GetItem(held, 0));
        if (!fits) {
            PyErr_SetString(PyExc_TypeError, "_hold() takes (bytes, ..) or None");
            return NULL;
        }
    }
    put(&((caller *)self)->weights, held);
    Py_RETURN_NONE;
}

static PyObject *follow(PyObject *self, PyObject *watch) {
    put(&((caller *)self)->watch, watch);
    Py_RETURN_NONE;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((caller *)self)->target);
    Py_VISIT(((caller *)self)->rebuild);
    Py_VISIT(((caller *)self)->weights);
    Py_VISIT(((caller *)self)->watch);
    Py_VISIT(((caller *)self)->state);
    return 0;
}

static int clear(PyObject *self) {
    Py_CLEAR(((caller *)self)->target);
    Py_CLEAR(((caller *)self)->rebuild);
    Py_CLEAR(((caller *)self)->weights);
    Py_CLEAR(((caller *)self)->watch);
    Py_CLEAR(((caller *)self)->state);
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
    {"_delegate", delegate, METH_VARARGS,
     "_delegate(caller, rebuild, state=None): calls run that one's model, and give what "
     "`rebuild` makes of its results; None leaves them as they are. `state` is "
     "(acquire, release, watch, tensors, written): see python.c."},
    {"_run_arrays", run_arrays, METH_VARARGS,
     "_run_arrays(ResultMemory, args): runs on NumPy's arrays and ints; a list of "
     "ResultMemory, or (status, detail)."},
    {"_hold", hold, METH_O, "_hold((pointers, ..)): weights of the calls to come."},
    {"_follow", follow, METH_O, "_follow(watch): on a change, _renew() is called."},
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

static int add_class(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type) return -1;
    int status = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return status;
}

static int execute(PyObject *module) {
    if (add_class(module, "Caller", &caller_spec) != 0) return -1;
    if (add_class(module, "ResultMemory", &plt_memory_spec) != 0) return -1;
    return add_class(module, "Watch", &plt_watch_spec);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_plt",
    .m_doc = "The C runtime; as a module it offers Caller, ResultMemory and Watch.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__plt(void) { return PyModuleDef_Init(&module); }
