/* Where the elements of a mask are true, in order: counted in chunks, then written. */
#include <string.h>

#include "library.h"

enum { CHUNKS = 64 }; /* that threads share */

typedef struct located {
    int64_t outer, n, rank, chunk; /* elements of a chunk */
    const uint8_t *mask;
    int64_t *places;
    int64_t before[CHUNKS + 1]; /* how many are true before each chunk */
} located;

/* The high bit of every byte that is not 0. */
static inline uint64_t true_bytes(uint64_t word) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    return (((word & low) + low) | word) & ~low;
}

/* Up to eight elements as a word; those behind the last one are 0. */
static inline uint64_t loaded(const uint8_t *at, int64_t count) {
    uint64_t word = 0;
    if (count >= 8)
        memcpy(&word, at, 8);
    else
        for (int64_t i = 0; i < count; i++) word |= (uint64_t)at[i] << (8 * i);
    return true_bytes(word);
}

static int64_t chunk_end(const located *l, int64_t chunk) {
    return plt_min((chunk + 1) * l->chunk, l->outer * l->n);
}

static void count_chunks(void *args, int64_t begin, int64_t end, int64_t worker) {
    located *l = args;
    (void)worker;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t last = chunk_end(l, chunk), total = 0;
        for (int64_t i = chunk * l->chunk; i < last; i += 8)
            total += __builtin_popcountll(loaded(l->mask + i, last - i));
        l->before[chunk + 1] = total;
    }
}

/* The true elements of one row from `column` to `last`; returns the next free place. */
static int64_t *write_row(const located *l, int64_t row, int64_t column, int64_t last,
                          int64_t *to) {
    const uint8_t *mask = l->mask + row * l->n;
    for (; column < last; column += 8) {
        uint64_t found = loaded(mask + column, last - column);
        for (; found; found &= found - 1) {
            if (l->rank > 1) *to++ = row;
            *to++ = column + __builtin_ctzll(found) / 8;
        }
    }
    return to;
}

static void write_chunks(void *args, int64_t begin, int64_t end, int64_t worker) {
    const located *l = args;
    (void)worker;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t at = chunk * l->chunk, last = chunk_end(l, chunk);
        int64_t *to = l->places + l->before[chunk] * l->rank;
        while (at < last) {
            int64_t row = at / l->n, first = row * l->n;
            int64_t stop = plt_min(last, first + l->n);
            to = write_row(l, row, at - first, stop - first, to);
            at = stop;
        }
    }
}

PLT_API void plt_locate(plt_call *call, int64_t rank, int64_t outer, int64_t n,
                        const uint8_t *mask, int64_t *places, int64_t *count) {
    located l = {.outer = outer, .n = n, .rank = rank, .mask = mask, .places = places};
    int64_t all = outer * n;
    l.chunk = plt_max((all + CHUNKS - 1) / CHUNKS, 4096);
    int64_t chunks = (all + l.chunk - 1) / l.chunk;
    int64_t grain = plt_grain(1 << 16, l.chunk);
    plt_parallel(call, count_chunks, &l, chunks, grain);
    for (int64_t k = 0; k < chunks; k++) l.before[k + 1] += l.before[k];
    plt_parallel(call, write_chunks, &l, chunks, grain);
    *count = l.before[chunks];
}
