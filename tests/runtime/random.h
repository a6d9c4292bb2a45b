/* Random programs: numbers that follow from a seed, and checks that tell it. */
#ifndef RANDOM_H
#define RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "%s:%d: seed %llu: %s\n", __FILE__, __LINE__,     \
                    (unsigned long long)seed_now, #condition);                \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

static uint64_t seed_now;

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int32_t below(uint64_t *state, int64_t n) {
    return (int32_t)(next_random(state) % (uint64_t)n);
}

#endif
