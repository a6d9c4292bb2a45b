/* DLPack's tensors as the runtime's arguments. */
#ifndef PLT_TENSOR_H
#define PLT_TENSOR_H

#include "rt.h"

#include <dlpack/dlpack.h>

static inline void plt_read_tensor(const DLTensor *t, plt_arg *a) {
    a->kind = PLT_TENSOR;
    a->rank = t->ndim;
    a->code = t->dtype.code;
    a->bits = t->dtype.bits;
    a->lanes = t->dtype.lanes;
    a->device = (int32_t)t->device.device_type;
    a->data = t->data ? (char *)t->data + t->byte_offset : NULL;
    a->dims = t->shape;
    a->strides = t->strides;
}

/* The bytes of a tensor, from the shape and type that its framework reports. */
static inline int64_t plt_tensor_bytes(const DLTensor *t) {
    int64_t bytes = (t->dtype.bits * t->dtype.lanes + 7) / 8;
    for (int32_t d = 0; d < t->ndim; d++) bytes *= t->shape[d];
    return bytes;
}

#endif
