/* The memory budget of all calls of a process.
 *
 * A call reserves the bytes that its plan needs before it maps or allocates anything,
 * and releases them when it ends. A call that does not fit first frees the idle arenas
 * of all models, and then waits for running calls. While it waits it holds nothing, not
 * even the arena of its own slot, so waiting calls cannot deadlock. They are served in
 * the order they came: a later one does not overtake, even if it would fit.
 *
 * `running` counts the reserved bytes, `idle` the bytes of arenas between calls. Both
 * are counted with or without a limit, and without the lock, so that a limit may be set
 * at any time. With a limit, a call reserves under the lock. Lock order: the budget's
 * lock is taken before a model's lock, never after it.
 *
 * The budget knows all models, so its thread, the reaper, also frees arenas that are
 * not used. Calls do not read a clock for this: the reaper compares a model's count of
 * calls, and cuts its arenas if the count has not changed for a while. When nothing is
 * left to cut, the reaper rests, and the next call that leaves a large arena wakes it.
 * No wake-up is lost: the call leaves its arena before it checks whether the reaper
 * rests, and the reaper sets `resting` before it checks for arenas.
 *
 * In a forked child no call runs or waits, and there is no reaper. */
#define _GNU_SOURCE
#include "internal.h"

#include <signal.h>
#include <time.h>

typedef struct waiter {
    struct waiter *next;
} waiter;

struct plt_budget {
    plt_services services;
    _Atomic int64_t limit;   /* bytes; -1: none */
    _Atomic int64_t wait_ns; /* longest wait of a call; -1: no limit */
    _Atomic int64_t running, idle;
    _Atomic int64_t waiting;
    _Atomic uint32_t epoch;
    _Atomic bool resting; /* a call with a large arena must wake the reaper */
    plt_lock lock; /* guards what follows */
    waiter *first, *last;
    plt_model *models; /* linked by next_in_budget */
#ifndef PLT_NO_THREADS
    pthread_cond_t changed, woken;
    pthread_t reaper;
    bool reaping, stop; /* the reaper exists; it must end */
#endif
};

#ifndef PLT_NO_THREADS

#define PLT_SLICE_NS 50000000 /* interval of checks for signals */
#define PLT_REAPER_STACK (256 * 1024)

/* Starts with no waiting calls and no reaper. */
static void threads_init(plt_budget *b) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&b->changed, &attr);
    pthread_cond_init(&b->woken, &attr);
    pthread_condattr_destroy(&attr);
    b->reaping = false;
    atomic_store(&b->resting, b->services.idle_ns > 0);
}

static void tell_all(plt_budget *b) { pthread_cond_broadcast(&b->changed); }

static struct timespec time_of(int64_t ns) {
    return (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
}

/* Held: the lock. Waits for a signal, but no longer than a slice or `until`. */
static void wait_slice(plt_budget *b, int64_t until) {
    int64_t end = plt_clock(NULL) + PLT_SLICE_NS;
    if (until >= 0 && until < end) end = until;
    struct timespec at = time_of(end);
    pthread_cond_timedwait(&b->changed, &b->lock, &at);
}

#else

static void threads_init(plt_budget *b) { (void)b; }
static void tell_all(plt_budget *b) { (void)b; }
static void wait_slice(plt_budget *b, int64_t until) { (void)b, (void)until; }

#endif

plt_budget *plt_budget_create(const plt_services *services) {
    plt_services s;
    plt_services_copy(&s, services);
    plt_budget *b = plt_allocate(&s, sizeof *b);
    if (!b) return NULL;
    b->services = s;
    atomic_store(&b->limit, -1);
    atomic_store(&b->wait_ns, -1);
    plt_lock_init(&b->lock);
    threads_init(b);
    if (s.pool) atomic_store(&b->epoch, plt_pool_epoch(s.pool));
    return b;
}

/* The bytes of a model's idle arenas. In a forked child no other thread changes
 * them. */
static int64_t idle_of(plt_model *m) {
    if (!plt_lock_try(&m->lock)) return 0; /* held at the fork: they leak */
    plt_slot *spare = atomic_load(&m->spare);
    int64_t bytes = spare ? spare->counted : 0;
    for (plt_slot *s = m->idle; s; s = s->next) bytes += s->counted;
    plt_lock_give(&m->lock);
    return bytes;
}

void plt_budget_enter(plt_budget *b) {
    if (!b || !b->services.pool) return;
    const uint32_t repairing = UINT32_MAX;
    uint32_t now = plt_pool_epoch(b->services.pool), seen = atomic_load(&b->epoch);
    if (seen == now) return;
    if (seen != repairing &&
        atomic_compare_exchange_strong(&b->epoch, &seen, repairing)) {
        plt_lock_init(&b->lock);
        threads_init(b);
        b->first = b->last = NULL;
        atomic_store(&b->waiting, 0);
        atomic_store(&b->running, 0);
        int64_t idle = 0;
        for (plt_model *m = b->models; m; m = m->next_in_budget) idle += idle_of(m);
        atomic_store(&b->idle, idle);
        atomic_store(&b->epoch, now);
    }
    while (atomic_load(&b->epoch) != now) {
    }
}

void plt_budget_join(plt_budget *b, plt_model *m) {
    if (!b) return;
    plt_budget_enter(b);
    plt_lock_take(&b->lock);
    m->next_in_budget = b->models;
    b->models = m;
    plt_lock_give(&b->lock);
}

void plt_budget_leave(plt_budget *b, plt_model *m) {
    if (!b) return;
    plt_budget_enter(b);
    plt_lock_take(&b->lock);
    for (plt_model **at = &b->models; *at; at = &(*at)->next_in_budget) {
        if (*at != m) continue;
        *at = m->next_in_budget;
        break;
    }
    plt_lock_give(&b->lock);
}

int64_t plt_budget_limit(const plt_budget *b) {
    return b ? atomic_load_explicit(&b->limit, memory_order_relaxed) : -1;
}

void plt_budget_idle(plt_model *m, plt_slot *slot, int64_t bytes) {
    plt_budget *b = m->services.budget;
    if (b && bytes != slot->counted) atomic_fetch_add(&b->idle, bytes - slot->counted);
    slot->counted = bytes;
}

static int64_t in_use(plt_budget *b) {
    return atomic_load(&b->running) + atomic_load(&b->idle);
}

/* ---- taking ---- */

/* Reserves the bytes; the slot's own arena is now counted among them. */
static void admit(plt_budget *b, plt_slot *slot, int64_t need) {
    atomic_fetch_add(&b->running, need);
    atomic_fetch_sub(&b->idle, slot->counted);
    slot->counted = 0;
}

static bool admit_if_fits(plt_budget *b, plt_slot *slot, int64_t need, int64_t limit) {
    if (limit >= 0 && in_use(b) - slot->counted > limit - need) return false;
    admit(b, slot, need);
    return true;
}

/* Held: the lock. Frees idle arenas until the call fits; false if it does not fit. */
static bool admit_with_room(plt_budget *b, plt_slot *slot, int64_t need,
                            int64_t limit) {
    if (admit_if_fits(b, slot, need, limit)) return true;
    for (plt_model *m = b->models; m; m = m->next_in_budget) {
        plt_cut_idle(m, 0);
        if (admit_if_fits(b, slot, need, limit)) return true;
    }
    return false;
}

static void enqueue(plt_budget *b, waiter *w) {
    w->next = NULL;
    if (b->last) b->last->next = w;
    else b->first = w;
    b->last = w;
    atomic_fetch_add(&b->waiting, 1);
}

static void dequeue(plt_budget *b, waiter *w) {
    waiter *before = NULL;
    for (waiter *x = b->first; x != w; x = x->next) before = x;
    if (before) before->next = w->next;
    else b->first = w->next;
    if (b->last == w) b->last = before;
    atomic_fetch_sub(&b->waiting, 1);
    tell_all(b); /* another call may be the first now */
}

static int refuse(plt_budget *b, int64_t limit, int64_t need, int64_t *detail) {
    detail[0] = limit;
    detail[1] = need;
    detail[2] = in_use(b);
    return PLT_ERR_BUDGET;
}

/* Held: the lock, except while it waits. */
static int wait_for_room(plt_budget *b, plt_slot *slot, int64_t need, int64_t until,
                         int64_t *detail) {
    waiter self;
    enqueue(b, &self);
    int status = PLT_ERR_BUDGET;
    for (;;) {
        int64_t limit = atomic_load(&b->limit);
        if (limit < 0) {
            admit(b, slot, need);
            status = PLT_OK;
            break;
        }
        if (b->first == &self && admit_with_room(b, slot, need, limit)) {
            status = PLT_OK;
            break;
        }
        bool never = need > limit; /* a smaller limit was set */
        if (never || (until >= 0 && plt_clock(NULL) >= until)) {
            status = refuse(b, limit, need, detail);
            break;
        }
        wait_slice(b, until);
        if (!b->services.poll) continue;
        plt_lock_give(&b->lock);
        bool stop = b->services.poll() != 0;
        plt_lock_take(&b->lock);
        if (stop) {
            status = PLT_ERR_INTERRUPTED;
            break;
        }
    }
    dequeue(b, &self);
    return status;
}

int plt_budget_take(plt_budget *b, plt_model *m, plt_slot *slot, int64_t need,
                    int64_t *detail) {
    if (!b) return PLT_OK;
    if (atomic_load(&b->limit) < 0) {
        admit(b, slot, need);
        return PLT_OK;
    }
    int status = PLT_OK;
    plt_lock_take(&b->lock);
    int64_t limit = atomic_load(&b->limit), wait_ns = atomic_load(&b->wait_ns);
    if (b->first || !admit_with_room(b, slot, need, limit)) {
#ifdef PLT_NO_THREADS
        wait_ns = 0; /* no other thread could end a call */
#endif
        plt_slot_cut(m, slot, 0);
        if (wait_ns == 0 || need > limit) {
            status = refuse(b, limit, need, detail);
        } else {
            int64_t until = wait_ns < 0 ? -1 : plt_add_up(plt_clock(NULL), wait_ns);
            status = wait_for_room(b, slot, need, until, detail);
        }
    }
    plt_lock_give(&b->lock);
    return status;
}

int plt_budget_grow(plt_budget *b, plt_slot *slot, int64_t more, int64_t *detail) {
    if (!b) return PLT_OK;
    int status = PLT_OK;
    plt_lock_take(&b->lock);
    int64_t limit = atomic_load(&b->limit);
    if (!admit_with_room(b, slot, more, limit)) status = refuse(b, limit, more, detail);
    plt_lock_give(&b->lock);
    return status;
}

void plt_budget_give(plt_budget *b, int64_t bytes) {
    if (!b || bytes == 0) return;
    atomic_fetch_sub(&b->running, bytes);
    if (atomic_load(&b->waiting) == 0) return;
    plt_lock_take(&b->lock);
    tell_all(b);
    plt_lock_give(&b->lock);
}

/* ---- unused arenas ---- */

/* Held: the lock. Whether some model has a large arena that was not cut since a call
 * last left it. A model whose call still runs wakes the reaper when that call ends. */
static bool some_to_cut(plt_budget *b) {
    for (plt_model *m = b->models; m; m = m->next_in_budget) {
        if (atomic_load(&m->arena_bytes) > PLT_SMALL && atomic_load(&m->left) != m->left_cut)
            return true;
    }
    return false;
}

bool plt_budget_reap(plt_budget *b) {
    plt_lock_take(&b->lock);
    for (plt_model *m = b->models; m; m = m->next_in_budget) {
        int64_t now = atomic_load(&m->left);
        if (now == m->left_then && now != m->left_cut) {
            plt_cut_idle(m, PLT_SMALL);
            m->left_cut = now;
        }
        m->left_then = now;
    }
    bool more = some_to_cut(b);
    plt_lock_give(&b->lock);
    return more;
}

#ifndef PLT_NO_THREADS

/* Held: the lock. Sleeps until a call leaves a large arena. */
static void rest(plt_budget *b) {
    atomic_store(&b->resting, true);
    if (some_to_cut(b)) atomic_store(&b->resting, false);
    while (atomic_load(&b->resting) && !b->stop)
        pthread_cond_wait(&b->woken, &b->lock);
}

/* Held: the lock. */
static void wait_idle_time(plt_budget *b) {
    int64_t end = plt_add_up(plt_clock(NULL), b->services.idle_ns);
    struct timespec at = time_of(end);
    while (!b->stop && plt_clock(NULL) < end)
        pthread_cond_timedwait(&b->woken, &b->lock, &at);
}

static void *reap(void *p) {
    plt_budget *b = p;
    for (bool stop = false; !stop;) {
        bool more = plt_budget_reap(b);
        plt_lock_take(&b->lock);
        if (more) wait_idle_time(b);
        else rest(b);
        stop = b->stop;
        plt_lock_give(&b->lock);
    }
    return NULL;
}

/* Held: the lock. If no thread can be created, this is not tried again. */
static void start_reaper(plt_budget *b) {
    sigset_t all, old;
    pthread_attr_t attr;
    if (pthread_attr_init(&attr) != 0) return;
    pthread_attr_setstacksize(&attr, PLT_REAPER_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the reaper handles no signals */
    b->reaping = pthread_create(&b->reaper, &attr, reap, b) == 0;
#ifdef __linux__
    /* Named from here: it is never seen without its name. */
    if (b->reaping) pthread_setname_np(b->reaper, "pliant-idle");
#endif
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}

void plt_budget_left(plt_model *m) {
    plt_budget *b = m->services.budget;
    if (!b || !atomic_load(&b->resting)) return;
    if (atomic_load_explicit(&m->arena_bytes, memory_order_relaxed) <= PLT_SMALL)
        return;
    plt_lock_take(&b->lock);
    if (atomic_exchange(&b->resting, false)) {
        if (b->reaping) pthread_cond_signal(&b->woken);
        else start_reaper(b);
    }
    plt_lock_give(&b->lock);
}

static void threads_end(plt_budget *b) {
    plt_lock_take(&b->lock);
    b->stop = true;
    pthread_cond_signal(&b->woken);
    plt_lock_give(&b->lock);
    if (b->reaping) pthread_join(b->reaper, NULL);
    pthread_cond_destroy(&b->changed);
    pthread_cond_destroy(&b->woken);
}

#else

void plt_budget_left(plt_model *m) { (void)m; }
static void threads_end(plt_budget *b) { (void)b; }

#endif

/* ---- public functions ---- */

void plt_budget_destroy(plt_budget *b) {
    if (!b) return;
    plt_budget_enter(b);
    threads_end(b);
    plt_lock_destroy(&b->lock);
    plt_services s = b->services;
    plt_release(&s, b, sizeof *b);
}

void plt_budget_set(plt_budget *b, int64_t limit, int64_t wait_ns) {
    plt_budget_enter(b);
    plt_lock_take(&b->lock);
    atomic_store(&b->limit, limit < 0 ? -1 : limit);
    atomic_store(&b->wait_ns, wait_ns < 0 ? -1 : wait_ns);
    for (plt_model *m = b->models; m && limit >= 0; m = m->next_in_budget) {
        if (in_use(b) <= limit) break;
        plt_cut_idle(m, 0);
    }
    tell_all(b);
    plt_lock_give(&b->lock);
}

void plt_budget_read(plt_budget *b, plt_budget_info *out) {
    plt_budget_enter(b);
    *out = (plt_budget_info){
        .limit = atomic_load(&b->limit),
        .wait_ns = atomic_load(&b->wait_ns),
        .running = atomic_load(&b->running),
        .idle = atomic_load(&b->idle),
        .waiting = atomic_load(&b->waiting),
    };
}
