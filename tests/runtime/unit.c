/* Unit tests of the C runtime, built by test_c.py under each sanitizer. Run with the
 * names of tests, or with none for all, or with -name for all but that one; prints the
 * name of each that passed. */
#include "unit.h"

static void *count_allocate(void *context, size_t bytes) {
    counting *c = context;
    if (atomic_load(&c->fail_after) >= 0 && atomic_fetch_sub(&c->fail_after, 1) == 0) {
        return NULL;
    }
    void *p = malloc(bytes);
    if (!p) return NULL;
    atomic_fetch_add(&c->blocks, 1);
    atomic_fetch_add(&c->total, 1);
    atomic_fetch_add(&c->bytes, (int64_t)bytes);
    return p;
}

static void count_release(void *context, void *p, size_t bytes) {
    counting *c = context;
    atomic_fetch_sub(&c->blocks, 1);
    atomic_fetch_sub(&c->bytes, (int64_t)bytes);
    free(p);
}

plt_services counted(counting *c) {
    *c = (counting){.fail_after = -1};
    return (plt_services){
        .context = c, .allocate = count_allocate, .release = count_release};
}

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"planner", test_planner},
    {"planner_overflow", test_planner_overflow},
    {"planner_huge", test_planner_huge},
    {"output_bytes", test_output_bytes},
    {"planner_time", test_planner_time},
    {"calls", test_calls},
    {"statuses", test_statuses},
    {"out_of_memory", test_out_of_memory},
    {"malformed", test_malformed},
    {"plans", test_plans},
    {"arena", test_arena},
    {"retained", test_retained},
    {"copies", test_copies},
    {"settled", test_settled},
    {"budget", test_budget},
    {"idle", test_idle},
    {"parts", test_parts},
    {"parts_out_of_memory", test_parts_out_of_memory},
    {"parts_budget", test_parts_budget},
    {"regions", test_regions},
    {"nested", test_nested},
#ifndef PLT_NO_THREADS
    {"callers", test_callers},
    {"concurrent_calls", test_concurrent_calls},
    {"parking", test_parking},
    {"fork", test_fork},
    {"fork_in_call", test_fork_in_call},
    {"signals", test_signals},
    {"budget_waits", test_budget_waits},
    {"budget_order", test_budget_order},
    {"budget_fork", test_budget_fork},
    {"idle_thread", test_idle_thread},
    {"idle_callers", test_idle_callers},
    {"idle_fork", test_idle_fork},
    {"parts_callers", test_parts_callers},
    {"region_cost", test_region_cost},
#endif
};

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = argc == 1 || argv[1][0] == '-';
        for (int k = 1; k < argc; k++) {
            if (strcmp(argv[k], tests[i].name) == 0) wanted = true;
            if (argv[k][0] == '-' && strcmp(argv[k] + 1, tests[i].name) == 0) {
                wanted = false;
            }
        }
        if (!wanted) continue;
        double start = now();
        tests[i].run();
        printf("ok %s %.2fs\n", tests[i].name, now() - start);
        fflush(stdout);
    }
    return 0;
}
