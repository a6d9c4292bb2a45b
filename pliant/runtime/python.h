/* Shared by the files that use Python's C API; they use the stable ABI only. */
#ifndef PLT_PYTHON_H
#define PLT_PYTHON_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "internal.h"

#include <dlpack/dlpack.h>

/* Access to the tensors of a framework, torch. caller.py has found all fields that are
 * not optional, and tested them on tensors of every kind. Creating a tensor through the
 * exchange table costs twice as much as through torch's own functions (its C interface
 * for compiled models, and the function that wraps a tensor in a Python object), so
 * those are used where they are found. */
typedef struct framework {
    PyTypeObject *type; /* exactly this type: a subclass may mean more */
    const DLPackExchangeAPI *exchange;
    /* optional, all three or none */
    int32_t (*empty)(int64_t rank, const int64_t *sizes, const int64_t *strides,
                     int32_t type, int32_t device, int32_t number, void **out);
    int32_t (*release)(void *tensor);
    PyObject *(*wrap)(void *tensor); /* moves from it; releasing it is left to do */

    PyTypeObject *parameter; /* the one subclass that is read like it */
    int64_t tensor_offset;   /* from a Python object to its at::Tensor */
    int64_t keys_offset;     /* from a c10::TensorImpl to its dispatch keys */
    uint64_t plain;   /* the dispatch keys that a plain tensor may have */
    bool (*needs_gradient)(const void *impl);
    bool (*grad_mode)(void);
    void *const *(*tangent)(const void *impl, uint64_t level, const void *tensor);
    const void *no_tangent;
    int32_t (*storage_bytes)(void *tensor, int64_t *out);
    int32_t (*storage_offset)(void *tensor, int64_t *out); /* in elements */
    int32_t (*data)(void *tensor, void **out);

    /* Offsets of the fields that identify a tensor's state. In a c10::TensorImpl: the
     * address of the storage, the address of the version counter, and the words from
     * the rank to the dispatch keys. In a version counter and in a c10::StorageImpl: */
    int64_t storage_place, counter_place, layout_place, layout_words;
    int64_t count_place, data_place;
    int64_t tag_place; /* of a dict's version in a dict; 0: it has none */
} framework;

#define PLT_LAYOUT_WORDS 24 /* layout_words at most */
#define PLT_INLINE_RANK 5   /* sizes and strides of more dims are elsewhere */

/* torch's own object behind a Python one: an at::Tensor, and what it points to. */
static inline void *plt_tensor_of(const framework *fw, PyObject *object) {
    return (char *)object + fw->tensor_offset;
}

static inline const char *plt_impl_of(const framework *fw, PyObject *object) {
    return *(const char *const *)plt_tensor_of(fw, object);
}

static inline uint64_t plt_keys_of(const framework *fw, PyObject *object) {
    return *(const uint64_t *)(const void *)(plt_impl_of(fw, object) + fw->keys_offset);
}

extern PyType_Spec plt_watch_spec;
extern PyType_Spec plt_memory_spec;

/* Runs a model on NumPy's arrays and ints: a list of `ResultMemory`, one for each
 * result. NULL with a status, or with an exception set. */
PyObject *plt_call_arrays(PyTypeObject *type, plt_model *m, PyObject *given,
                          void *const *weights, int64_t *detail, int *status);

/* torch's count of changes of a tensor; NULL if it counts none (inference mode). */
_Atomic uint32_t *plt_counter_of(const framework *fw, PyObject *object);

/* Whether a Watch has seen a change: 1, 0, or -1 with an exception set. For any other
 * object, calls its method `changed`. */
int plt_watch_changed(PyObject *watch);

#endif
