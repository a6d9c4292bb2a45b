/* Regions: every unit once, from any thread, over forks and signals. */
#include "unit.h"

#ifndef PLT_NO_THREADS
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

enum { UNITS = 5000, THREADS = 4 };

typedef struct region {
    _Atomic int32_t visits[UNITS];
    int64_t begins[64], ends[64];
    plt_call *nested;
} region;

static void visit(void *p, int64_t begin, int64_t end, int64_t worker) {
    region *r = p;
    r->begins[worker] = begin;
    r->ends[worker] = end;
    for (int64_t i = begin; i < end; i++) atomic_fetch_add(&r->visits[i], 1);
}

static void check_region(plt_call *call, region *r, int64_t units, int64_t grain) {
    memset(r, 0, sizeof *r);
    for (int64_t w = 0; w < 64; w++) r->begins[w] = -1;
    plt_parallel(call, visit, r, units, grain);
    for (int64_t i = 0; i < UNITS; i++) CHECK(r->visits[i] == (i < units));
    int64_t at = 0, count = 0;
    for (; count < 64 && r->begins[count] >= 0; count++) {
        CHECK(r->begins[count] == at);
        CHECK(count == 0 || r->ends[count] - at >= grain);
        at = r->ends[count];
    }
    CHECK(at == (units > 0 ? units : 0) && count <= call->threads);
    for (; count < 64; count++) CHECK(r->begins[count] == -1);
}

void test_regions(void) {
    counting c;
    plt_services s = counted(&c);
    plt_pool *pool = plt_pool_create(&s);
    region *r = malloc(sizeof *r), *serial = malloc(sizeof *r);
    uint64_t seed = 77;
    for (int k = 0; k < 2000; k++) {
        plt_call call = {.pool = pool, .threads = 1 + below(&seed, 6)};
        plt_call alone = {.pool = NULL, .threads = call.threads};
        int64_t units = below(&seed, 1 + below(&seed, UNITS));
        int64_t grain = below(&seed, 300);
        check_region(&call, r, units, grain);
        check_region(&alone, serial, units, grain);
        CHECK(memcmp(r->begins, serial->begins, sizeof r->begins) == 0);
        CHECK(memcmp(r->ends, serial->ends, sizeof r->ends) == 0);
    }
    plt_pool_destroy(pool);
    free(r);
    free(serial);
    CHECK(c.blocks == 0);
}

static void nest(void *p, int64_t begin, int64_t end, int64_t worker) {
    region *outer = p;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        region *inner = malloc(sizeof *inner);
        check_region(outer->nested, inner, 200 + i, 3);
        free(inner);
    }
}

void test_nested(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = THREADS};
    region *r = malloc(sizeof *r);
    r->nested = &call;
    for (int k = 0; k < 20; k++) plt_parallel(&call, nest, r, 16, 1);
    free(r);
    plt_pool_destroy(pool);
}

#ifndef PLT_NO_THREADS

static void *regions_from_thread(void *p) {
    plt_call call = {.pool = p, .threads = THREADS};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 300; k++) check_region(&call, r, UNITS - k, 1 + k);
    free(r);
    return NULL;
}

void test_callers(void) {
    plt_pool *pool = plt_pool_create(NULL);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, regions_from_thread, pool) == 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    plt_pool_destroy(pool);
}

static void *calls_from_thread(void *p) {
    uint64_t seed = (uint64_t)(uintptr_t)&seed | 1;
    for (int k = 0; k < 300; k++) {
        check_call(p, below(&seed, 2000), below(&seed, 4));
        if (k % 50 == 0) plt_trim(p);
    }
    return NULL;
}

void test_concurrent_calls(void) {
    counting c;
    plt_services s = counted(&c);
    plt_model *m = make_model(&s, 2, 3);
    pthread_t threads[2 * THREADS];
    for (int i = 0; i < 2 * THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, calls_from_thread, m) == 0);
    }
    for (int i = 0; i < 2 * THREADS; i++) pthread_join(threads[i], NULL);
    plt_stats_info stats;
    plt_stats(m, &stats);
    CHECK(stats.calls == 2 * THREADS * 300 && stats.failures == 0);
    CHECK(stats.plans_made + stats.plan_hits == stats.calls);
    /* what concurrent calls left behind goes as serial calls follow */
    for (int k = 0; k < 40; k++) check_call(m, 1, 1);
    plt_stats(m, &stats);
    CHECK(stats.arena_bytes == 4096);
    plt_model_destroy(m);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

/* Parked workers wake, with pauses longer than the spin in between. */
void test_parking(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 3};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 60; k++) {
        check_region(&call, r, 100, 1);
        usleep(k % 3 ? 2000 : 40);
    }
    free(r);
    plt_pool_destroy(pool);
}

static void wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        fprintf(stderr, "child ended with wait status %#x\n", (unsigned)status);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The child runs regions and calls, forks again, and destroys. */
void test_fork(void) {
    plt_model *m = make_model(NULL, 3, 4);
    check_call(m, 1000, 1);
    for (int k = 0; k < 5; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            for (int i = 0; i < 20; i++) check_call(m, 1000 + i, 1);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                alarm(20);
                check_call(m, 1000, 2);
                plt_model_destroy(m);
                _exit(0);
            }
            wait_for(grandchild);
            check_call(m, 1000, 2);
            plt_model_destroy(m);
            _exit(0);
        }
        wait_for(child);
        check_call(m, 1000, 3);
    }
    plt_model_destroy(m);
}

static _Atomic int stop_calls;

static void *call_until_stopped(void *p) {
    for (int64_t k = 0; !atomic_load(&stop_calls); k++) check_call(p, k % 3000, 1);
    return NULL;
}

/* Forks while other threads are in the middle of calls: the child must not hang. */
void test_fork_in_call(void) {
    plt_model *m = make_model(NULL, 2, 4);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, call_until_stopped, m) == 0);
    }
    for (int k = 0; k < 40; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            for (int64_t i = 0; i < 5; i++) {
                int64_t x[64] = {0}, n = 64;
                plt_arg args[2] = {
                    {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1,
                     .data = x, .dims = &n},
                    {.kind = PLT_SCALAR, .value = i},
                };
                plt_result r;
                CHECK(plt_invoke(m, args, 2, &r) == PLT_OK);
                CHECK(((int64_t *)r.outputs[0].data)[63] == i + 1001);
                plt_result_free(m, &r);
            }
            _exit(0);
        }
        wait_for(child);
    }
    atomic_store(&stop_calls, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    plt_model_destroy(m);
}

static pthread_t main_thread;
static _Atomic int on_main, elsewhere;

static void on_signal(int number) {
    (void)number;
    if (pthread_equal(pthread_self(), main_thread)) atomic_fetch_add(&on_main, 1);
    else atomic_fetch_add(&elsewhere, 1);
}

/* Signals sent to the process are never taken by a worker. */
void test_signals(void) {
    main_thread = pthread_self();
    struct sigaction action = {.sa_handler = on_signal}, old;
    sigaction(SIGUSR1, &action, &old);
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 3};
    region *r = malloc(sizeof *r);
    for (int k = 0; k < 100; k++) {
        check_region(&call, r, 100, 1);
        kill(getpid(), SIGUSR1);
    }
    CHECK(on_main > 0 && elsewhere == 0);
    free(r);
    plt_pool_destroy(pool);
    sigaction(SIGUSR1, &old, NULL);
}

static void nothing(void *p, int64_t begin, int64_t end, int64_t worker) {
    (void)p, (void)begin, (void)end, (void)worker;
}

void test_region_cost(void) {
    plt_pool *pool = plt_pool_create(NULL);
    plt_call call = {.pool = pool, .threads = 2};
    double best = 1e9;
    for (int k = 0; k < 20; k++) {
        double start = now();
        for (int i = 0; i < 1000; i++) plt_parallel(&call, nothing, NULL, 2, 1);
        if (now() - start < best) best = now() - start;
    }
    printf("  hot region on 2 threads: %.2f us\n", best * 1e3);
    double parked = 0;
    for (int k = 0; k < 50; k++) {
        usleep(1000);
        double start = now();
        plt_parallel(&call, nothing, NULL, 2, 1);
        parked += now() - start;
    }
    printf("  after parking: %.2f us\n", parked / 50 * 1e6);
    plt_pool_destroy(pool);
}

#endif
