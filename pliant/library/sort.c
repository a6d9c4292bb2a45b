/* Rows sorted, and the best k of rows.
 *
 * A row becomes items: the key of an element (keys.h) with its place. Keys of at most
 * four bytes and a place share one 64-bit number, so a row has fewer than 2**32
 * elements (lower/library.py demands it); others are a pair. */
#include <string.h>

#include "keys.h"

enum { BLOCK = 64 };

/* A region over the rows of a tensor. */
typedef struct rows {
    int64_t dtype, bytes, n, inner, k;
    uint64_t flip;
    const char *x;
    char *values;
    int64_t *places;
    char *work;
    int64_t room; /* bytes of work for each worker */
} rows;

/* The first element of row `number`, of rows with n elements each. */
static int64_t row_start(const rows *r, int64_t number, int64_t n) {
    return number / r->inner * n * r->inner + number % r->inner;
}

/* Items that a row is collected in; lower/library.py has the same for the workspace,
 * twice this. */
static int64_t most_items(int64_t n, int64_t k) { return plt_min(n, 4 * k + 256); }

typedef struct pair {
    uint64_t key, place;
} pair;

/* Writes the elements and places of k items. `items` may be the memory of `places`. */
static void write_narrow(const rows *r, const char *from, char *to, int64_t *places,
                         const uint64_t *items, int64_t k) {
    int64_t step = r->inner;
    if (step == 1 && r->dtype == PLT_F32) {
        uint32_t flip = (uint32_t)r->flip;
        for (int64_t i = 0; i < k; i++) {
            uint32_t key = (uint32_t)(items[i] >> 32) ^ flip, place = (uint32_t)items[i];
            uint32_t bits = key ^ ((0u - (~key >> 31)) | 0x80000000u);
            if (key == 0x80000000u || key == 0xFFFFFFFFu)
                bits = ((const uint32_t *)from)[place];
            ((uint32_t *)to)[i] = bits;
        }
    } else {
        PLT_PICK_ANY(r->bytes, (int64_t)(items[i] & 0xFFFFFFFFu))
    }
    for (int64_t i = 0; i < k; i++) places[i * step] = (int64_t)(items[i] & 0xFFFFFFFFu);
}

static void write_wide(const rows *r, const char *from, char *to, int64_t *places,
                       const pair *items, int64_t k) {
    int64_t step = r->inner;
    PLT_PICK(uint64_t, (int64_t)items[i].place)
    for (int64_t i = 0; i < k; i++) places[i * step] = (int64_t)items[i].place;
}

#define ITEM uint64_t
#define KEY(e) ((e) >> 32)
#define KEY_TYPE uint32_t
#define KEY_BITS 32
#define MAKE(key, place) ((uint64_t)(key) << 32 | (place))
#define LESS(a, b) ((a) < (b))
#define NAME(f) f##_narrow
#define KEYS plt_narrow_keys
#define LONG 160
#include "sort_rows.h"

#define ITEM pair
#define KEY(e) ((e).key)
#define KEY_TYPE uint64_t
#define KEY_BITS 64
#define MAKE(key, place) ((pair){(key), (place)})
#define LESS(a, b) ((a).key < (b).key || ((a).key == (b).key && (a).place < (b).place))
#define NAME(f) f##_wide
#define KEYS plt_wide_keys
#define LONG 384
#include "sort_rows.h"

static void sort_rows(void *args, int64_t begin, int64_t end, int64_t worker) {
    const rows *r = args;
    char *work = r->work + worker * r->room;
    for (int64_t number = begin; number < end; number++) {
        int64_t start = row_start(r, number, r->n);
        const char *x = r->x + start * r->bytes;
        char *values = r->values + start * r->bytes;
        int64_t *places = r->places + start;
        if (r->bytes == 8) {
            pair *items = (pair *)work;
            sort_row_wide(r, x, values, places, items, items + r->n);
        } else {
            uint64_t *items = (uint64_t *)work;
            /* If a row is contiguous, the memory of its places has room for its items. */
            uint64_t *other = r->inner == 1 ? (uint64_t *)places : items + r->n;
            sort_row_narrow(r, x, values, places, items, other);
        }
    }
}

PLT_API void plt_sort(plt_call *call, int64_t dtype, int64_t descending, int64_t outer,
                      int64_t n, int64_t inner, const void *x, void *values,
                      int64_t *places, void *work) {
    if (n == 0) return;
    int64_t bytes = plt_bytes(dtype);
    uint64_t flip = descending ? plt_flip(dtype) : 0;
    rows r = {dtype, bytes, n, inner, n, flip, x, values, places, work, 0};
    r.room = n * (bytes == 8 ? 32 : inner == 1 ? 8 : 16);
    plt_parallel(call, sort_rows, &r, outer * inner, plt_grain(2048, n));
}

static void top_rows(void *args, int64_t begin, int64_t end, int64_t worker) {
    const rows *r = args;
    char *work = r->work + worker * r->room;
    for (int64_t number = begin; number < end; number++) {
        const char *x = r->x + row_start(r, number, r->n) * r->bytes;
        int64_t start = row_start(r, number, r->k);
        char *values = r->values + start * r->bytes;
        int64_t *places = r->places + start;
        if (r->bytes == 8) top_row_wide(r, x, values, places, (pair *)work);
        else top_row_narrow(r, x, values, places, (uint64_t *)work);
    }
}

PLT_API void plt_top(plt_call *call, int64_t dtype, int64_t largest, int64_t outer,
                     int64_t n, int64_t inner, int64_t k, const void *x, void *values,
                     int64_t *places, void *work) {
    if (k == 0) return;
    int64_t bytes = plt_bytes(dtype);
    uint64_t flip = largest ? plt_flip(dtype) : 0;
    rows r = {dtype, bytes, n, inner, k, flip, x, values, places, work, 0};
    r.room = 2 * most_items(n, k) * (bytes == 8 ? 16 : 8);
    plt_parallel(call, top_rows, &r, outer * inner, plt_grain(8192, n));
}
