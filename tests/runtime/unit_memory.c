/* What calls hold: copies of inputs, arenas between calls, a budget for all of them. */
#include "unit.h"

#ifndef PLT_NO_THREADS
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

static plt_stats_info stats_of(plt_model *m) {
    plt_stats_info stats;
    plt_stats(m, &stats);
    return stats;
}

/* ---- copies ---- */

/* x (n) i64 in memory of any stride or alignment, against x + k + 1001. */
static void check_strided(plt_model *m, int64_t n, int64_t stride, int64_t shift) {
    int64_t room = n * (stride < 0 ? -stride : stride) + 2;
    char *memory = calloc((size_t)room, 8);
    char *first = memory + shift + (stride < 0 ? -(n - 1) * stride * 8 : 0);
    for (int64_t i = 0; i < n; i++) memcpy(first + i * stride * 8, &i, 8);
    plt_arg args[2] = {
        {.kind = PLT_TENSOR, .rank = 1, .bits = 64, .lanes = 1, .device = 1,
         .data = first, .dims = &n, .strides = &stride},
        {.kind = PLT_SCALAR, .value = 4},
    };
    plt_result r;
    CHECK(plt_invoke(m, args, 2, &r) == PLT_OK);
    const int64_t *y = r.outputs[0].data;
    for (int64_t i = 0; i < n; i++) CHECK(y[i] == i + 1005);
    plt_result_free(m, &r);
    plt_stats_info stats = stats_of(m);
    bool copied = n > 1 && (stride != 1 || shift != 0);
    copied |= n == 1 && shift != 0;
    CHECK(stats.last_copied_bytes == (copied ? 8 * n : 0));
    CHECK(stats.last_peak_bytes == stats.last_planned_bytes);
    CHECK(stats.last_peak_bytes ==
          stats.last_arena_bytes + 8 * n + stats.last_copied_bytes);
    if (copied) { /* the copy counts: one byte less is too little */
        int64_t peak = stats.last_peak_bytes;
        plt_set_limit(m, peak);
        CHECK(plt_invoke(m, args, 2, &r) == PLT_OK);
        plt_result_free(m, &r);
        plt_set_limit(m, peak - 1);
        CHECK(plt_invoke(m, args, 2, &r) == PLT_ERR_LIMIT);
        CHECK(r.detail[0] == 0 && r.detail[1] == peak && r.detail[2] == peak - 1);
        plt_set_limit(m, 8); /* not even the copy */
        CHECK(plt_invoke(m, args, 2, &r) == PLT_ERR_LIMIT && r.detail[2] == 8);
        plt_set_limit(m, -1);
    }
    free(memory);
}

void test_copies(void) {
    counting c;
    plt_services s = counted(&c);
    plt_model *m = make_model(&s, 3, 0);
    const int64_t strides[] = {1, 2, -1, -3, 0x10};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        check_strided(m, 7, strides[i], 0);
        check_strided(m, 40000, strides[i], 0);
        check_strided(m, 7, strides[i], 3);
    }
    check_strided(m, 1, 5, 0);
    check_strided(m, 1, 5, 1);
    check_strided(m, 0, 5, 0);
    plt_model_destroy(m);
    CHECK(c.blocks == 0 && c.bytes == 0);
}

/* ---- arenas between calls ---- */

static int64_t pages(int64_t bytes) {
#ifdef PLT_NO_MMAP
    return bytes;
#else
    return (bytes + 4095) & ~(int64_t)4095;
#endif
}

void test_settled(void) {
    enum { LONG = 1 << 20, SHORT = 1 << 10, MEBIBYTE = 1 << 20 };
    plt_model *m = make_model(NULL, 1, 0);
    check_call(m, SHORT, 1);
    CHECK(stats_of(m).arena_bytes == pages(16 * SHORT));
    check_call(m, LONG, 1); /* goes back when it ends */
    CHECK(stats_of(m).last_arena_bytes == 16 * LONG);
#ifdef PLT_NO_MMAP
    CHECK(stats_of(m).arena_bytes == 0);
#else
    CHECK(stats_of(m).arena_bytes == MEBIBYTE);
#endif
    for (int k = 0; k < 3; k++) { /* repeated, it stays */
        check_call(m, LONG, 1);
        CHECK(stats_of(m).arena_bytes == 16 * LONG);
    }
    check_call(m, LONG - 1000, 1);
    CHECK(stats_of(m).arena_bytes == pages(16 * (LONG - 1000)));
    for (int k = 0; k < 3; k++) check_call(m, SHORT, 1);
    check_call(m, LONG, 1); /* now and then among short ones: it stays too */
    CHECK(stats_of(m).arena_bytes == 16 * LONG);
    for (int k = 0; k < 9; k++) check_call(m, SHORT, 1);
    check_call(m, LONG, 1); /* but not after a while */
    CHECK(stats_of(m).arena_bytes <= MEBIBYTE);
    plt_model_destroy(m);
}

/* ---- the budget ---- */

static plt_budget_info read_budget(plt_budget *b) {
    plt_budget_info info;
    plt_budget_read(b, &info);
    return info;
}

void test_budget(void) {
    counting c;
    plt_services s = counted(&c);
    s.pool = plt_pool_create(&s);
    s.budget = plt_budget_create(&s);
    plt_model *m = make_model(&s, 1, 0), *other = make_model(&s, 1, 0);
    plt_result r;
    check_call(m, 1000, 1);
    plt_budget_info info = read_budget(s.budget);
    CHECK(info.limit == -1 && info.running == 0 && info.idle == 16000);
    int64_t peak = stats_of(m).last_peak_bytes;
    CHECK(peak == 24000);
    /* the other model's idle arena makes room */
    plt_budget_set(s.budget, peak, 0);
    check_call(other, 1000, 1);
    CHECK(stats_of(m).arena_bytes == 0 && read_budget(s.budget).idle == 16000);
    check_call(m, 1000, 1);
    check_call(m, 1000, 1);
    CHECK(stats_of(other).arena_bytes == 0);
    /* what can never fit is refused as by a limit; the least of both counts */
    CHECK(call_model(m, 1001, 1, &r) == PLT_ERR_LIMIT);
    CHECK(r.detail[0] == 1 && r.detail[1] == 24136 && r.detail[2] == peak);
    plt_set_limit(m, peak - 1);
    CHECK(call_model(m, 1000, 1, &r) == PLT_ERR_LIMIT && r.detail[0] == 0);
    plt_set_limit(m, -1);
    check_call(m, 1000, 1);
    /* lowering the budget gives idle arenas back at once */
    plt_budget_set(s.budget, 1000, 0);
    CHECK(stats_of(m).arena_bytes == 0 && read_budget(s.budget).idle == 0);
    CHECK(call_model(m, 10, 13, &r) == PLT_ERR_RUN); /* a failed call gives back too */
    CHECK(read_budget(s.budget).running == 0);
    plt_budget_set(s.budget, -1, -1);
    check_call(m, 1000, 1);
    plt_trim(m);
    CHECK(read_budget(s.budget).idle == 0);
    plt_model_destroy(m);
    check_call(other, 500, 1);
    plt_model_destroy(other);
    CHECK(read_budget(s.budget).idle == 0);
    plt_budget_destroy(s.budget);
    plt_pool_destroy(s.pool);
    CHECK(c.blocks == 0);
}

/* ---- arenas that nobody uses ---- */

enum { LONG = 1 << 20, IDLE_MOST = 1 << 20 };

/* What the reaper does each time it looks; here it never does by itself. */
void test_idle(void) {
    plt_services s = {0};
    s.pool = plt_pool_create(NULL);
    s.budget = plt_budget_create(&s);
    plt_model *m = make_model(&s, 1, 0), *other = make_model(&s, 1, 0);
    CHECK(!plt_budget_reap(s.budget));
    check_call(m, 10, 1); /* little is kept, and not looked for */
    CHECK(!plt_budget_reap(s.budget) && !plt_budget_reap(s.budget));
    CHECK(stats_of(m).arena_bytes == pages(stats_of(m).last_arena_bytes));
    for (int k = 0; k < 5; k++) { /* while calls go on nothing is cut */
        check_call(m, LONG, 1);
        if (k == 0) continue; /* which goes back by itself */
        CHECK(plt_budget_reap(s.budget));
        CHECK(stats_of(m).arena_bytes == 16 * LONG);
        check_call(other, 10, 1); /* those of another do not count */
    }
    plt_result r;
    CHECK(call_model(m, LONG, 13, &r) == PLT_ERR_RUN); /* failed ones do */
    CHECK(plt_budget_reap(s.budget) && stats_of(m).arena_bytes == 16 * LONG);
    CHECK(read_budget(s.budget).idle >= 16 * LONG);
    CHECK(!plt_budget_reap(s.budget)); /* and now it goes */
    CHECK(stats_of(m).arena_bytes <= IDLE_MOST);
    CHECK(read_budget(s.budget).idle <= 2 * IDLE_MOST);
    check_call(m, LONG, 1);
    CHECK(plt_budget_reap(s.budget) && stats_of(m).arena_bytes == 16 * LONG);
    plt_frame f; /* a call that runs keeps its own, however long */
    CHECK(plt_frame_open(m, &f, NULL) == PLT_OK);
    CHECK(f.slot->arena.mapped == 16 * LONG);
    CHECK(!plt_budget_reap(s.budget) && !plt_budget_reap(s.budget));
    CHECK(f.slot->arena.mapped == 16 * LONG && stats_of(m).arena_bytes == 16 * LONG);
    plt_frame_close(&f, PLT_ERR_RUN);
    CHECK(plt_budget_reap(s.budget) && !plt_budget_reap(s.budget));
    CHECK(stats_of(m).arena_bytes <= IDLE_MOST);
    plt_model_destroy(m);
    plt_model_destroy(other);
    CHECK(read_budget(s.budget).idle == 0);
    plt_budget_destroy(s.budget);
    plt_pool_destroy(s.pool);
}

#ifndef PLT_NO_THREADS

typedef struct holding {
    plt_model *model;
    plt_budget *budget;
    int64_t need;
    int status;
    int64_t detail[3];
    _Atomic int *next; /* in which order they were served */
    int place;
    pthread_t thread;
} holding;

/* A call that takes its bytes, and gives them back when it is told to. */
static plt_slot *take(plt_model *m, plt_budget *b, int64_t need, int *status,
                      int64_t *detail) {
    plt_frame f;
    CHECK(plt_frame_open(m, &f, NULL) == PLT_OK);
    *status = plt_budget_take(b, m, f.slot, need, detail);
    return f.slot;
}

static void leave(plt_model *m, plt_budget *b, plt_slot *slot, int64_t need) {
    plt_budget_idle(m, slot, 0);
    plt_slot_free(m, slot);
    plt_budget_give(b, need);
}

static void *take_and_leave(void *p) {
    holding *h = p;
    plt_slot *slot = take(h->model, h->budget, h->need, &h->status, h->detail);
    if (h->status == PLT_OK && h->next) h->place = atomic_fetch_add(h->next, 1);
    leave(h->model, h->budget, slot, h->status == PLT_OK ? h->need : 0);
    return NULL;
}

static void until_waiting(plt_budget *b, int64_t n) {
    while (read_budget(b).waiting != n) usleep(1000);
}

static _Atomic int polled;
static int stop_soon(void) { return atomic_fetch_add(&polled, 1) >= 1; }

void test_budget_waits(void) {
    plt_services s = {0};
    s.pool = plt_pool_create(NULL);
    s.budget = plt_budget_create(&s);
    plt_model *m = make_model(&s, 1, 0);
    plt_budget_set(s.budget, 100, -1);
    int status;
    int64_t detail[3];
    plt_slot *first = take(m, s.budget, 60, &status, detail);
    CHECK(status == PLT_OK && read_budget(s.budget).running == 60);
    /* no time to wait, some time, as long as it takes */
    plt_budget_set(s.budget, 100, 0);
    holding late = {.model = m, .budget = s.budget, .need = 41};
    take_and_leave(&late);
    CHECK(late.status == PLT_ERR_BUDGET && late.detail[0] == 100);
    CHECK(late.detail[1] == 41 && late.detail[2] == 60);
    plt_budget_set(s.budget, 100, 20000000);
    take_and_leave(&late);
    CHECK(late.status == PLT_ERR_BUDGET && read_budget(s.budget).waiting == 0);
    plt_budget_set(s.budget, 100, -1);
    pthread_create(&late.thread, NULL, take_and_leave, &late);
    until_waiting(s.budget, 1);
    leave(m, s.budget, first, 60);
    pthread_join(late.thread, NULL);
    CHECK(late.status == PLT_OK && read_budget(s.budget).running == 0);
    /* a budget that grows, goes, or shrinks below the need ends the waiting */
    const int64_t limits[] = {200, -1, 40};
    for (int k = 0; k < 3; k++) {
        plt_budget_set(s.budget, 100, -1);
        first = take(m, s.budget, 60, &status, detail);
        pthread_create(&late.thread, NULL, take_and_leave, &late);
        until_waiting(s.budget, 1);
        plt_budget_set(s.budget, limits[k], -1);
        pthread_join(late.thread, NULL);
        CHECK(late.status == (k < 2 ? PLT_OK : PLT_ERR_BUDGET));
        leave(m, s.budget, first, 60);
    }
    plt_model_destroy(m);
    plt_budget_destroy(s.budget);
    /* a signal's handler ends it as well */
    s.poll = stop_soon;
    s.budget = plt_budget_create(&s);
    m = make_model(&s, 1, 0);
    plt_budget_set(s.budget, 100, -1);
    first = take(m, s.budget, 60, &status, detail);
    late.model = m;
    late.budget = s.budget;
    take_and_leave(&late);
    CHECK(late.status == PLT_ERR_INTERRUPTED && polled >= 2);
    CHECK(read_budget(s.budget).waiting == 0);
    leave(m, s.budget, first, 60);
    plt_budget_set(s.budget, 144, -1);
    check_call(m, 2, 1);
    plt_model_destroy(m);
    plt_budget_destroy(s.budget);
    plt_pool_destroy(s.pool);
}

/* Served as they came: a small one does not overtake a large one that waits. */
void test_budget_order(void) {
    enum { N = 6 };
    plt_services s = {0};
    s.pool = plt_pool_create(NULL);
    s.budget = plt_budget_create(&s);
    plt_model *m = make_model(&s, 1, 0);
    plt_budget_set(s.budget, 100, -1);
    int status;
    int64_t detail[3];
    plt_slot *first = take(m, s.budget, 60, &status, detail);
    holding waiting[N];
    _Atomic int next = 0;
    for (int k = 0; k < N; k++) {
        int64_t need = k % 2 ? 10 : 95; /* no two fit together but small ones */
        waiting[k] = (holding){.model = m, .budget = s.budget, .need = need,
                               .next = &next};
        pthread_create(&waiting[k].thread, NULL, take_and_leave, &waiting[k]);
        until_waiting(s.budget, k + 1);
    }
    leave(m, s.budget, first, 60);
    for (int k = 0; k < N; k++) pthread_join(waiting[k].thread, NULL);
    for (int k = 0; k < N; k++) CHECK(waiting[k].status == PLT_OK);
    /* whoever needs nearly all is served after those before him and before those after */
    for (int k = 0; k < N; k += 2) CHECK(waiting[k].place == k);
    CHECK(read_budget(s.budget).running == 0);
    plt_model_destroy(m);
    plt_budget_destroy(s.budget);
    plt_pool_destroy(s.pool);
}

/* A child holds what is idle, nothing of calls that its parent's threads run. */
void test_budget_fork(void) {
    plt_services s = {0};
    s.pool = plt_pool_create(NULL);
    s.budget = plt_budget_create(&s);
    plt_model *m = make_model(&s, 1, 0);
    check_call(m, 1000, 1);
    plt_budget_set(s.budget, 24000, -1);
    int status;
    int64_t detail[3];
    plt_slot *held = take(m, s.budget, 20000, &status, detail);
    CHECK(status == PLT_OK);
    holding late = {.model = m, .budget = s.budget, .need = 24000};
    pthread_create(&late.thread, NULL, take_and_leave, &late);
    until_waiting(s.budget, 1);
    for (int k = 0; k < 20; k++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            check_call(m, 1000, 1);
            plt_budget_info info = read_budget(s.budget);
            CHECK(info.running == 0 && info.waiting == 0 && info.idle == 16000);
            _exit(0);
        }
        int ended;
        CHECK(waitpid(child, &ended, 0) == child && ended == 0);
    }
    CHECK(read_budget(s.budget).running == 20000);
    leave(m, s.budget, held, 20000);
    pthread_join(late.thread, NULL);
    CHECK(late.status == PLT_OK);
    plt_model_destroy(m);
    plt_budget_destroy(s.budget);
    plt_pool_destroy(s.pool);
}

/* ---- the thread that looks for idle arenas ---- */

enum { MUCH = 1 << 17 }; /* elements: twice what is kept in any case */

static plt_services reaping(int64_t idle_ns) {
    plt_services s = {.idle_ns = idle_ns};
    s.pool = plt_pool_create(NULL);
    s.budget = plt_budget_create(&s);
    return s;
}

static void end_reaping(plt_services *s) {
    plt_budget_destroy(s->budget);
    plt_pool_destroy(s->pool);
}

static void until_given_back(plt_model *m) {
    while (stats_of(m).arena_bytes > IDLE_MOST) usleep(1000);
}

void test_idle_thread(void) {
    plt_services s = reaping(5000000);
    plt_model *m = make_model(&s, 1, 0), *other = make_model(&s, 1, 0);
    for (int k = 0; k < 3; k++) { /* without another call; again after a rest */
        for (int i = 0; i < 3; i++) check_call(m, MUCH, 1);
        check_call(other, MUCH, 1);
        check_call(other, MUCH, 1);
        until_given_back(m);
        until_given_back(other);
        usleep(20000 * k);
    }
    CHECK(read_budget(s.budget).idle <= 2 * IDLE_MOST);
    check_call(m, MUCH, 1);
    check_call(m, MUCH, 1);
    plt_model_destroy(m); /* while it may be looked at */
    plt_model_destroy(other);
    CHECK(read_budget(s.budget).idle == 0);
    end_reaping(&s);
    s = reaping(INT64_MAX); /* is not waited for */
    m = make_model(&s, 1, 0);
    for (int i = 0; i < 3; i++) check_call(m, MUCH, 1);
    CHECK(stats_of(m).arena_bytes == 16 * MUCH);
    plt_model_destroy(m);
    end_reaping(&s);
}

static void *call_now_and_then(void *p) {
    for (int k = 0; k < 60; k++) {
        check_call(p, k % 3 ? MUCH : 1000, k % 5);
        if (k % 7 == 0) usleep(3000);
    }
    return NULL;
}

/* Calls of several threads, models that come and go, and a reaper in a hurry. */
void test_idle_callers(void) {
    enum { THREADS = 3 };
    plt_services s = reaping(200000);
    plt_model *m = make_model(&s, 1, 0);
    pthread_t threads[THREADS];
    for (int k = 0; k < THREADS; k++) {
        CHECK(pthread_create(&threads[k], NULL, call_now_and_then, m) == 0);
    }
    for (int k = 0; k < 20; k++) {
        plt_model *passing = make_model(&s, 1, 0);
        check_call(passing, MUCH, 1);
        check_call(passing, MUCH, 1);
        plt_model_destroy(passing);
    }
    for (int k = 0; k < THREADS; k++) pthread_join(threads[k], NULL);
    while (stats_of(m).arena_bytes > 4 * IDLE_MOST) usleep(1000);
    /* The reaper takes an arena away while it cuts it, so the first trim may miss it. */
    for (int k = 0; k < 1000 && stats_of(m).arena_bytes; k++) {
        plt_trim(m);
        usleep(1000);
    }
    CHECK(stats_of(m).arena_bytes == 0 && read_budget(s.budget).idle == 0);
    plt_model_destroy(m);
    end_reaping(&s);
}

/* A child has no reaper of its parent's, and gets its own. */
void test_idle_fork(void) {
    plt_services s = reaping(2000000);
    plt_model *m = make_model(&s, 1, 0);
    for (int k = 0; k < 20; k++) {
        check_call(m, MUCH, 1);
        check_call(m, MUCH, 1);
        if (k % 2) until_given_back(m); /* the reaper rests, or not */
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            check_call(m, MUCH, 1);
            check_call(m, MUCH, 1);
            until_given_back(m);
            plt_model_destroy(m);
            end_reaping(&s);
            _exit(0);
        }
        int ended;
        CHECK(waitpid(child, &ended, 0) == child && ended == 0);
    }
    until_given_back(m);
    plt_model_destroy(m);
    end_reaping(&s);
}

#endif
