/* Elements of every type as unsigned integers that compare as the elements do.
 *
 * NaN is above all numbers and equal to itself; -0.0 is equal to 0.0. So a key does not
 * tell everything about its element: those of zeros and NaNs must be read again. */
#ifndef PLT_KEYS_H
#define PLT_KEYS_H

#include "library.h"

static inline uint32_t plt_key16(uint32_t bits, uint32_t infinity) {
    uint32_t size = bits & 0x7FFFu;
    uint32_t key = bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
    key = size == 0 ? 0x8000u : key;
    return size > infinity ? 0xFFFFu : key;
}

static inline uint32_t plt_key32(uint32_t bits) {
    uint32_t size = bits & 0x7FFFFFFFu;
    uint32_t key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    key = size == 0 ? 0x80000000u : key;
    return size > 0x7F800000u ? 0xFFFFFFFFu : key;
}

static inline uint64_t plt_key64(uint64_t bits) {
    uint64_t size = bits & ~(UINT64_C(1) << 63);
    uint64_t key = bits ^ ((0u - (bits >> 63)) | UINT64_C(1) << 63);
    key = size == 0 ? UINT64_C(1) << 63 : key;
    return size > UINT64_C(0x7FF) << 52 ? UINT64_MAX : key;
}

#define PLT_KEYS(type, expression)                  \
    {                                               \
        const type *from = (const type *)x;         \
        if (step == 1) {                            \
            for (int64_t i = 0; i < n; i++) {       \
                type e = from[i];                   \
                keys[i] = (expression) ^ flip;      \
            }                                       \
        } else {                                    \
            for (int64_t i = 0; i < n; i++) {       \
                type e = from[i * step];            \
                keys[i] = (expression) ^ flip;      \
            }                                       \
        }                                           \
        return;                                     \
    }

/* Keys of n elements of a type of at most 4 bytes; `flip` is 0, or all ones of as many
 * bits as the type has, to reverse the order. */
static inline void plt_narrow_keys(uint32_t *restrict keys, const void *restrict x,
                                   int64_t n, int64_t step, int64_t dtype,
                                   uint32_t flip) {
    switch (dtype) {
    case PLT_F32: PLT_KEYS(uint32_t, plt_key32(e))
    case PLT_F16: PLT_KEYS(uint16_t, plt_key16(e, 0x7C00u))
    case PLT_BF16: PLT_KEYS(uint16_t, plt_key16(e, 0x7F80u))
    case PLT_I32: PLT_KEYS(uint32_t, e ^ 0x80000000u)
    case PLT_I16: PLT_KEYS(uint16_t, e ^ 0x8000u)
    case PLT_I8: PLT_KEYS(uint8_t, e ^ 0x80u)
    case PLT_U32: PLT_KEYS(uint32_t, e)
    case PLT_U16: PLT_KEYS(uint16_t, e)
    default: PLT_KEYS(uint8_t, e)
    }
}

static inline void plt_wide_keys(uint64_t *restrict keys, const void *restrict x,
                                 int64_t n, int64_t step, int64_t dtype,
                                 uint64_t flip) {
    if (dtype == PLT_F64) PLT_KEYS(uint64_t, plt_key64(e))
    if (dtype == PLT_U64) PLT_KEYS(uint64_t, e)
    PLT_KEYS(uint64_t, e ^ UINT64_C(1) << 63)
}

#undef PLT_KEYS

/* All ones of the key's bits. */
static inline uint64_t plt_flip(int64_t dtype) {
    return UINT64_MAX >> (64 - 8 * plt_bytes(dtype));
}

/* Copies chosen elements of a row: to[i * step] = from[place of i * step]. */
#define PLT_PICK(type, place)                                          \
    for (int64_t i = 0; i < k; i++)                                    \
        ((type *)to)[i * step] = ((const type *)from)[(place) * step];
#define PLT_PICK_ANY(bytes, place)                 \
    switch (bytes) {                               \
    case 8: PLT_PICK(uint64_t, place) break;       \
    case 4: PLT_PICK(uint32_t, place) break;       \
    case 2: PLT_PICK(uint16_t, place) break;       \
    default: PLT_PICK(uint8_t, place)              \
    }

#endif
