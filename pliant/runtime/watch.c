/* A Watch detects whether tensors were replaced or changed since it was made.
 *
 * It watches entries of dicts, which must still be the same objects, and tensors, which
 * must have the same torch object behind the Python one, and the same memory, layout
 * and version counter. Every call checks this before it runs, when most of these words
 * are no longer in the caches: the cost is the number of cache lines read. So the words
 * are read directly in memory, at the offsets that places.py has found.
 *
 * Words are read through the Python object, to which the Watch holds a reference, and
 * each only after the pointer to it was found unchanged, so no freed memory is read. */
#include "python.h"

#include <stdlib.h>

typedef struct entry {
    PyObject *key, *value; /* owned, so that the address is not reused */
    Py_ssize_t place;      /* where PyDict_Next found it last */
} entry;

/* A dict whose tag (its version) is the same has not changed. */
typedef struct table {
    PyObject *dict; /* owned */
    uint64_t tag;   /* when all entries were there; 0: not yet */
    Py_ssize_t n;
    entry *entries;
} table;

/* Sizes, strides, offset, dtype and dispatch keys; shared by tensors with equal
 * ones. */
typedef struct layout {
    struct layout *next;
    uint64_t words[PLT_LAYOUT_WORDS];
    uint64_t n_beyond, beyond[]; /* sizes and strides that are not among the words */
} layout;

/* What a tensor must be; fits into one cache line. See is_same. */
typedef struct tensor {
    _Alignas(64) PyObject *object; /* owned */
    const char *impl;              /* c10::TensorImpl */
    const char *storage;           /* c10::StorageImpl, or NULL */
    const char *counter; /* the version counter, or NULL */
    const void *data;
    const layout *layout;
    uint32_t count;
} tensor;

typedef struct watch {
    PyObject_HEAD
    const framework *framework;
    bool marked;
    Py_ssize_t n_tables, n_tensors;
    table *tables;
    tensor *tensors;
    layout *layouts;
} watch;

/* ---- tensors ---- */

static const char *pointer_at(const char *from, int64_t offset) {
    return *(const char *const *)(const void *)(from + offset);
}

static uint32_t count_at(const framework *fw, const char *counter) {
    const void *at = counter + fw->count_place;
    return atomic_load_explicit((const _Atomic uint32_t *)at, memory_order_relaxed);
}

_Atomic uint32_t *plt_counter_of(const framework *fw, PyObject *object) {
    const char *counter = pointer_at(plt_impl_of(fw, object), fw->counter_place);
    if (!counter) return NULL;
    return (_Atomic uint32_t *)(uintptr_t)(counter + fw->count_place);
}

static const uint64_t *words_of(const framework *fw, const char *impl) {
    return (const uint64_t *)(const void *)(impl + fw->layout_place);
}

/* The first word is the rank. If it is large, the second word points to the sizes and
 * strides. */
static uint64_t count_beyond(const uint64_t *words) {
    return words[0] > PLT_INLINE_RANK ? 2 * words[0] : 0;
}

static const uint64_t *beyond_of(const uint64_t *words) {
    return (const uint64_t *)(uintptr_t)words[1];
}

static bool same_words(const uint64_t *a, const uint64_t *b, uint64_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

static bool has_layout(const framework *fw, const uint64_t *words, const layout *l) {
    if (!same_words(words, l->words, (uint64_t)fw->layout_words)) return false;
    return l->n_beyond == 0 || same_words(beyond_of(words), l->beyond, l->n_beyond);
}

static bool is_same(const framework *fw, const tensor *t) {
    if (plt_impl_of(fw, t->object) != t->impl) return false;
    if (pointer_at(t->impl, fw->storage_place) != t->storage) return false;
    if (pointer_at(t->impl, fw->counter_place) != t->counter) return false;
    if (t->counter && count_at(fw, t->counter) != t->count) return false;
    if (t->storage && pointer_at(t->storage, fw->data_place) != t->data) return false;
    return has_layout(fw, words_of(fw, t->impl), t->layout);
}

static const layout *find_layout(watch *w, const uint64_t *words) {
    const framework *fw = w->framework;
    for (const layout *l = w->layouts; l; l = l->next) {
        if (has_layout(fw, words, l)) return l;
    }
    uint64_t n = count_beyond(words);
    layout *l = calloc(1, sizeof *l + n * sizeof *words);
    if (!l) return NULL;
    plt_copy(l->words, words, fw->layout_words, sizeof *words);
    l->n_beyond = n;
    if (n > 0) memcpy(l->beyond, beyond_of(words), n * sizeof *words);
    l->next = w->layouts;
    return w->layouts = l;
}

static bool take_stamp(watch *w, tensor *t) {
    const framework *fw = w->framework;
    t->impl = plt_impl_of(fw, t->object);
    t->storage = pointer_at(t->impl, fw->storage_place);
    t->counter = pointer_at(t->impl, fw->counter_place);
    if (t->counter) t->count = count_at(fw, t->counter);
    if (t->storage) t->data = pointer_at(t->storage, fw->data_place);
    t->layout = find_layout(w, words_of(fw, t->impl));
    return t->layout != NULL;
}

/* ---- dicts ---- */

static uint64_t tag_of(const framework *fw, PyObject *dict) {
    if (fw->tag_place == 0) return 0;
    return *(const uint64_t *)(const void *)((const char *)dict + fw->tag_place);
}

/* Usually an entry is still at its old position, where PyDict_Next finds it faster than
 * a lookup. */
static bool is_there(PyObject *dict, entry *e) {
    Py_ssize_t next = e->place;
    PyObject *key, *value;
    if (PyDict_Next(dict, &next, &key, &value) && key == e->key) {
        return value == e->value;
    }
    if (PyDict_GetItem(dict, e->key) != e->value) return false;
    for (next = e->place = 0; PyDict_Next(dict, &next, &key, &value); e->place = next) {
        if (key == e->key) break;
    }
    return true;
}

static bool all_there(const framework *fw, table *t) {
    uint64_t tag = tag_of(fw, t->dict);
    if (tag != 0 && tag == t->tag) return true;
    for (Py_ssize_t i = 0; i < t->n; i++) {
        if (!is_there(t->dict, &t->entries[i])) return false;
    }
    t->tag = tag;
    return true;
}

/* ---- the check ---- */

static bool is_changed(const watch *w) {
    if (w->marked) return true;
    const framework *fw = w->framework;
    for (Py_ssize_t i = 0; i < w->n_tables; i++) {
        if (!all_there(fw, &w->tables[i])) return true;
    }
    for (Py_ssize_t i = 0; i < w->n_tensors; i++) {
        if (!is_same(fw, &w->tensors[i])) return true;
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
    PyObject *answer = PyObject_CallMethod(self, "changed", NULL);
    if (!answer) return -1;
    int result = PyObject_IsTrue(answer);
    Py_DECREF(answer);
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
    Py_ssize_t n_tables = w->n_tables, n_tensors = w->n_tensors;
    w->n_tables = w->n_tensors = 0;
    for (Py_ssize_t i = 0; i < n_tables; i++) {
        table *t = &w->tables[i];
        for (Py_ssize_t k = 0; k < t->n; k++) {
            Py_CLEAR(t->entries[k].key);
            Py_CLEAR(t->entries[k].value);
        }
        free(t->entries);
        Py_CLEAR(t->dict);
    }
    for (Py_ssize_t i = 0; i < n_tensors; i++) Py_CLEAR(w->tensors[i].object);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    watch *w = (watch *)self;
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < w->n_tables; i++) {
        const table *t = &w->tables[i];
        Py_VISIT(t->dict);
        for (Py_ssize_t k = 0; k < t->n; k++) Py_VISIT(t->entries[k].value);
    }
    for (Py_ssize_t i = 0; i < w->n_tensors; i++) Py_VISIT(w->tensors[i].object);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    watch *w = (watch *)self;
    for (layout *l = w->layouts, *next; l; l = next) {
        next = l->next;
        free(l);
    }
    free(w->tables);
    free(w->tensors);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static bool no_memory(void) {
    PyErr_NoMemory();
    return false;
}

static bool read_table(watch *w, PyObject *given) {
    PyObject *dict, *wanted, *key, *value;
    if (!PyArg_ParseTuple(given, "O!O!", &PyDict_Type, &dict, &PyDict_Type, &wanted)) {
        return false;
    }
    table *t = &w->tables[w->n_tables];
    t->entries = calloc((size_t)PyDict_Size(wanted) + 1, sizeof *t->entries);
    if (!t->entries) return no_memory();
    t->dict = Py_NewRef(dict);
    w->n_tables++;
    for (Py_ssize_t next = 0; PyDict_Next(wanted, &next, &key, &value);) {
        entry *e = &t->entries[t->n++];
        e->key = Py_NewRef(key);
        e->value = Py_NewRef(value);
    }
    return true;
}

static bool read_tensor(watch *w, PyObject *given) {
    if (!PyType_IsSubtype(Py_TYPE(given), w->framework->type)) {
        PyErr_SetString(PyExc_TypeError, "Watch() takes tensors of its framework");
        return false;
    }
    tensor *t = &w->tensors[w->n_tensors++];
    t->object = Py_NewRef(given);
    return take_stamp(w, t) || no_memory();
}

static bool read_all(watch *w, PyObject *tables, PyObject *tensors) {
    Py_ssize_t n_tables = PyList_Size(tables), n_tensors = PyList_Size(tensors);
    w->tables = calloc((size_t)n_tables + 1, sizeof *w->tables);
    size_t bytes = ((size_t)n_tensors + 1) * sizeof *w->tensors;
    w->tensors = aligned_alloc(sizeof *w->tensors, bytes);
    if (!w->tables || !w->tensors) return no_memory();
    memset(w->tensors, 0, bytes);
    for (Py_ssize_t i = 0; i < n_tables; i++) {
        if (!read_table(w, PyList_GetItem(tables, i))) return false;
    }
    for (Py_ssize_t i = 0; i < n_tensors; i++) {
        if (!read_tensor(w, PyList_GetItem(tensors, i))) return false;
    }
    return true;
}

static PyObject *create(PyTypeObject *type, PyObject *given, PyObject *named) {
    unsigned long long address;
    PyObject *tables, *tensors;
    if (named && PyDict_Size(named) > 0) {
        PyErr_SetString(PyExc_TypeError, "Watch() takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(given, "KO!O!", &address, &PyList_Type, &tables, &PyList_Type,
                          &tensors)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    watch *w = (watch *)allocate(type, 0);
    if (!w) return NULL;
    w->framework = (const framework *)(uintptr_t)address;
    if (!read_all(w, tables, tensors)) Py_CLEAR(w);
    return (PyObject *)w;
}

static PyMethodDef watch_methods[] = {
    {"changed", changed, METH_NOARGS, "Whether anything is not as it was."},
    {"mark", mark, METH_NOARGS, "Something has changed that cannot be seen."},
    {0},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, create}, /* first: plt_watch_changed compares it */
    {Py_tp_doc, "Watch(framework, [(dict, {key: value}), ..], [tensor, ..])"},
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
