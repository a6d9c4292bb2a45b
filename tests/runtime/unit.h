/* What the unit tests of the C runtime share, and their names. */
#ifndef PLT_TESTS_UNIT_H
#define PLT_TESTS_UNIT_H
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(c)                                                            \
    do {                                                                    \
        if (!(c)) {                                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c);         \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static inline int64_t below(uint64_t *state, int64_t n) {
    return (int64_t)(next_random(state) % (uint64_t)n);
}

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Services that count, and can fail. */
typedef struct counting {
    _Atomic int64_t blocks, bytes, total;
    _Atomic int64_t fail_after; /* allocations until one fails; -1: never */
} counting;

plt_services counted(counting *c);

/* A model: x (n) i64, k -> x + k + 1 + constant, through two buffers. */
plt_model *make_model(const plt_services *s, int64_t threads, int64_t capacity);
int call_model(plt_model *m, int64_t n, int64_t k, plt_result *out);
void check_call(plt_model *m, int64_t n, int64_t k);

void test_planner(void);
void test_planner_overflow(void);
void test_planner_huge(void);
void test_output_bytes(void);
void test_planner_time(void);
void test_calls(void);
void test_statuses(void);
void test_out_of_memory(void);
void test_malformed(void);
void test_plans(void);
void test_arena(void);
void test_retained(void);
void test_copies(void);
void test_settled(void);
void test_budget(void);
void test_idle(void);
void test_parts(void);
void test_parts_out_of_memory(void);
void test_parts_budget(void);
void test_regions(void);
void test_nested(void);
#ifndef PLT_NO_THREADS
void test_callers(void);
void test_concurrent_calls(void);
void test_parking(void);
void test_fork(void);
void test_fork_in_call(void);
void test_signals(void);
void test_budget_waits(void);
void test_budget_order(void);
void test_budget_fork(void);
void test_idle_thread(void);
void test_idle_callers(void);
void test_idle_fork(void);
void test_parts_callers(void);
void test_region_cost(void);
#endif

#endif
