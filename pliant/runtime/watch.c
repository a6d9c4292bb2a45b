/* A Watch tells whether tensors were replaced or changed since it was made.
 *
 * What is watched are entries of dicts: the same object must be there, and if it is a
 * tensor, with the same memory and the same count of changes in place. That is one walk
 * over an array, a few nanoseconds for each, so that every call can afford it. */
#include "python.h"

#include <stdlib.h>

typedef struct entry {
    PyObject *dict, *key, *value; /* all owned: no other object can get the address */
    void *data;
    int64_t version;
    bool is_tensor;
} entry;

typedef struct watch {
    PyObject_HEAD
    const framework *framework;
    bool marked;
    Py_ssize_t n;
    entry *entries;
} watch;

static void read_stamp(const framework *fw, PyObject *value, void **data,
                       int64_t *version) {
    void *tensor = plt_tensor_of(fw, value);
    *data = NULL;
    if (fw->data(tensor, data) != 0) *data = NULL;
    bool counted = (plt_keys_of(fw, value) & fw->counted) == fw->counted;
    *version = counted ? fw->version(tensor) : -1;
}

static bool is_changed(const watch *w) {
    if (w->marked) return true;
    for (Py_ssize_t i = 0; i < w->n; i++) {
        const entry *e = &w->entries[i];
        if (PyDict_GetItem(e->dict, e->key) != e->value) return true;
        if (!e->is_tensor) continue;
        void *data;
        int64_t version;
        read_stamp(w->framework, e->value, &data, &version);
        if (data != e->data || version != e->version) return true;
    }
    return false;
}

static PyObject *changed(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyBool_FromLong(is_changed((watch *)self));
}

int plt_watch_changed(PyObject *self) {
    if (PyType_GetSlot(Py_TYPE(self), Py_tp_new) == plt_watch_spec.slots[0].pfunc) {
        return is_changed((watch *)self);
    }
    PyObject *told = PyObject_CallMethod(self, "changed", NULL);
    if (!told) return -1;
    int result = PyObject_IsTrue(told);
    Py_DECREF(told);
    return result;
}

static PyObject *mark(PyObject *self, PyObject *ignored) {
    (void)ignored;
    ((watch *)self)->marked = true;
    Py_RETURN_NONE;
}

/* ---- the class ---- */

static int clear(PyObject *self) {
    watch *w = (watch *)self;
    Py_ssize_t n = w->n;
    w->n = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_CLEAR(w->entries[i].dict);
        Py_CLEAR(w->entries[i].key);
        Py_CLEAR(w->entries[i].value);
    }
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    watch *w = (watch *)self;
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < w->n; i++) {
        Py_VISIT(w->entries[i].dict);
        Py_VISIT(w->entries[i].value);
    }
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    free(((watch *)self)->entries);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static bool read_entry(watch *w, PyObject *given) {
    entry *e = &w->entries[w->n];
    if (!PyArg_ParseTuple(given, "O!OO", &PyDict_Type, &e->dict, &e->key, &e->value)) {
        return false;
    }
    w->n++;
    Py_INCREF(e->dict);
    Py_INCREF(e->key);
    Py_INCREF(e->value);
    e->is_tensor = PyType_IsSubtype(Py_TYPE(e->value), w->framework->type);
    if (e->is_tensor) read_stamp(w->framework, e->value, &e->data, &e->version);
    return true;
}

static PyObject *create(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long table;
    PyObject *entries;
    if (named && PyDict_Size(named) > 0) {
        PyErr_SetString(PyExc_TypeError, "Watch() takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(given, "KO!", &table, &PyList_Type, &entries)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    watch *w = (watch *)allocate(type, 0);
    if (!w) return NULL;
    w->framework = (const framework *)(uintptr_t)table;
    Py_ssize_t n = PyList_Size(entries);
    w->entries = calloc((size_t)n + 1, sizeof *w->entries);
    if (!w->entries || !w->framework) {
        Py_DECREF(w);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!read_entry(w, PyList_GetItem(entries, i))) {
            Py_DECREF(w);
            return NULL;
        }
    }
    return (PyObject *)w;
}

static PyMethodDef watch_methods[] = {
    {"changed", changed, METH_NOARGS, "Whether anything is not as it was."},
    {"mark", mark, METH_NOARGS, "Something has changed that cannot be seen."},
    {0},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, create}, /* first: plt_watch_changed looks at it */
    {Py_tp_doc, "Watch(framework, [(dict, key, value), ..])"},
    {Py_tp_methods, watch_methods},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {0},
};

PyType_Spec plt_watch_spec = {
    .name = "pliant.runtime._plt.Watch",
    .basicsize = sizeof(watch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = watch_slots,
};
