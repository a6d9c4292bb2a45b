/* The thread pool: static chunks, one region at a time.
 *
 * A worker waits for its ticket to change. It spins for a while, because the next
 * region of a running model is microseconds away, then parks on a condition variable.
 * The caller waits for its workers in the same way.
 *
 * One side writes the ticket and then reads the parked flag; the other writes the flag
 * and then reads the ticket. Both accesses are sequentially consistent, so at least one
 * side sees the other's write, and no wake-up is lost.
 *
 * A caller that has finished its own chunk runs those that no worker has begun, so a
 * worker that gets no core costs at most the chunk it would have run.
 *
 * The system may wake a thread on the core that its caller is using, and leave it there
 * for some milliseconds even if another core is idle. Three measures prevent this. A
 * sleeping worker's affinity excludes that core before it is woken. A caller whose last
 * region had a late thread yields first. A thread that finds itself on its caller's
 * core moves away before it claims a chunk; until then, the caller may claim the chunk.
 *
 * A pool may be given another library's team of threads (services.team_parallel). Then
 * its members run the chunks, each its own first, and no workers are started. OpenMP
 * keeps a team per calling thread, so only the first caller uses its team: otherwise
 * each thread of a server would have a team, and these would compete for the cores.
 *
 * If a call uses more than half of the cores, two concurrent callers keep all cores
 * busy by themselves. For a while after they have met in the pool, every region runs in
 * its caller, over the same chunks.
 *
 * Fork: a child has no workers. It is detected by a word in a page that the system
 * wipes on fork; where there is no such page, by the process id. */
#define _GNU_SOURCE
#include "internal.h"

#ifdef PLT_NO_THREADS

struct plt_pool {
    plt_services services;
};

plt_pool *plt_pool_create(const plt_services *services) {
    plt_services s;
    plt_services_copy(&s, services);
    plt_pool *pool = plt_allocate(&s, sizeof *pool);
    if (pool) pool->services = s;
    return pool;
}

void plt_pool_destroy(plt_pool *pool) {
    if (!pool) return;
    plt_services s = pool->services;
    plt_release(&s, pool, sizeof *pool);
}

uint32_t plt_pool_epoch(plt_pool *pool) {
    (void)pool;
    return 0;
}

#else

#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define PLT_MAX_WORKERS 255
#define PLT_SPIN_NS 50000  /* spinning time before parking */
#define PLT_POLITE_NS 1000 /* spinning time before yielding */
#define PLT_CROWDED_NS 2000000 /* time without helpers after callers met */
#define PLT_ASLEEP_NS 1000000  /* idle time after which a team may sleep */
#define PLT_YIELDS 4           /* of a caller, to let its team start */
#define PLT_LATE_NS 10000000   /* how long a caller yields to late members */
/* Generated code keeps tiles in registers and buffers in the arena. */
#define PLT_STACK_BYTES (1024 * 1024)

#if defined(__x86_64__) || defined(__i386__)
#define pause_cpu() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define pause_cpu() __asm__ volatile("yield")
#else
#define pause_cpu() ((void)0)
#endif

/* A number that one thread waits on until it differs from the last value seen. */
typedef struct signal_word {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t parked;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} signal_word;

typedef struct worker {
    signal_word ticket;
    plt_pool *pool;
    pthread_t thread;
    int64_t chunk;
    int kept_off; /* 1 + the core it must not wake on; 0: none */
    _Atomic uint32_t claimed; /* the last ticket whose chunk was claimed */
} worker;

struct plt_pool {
    plt_services services;
    _Atomic int *alive;  /* 1, and 0 after a fork; NULL if pages cannot be wiped */
    _Atomic int process; /* id of the process that owns the workers */
    _Atomic uint32_t epoch;
    _Atomic int64_t spin_ns;
    _Atomic uint32_t busy; /* a region is running */
    _Atomic int64_t crowded_until; /* ns; callers have met recently */
    _Atomic int64_t cpus;          /* online; 0: not yet known */
    _Atomic uintptr_t team_caller; /* the thread whose team is used; 0: none yet */
    _Atomic uint32_t stop;
    int64_t n_workers;
    bool refused; /* creating a thread failed: not tried again */
    worker *workers[PLT_MAX_WORKERS];
    /* the region */
    plt_task fn;
    void *args;
    int64_t units, chunks;
    _Atomic int cpu;    /* of the caller */
    bool late;          /* a thread was late in the last region */
    int64_t team_ended; /* ns; end of the team's last region */
    _Alignas(64) _Atomic int64_t pending; /* chunks for workers, not yet finished */
    signal_word finished;                 /* changes when pending reaches 0 */
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void word_init(signal_word *w) {
    atomic_init(&w->value, 0);
    atomic_init(&w->parked, 0);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->wake, NULL);
}

static void word_destroy(signal_word *w) {
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->mutex);
}

static void word_bump(signal_word *w) {
    atomic_fetch_add(&w->value, 1);
    if (!atomic_load(&w->parked)) return;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->mutex);
}

static bool word_changed(signal_word *w, uint32_t seen) {
    return atomic_load_explicit(&w->value, memory_order_acquire) != seen;
}

static void word_wait(signal_word *w, uint32_t seen, int64_t spin_ns) {
    if (word_changed(w, seen)) return;
    if (spin_ns > 0) {
        int64_t start = now_ns(), spent = 0;
        do {
            for (int i = 0; i < 32; i++) {
                if (word_changed(w, seen)) return;
                pause_cpu();
            }
            /* on a loaded machine the other side may be waiting for this core */
            if (spent > PLT_POLITE_NS) sched_yield();
            spent = now_ns() - start;
        } while (spent < spin_ns);
    }
    pthread_mutex_lock(&w->mutex);
    atomic_store(&w->parked, 1);
    while (atomic_load(&w->value) == seen) pthread_cond_wait(&w->wake, &w->mutex);
    atomic_store(&w->parked, 0);
    pthread_mutex_unlock(&w->mutex);
}

static int this_cpu(void) {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Moves the calling thread off a core, if it is there and others are allowed. */
static void leave_cpu(int cpu) {
#ifdef __linux__
    if (cpu < 0 || this_cpu() != cpu) return;
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0) return;
    if (sched_setaffinity(0, sizeof others, &others) == 0) {
        sched_setaffinity(0, sizeof allowed, &allowed);
    }
#else
    (void)cpu;
#endif
}

/* Lets a sleeping worker wake on any core but its caller's. */
static void keep_off(worker *w, int cpu) {
#ifdef __linux__
    if (cpu < 0 || w->kept_off == cpu + 1) return;
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < 2)
        return;
    CPU_CLR(cpu, &cores);
    if (pthread_setaffinity_np(w->thread, sizeof cores, &cores) == 0)
        w->kept_off = cpu + 1;
#else
    (void)w, (void)cpu;
#endif
}

/* Chunk i of n: the first units % n chunks are one longer. */
static void run_chunk(plt_task fn, void *args, int64_t units, int64_t n, int64_t i) {
    int64_t base = units / n, longer = units % n;
    int64_t begin = i * base + (i < longer ? i : longer);
    fn(args, begin, begin + base + (i < longer), i);
}

/* Claims the chunk of a worker's ticket. The region does not end before it has run. */
static bool claim(worker *w, uint32_t ticket) {
    uint32_t before = ticket - 1;
    return atomic_compare_exchange_strong(&w->claimed, &before, ticket);
}

static void *work(void *p) {
    worker *w = p;
    plt_pool *pool = w->pool;
    for (uint32_t seen = 0;; seen++) {
        word_wait(&w->ticket, seen, pool->spin_ns);
        if (atomic_load(&pool->stop)) return NULL;
        leave_cpu(atomic_load_explicit(&pool->cpu, memory_order_relaxed));
        if (!claim(w, seen + 1)) continue;
        run_chunk(pool->fn, pool->args, pool->units, pool->chunks, w->chunk);
        if (atomic_fetch_sub(&pool->pending, 1) == 1) word_bump(&pool->finished);
    }
}

static int64_t cpu_count(plt_pool *pool) {
    int64_t cpus = atomic_load_explicit(&pool->cpus, memory_order_relaxed);
    if (cpus == 0) {
        cpus = sysconf(_SC_NPROCESSORS_ONLN);
        if (cpus < 1) cpus = 1;
        atomic_store_explicit(&pool->cpus, cpus, memory_order_relaxed);
    }
    return cpus;
}

/* Acquires the pool for a region of n chunks; false if the caller must run it alone. */
static bool take(plt_pool *pool, int64_t n) {
    bool matters = 2 * n > cpu_count(pool); /* two such callers take every core */
    if (matters && atomic_load_explicit(&pool->crowded_until, memory_order_relaxed) >
                       0) {
        if (now_ns() < atomic_load(&pool->crowded_until)) return false;
        atomic_store(&pool->crowded_until, 0);
    }
    if (!atomic_exchange(&pool->busy, 1)) return true;
    if (matters) atomic_store(&pool->crowded_until, now_ns() + PLT_CROWDED_NS);
    return false;
}

/* Held: busy. Starts workers until there are n, or no more can be created. */
static void start_workers(plt_pool *pool, int64_t n) {
    if (n > PLT_MAX_WORKERS) n = PLT_MAX_WORKERS;
    if (pool->n_workers >= n || pool->refused) return;
    sigset_t all, old;
    pthread_attr_t attr;
    if (pthread_attr_init(&attr) != 0) return;
    pthread_attr_setstacksize(&attr, PLT_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* workers handle no signals */
    while (pool->n_workers < n) {
        worker *w = pool->workers[pool->n_workers];
        if (!w) { /* else it is left from before a fork */
            w = plt_allocate(&pool->services, sizeof *w);
            if (!w) {
                pool->refused = true;
                break;
            }
            pool->workers[pool->n_workers] = w;
        }
        w->pool = pool;
        w->chunk = pool->n_workers + 1;
        w->kept_off = 0;
        atomic_init(&w->claimed, 0);
        word_init(&w->ticket);
        if (pthread_create(&w->thread, &attr, work, w) != 0) {
            pool->refused = true;
            break;
        }
        pool->n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    pool->spin_ns = pool->n_workers < cpu_count(pool) ? PLT_SPIN_NS : 0;
}

uint32_t plt_pool_epoch(plt_pool *pool) {
    _Atomic int *word = pool->alive ? pool->alive : &pool->process;
    int ready = pool->alive ? 1 : (int)getpid();
    int seen = atomic_load(word);
    if (seen != ready) {
        if (seen != -1 && atomic_compare_exchange_strong(word, &seen, -1)) {
            pool->n_workers = 0;
            pool->refused = false;
            atomic_store(&pool->busy, 0);
            atomic_store(&pool->pending, 0);
            word_init(&pool->finished);
            atomic_fetch_add(&pool->epoch, 1);
            atomic_store(word, ready);
        }
        while (atomic_load(word) != ready) sched_yield();
    }
    return atomic_load_explicit(&pool->epoch, memory_order_relaxed);
}

plt_pool *plt_pool_create(const plt_services *services) {
    plt_services s;
    plt_services_copy(&s, services);
    plt_pool *pool = plt_allocate(&s, sizeof *pool);
    if (!pool) return NULL;
    pool->services = s;
    word_init(&pool->finished);
    atomic_store(&pool->process, (int)getpid());
#if defined(__linux__) && defined(MADV_WIPEONFORK)
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *p = mmap(NULL, page, access, flags, -1, 0);
    if (p != MAP_FAILED && madvise(p, page, MADV_WIPEONFORK) == 0) {
        pool->alive = p;
        atomic_store(pool->alive, 1);
    } else if (p != MAP_FAILED) {
        munmap(p, page);
    }
#endif
    return pool;
}

void plt_pool_destroy(plt_pool *pool) {
    if (!pool) return;
    plt_pool_epoch(pool);
    plt_services s = pool->services;
    atomic_store(&pool->stop, 1);
    for (int64_t i = 0; i < pool->n_workers; i++) word_bump(&pool->workers[i]->ticket);
    for (int64_t i = 0; i < pool->n_workers; i++) {
        pthread_join(pool->workers[i]->thread, NULL);
        word_destroy(&pool->workers[i]->ticket);
    }
    for (int64_t i = 0; i < PLT_MAX_WORKERS; i++) {
        if (pool->workers[i]) plt_release(&s, pool->workers[i], sizeof(worker));
    }
    word_destroy(&pool->finished);
#ifdef __linux__
    if (pool->alive) munmap((void *)pool->alive, (size_t)sysconf(_SC_PAGESIZE));
#endif
    plt_release(&s, pool, sizeof *pool);
}

#endif

#ifndef PLT_NO_THREADS

typedef void (*team_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*team_number_fn)(void);

typedef struct team_region {
    plt_task fn;
    void *args;
    int64_t units, chunks;
    team_number_fn number, size;
    int cpu; /* of the caller */
    bool patient; /* yields first, as others may be asleep or late */
    bool late;    /* a member was late */
    _Atomic int64_t arrived;
    atomic_flag taken[PLT_MAX_WORKERS + 1];
} team_region;

/* Each member runs the chunk of its number, then those that nobody has claimed: the
 * team may be smaller than requested, or slow to start. At the end the library waits
 * for all members, and spins on a core that one of them may need. */
static void team_member(void *p) {
    team_region *r = p;
    int64_t own = r->number();
    atomic_fetch_add(&r->arrived, 1);
    if (own != 0) leave_cpu(r->cpu);
    for (int i = 0; r->patient && own == 0 && i < PLT_YIELDS; i++) {
        if (atomic_load(&r->arrived) >= r->size()) break;
        sched_yield();
    }
    for (int64_t k = 0; k < r->chunks; k++) {
        int64_t i = (own + k) % r->chunks;
        if (!atomic_flag_test_and_set(&r->taken[i]))
            run_chunk(r->fn, r->args, r->units, r->chunks, i);
    }
    if (own != 0) return;
    r->late = atomic_load(&r->arrived) < r->size();
    if (!r->late) return;
    int64_t start = now_ns();
    while (atomic_load(&r->arrived) < r->size() && now_ns() - start < PLT_LATE_NS)
        sched_yield();
}

static bool run_on_team(plt_pool *pool, plt_task fn, void *args, int64_t units,
                        int64_t n) {
    const plt_services *s = &pool->services;
    bool forked = atomic_load_explicit(&pool->epoch, memory_order_relaxed) != 0;
    if (!s->team_parallel || !s->team_number || !s->team_size || forked ||
        n > PLT_MAX_WORKERS)
        return false;
    uintptr_t self = (uintptr_t)pthread_self(), owner = 0;
    if (!atomic_compare_exchange_strong(&pool->team_caller, &owner, self) &&
        owner != self)
        return false;
    team_region region;
    region.fn = fn;
    region.args = args;
    region.units = units;
    region.chunks = n;
    region.cpu = this_cpu();
    region.patient = pool->late || now_ns() - pool->team_ended > PLT_ASLEEP_NS;
    region.late = false;
    atomic_init(&region.arrived, 0);
    memcpy(&region.number, &s->team_number, sizeof region.number);
    memcpy(&region.size, &s->team_size, sizeof region.size);
    for (int64_t i = 0; i < n; i++) atomic_flag_clear(&region.taken[i]);
    team_fn parallel;
    memcpy(&parallel, &s->team_parallel, sizeof parallel);
    parallel(team_member, &region, (unsigned)n, 0);
    pool->team_ended = now_ns();
    pool->late = region.late;
    return true;
}

#endif

#ifndef PLT_NO_THREADS

/* Held: busy. False if there are no workers. */
static bool run_on_workers(plt_pool *pool, plt_task fn, void *args, int64_t units,
                           int64_t n) {
    start_workers(pool, n - 1);
    int64_t helped = n - 1 < pool->n_workers ? n - 1 : pool->n_workers;
    if (helped == 0) return false;
    uint32_t seen = atomic_load(&pool->finished.value);
    pool->fn = fn;
    pool->args = args;
    pool->units = units;
    pool->chunks = n;
    int cpu = this_cpu();
    atomic_store_explicit(&pool->cpu, cpu, memory_order_relaxed);
    atomic_store(&pool->pending, helped);
    for (int64_t i = 0; i < helped; i++) {
        worker *w = pool->workers[i];
        if (atomic_load(&w->ticket.parked)) keep_off(w, cpu);
        word_bump(&w->ticket);
    }
    if (pool->late) sched_yield();
    run_chunk(fn, args, units, n, 0);
    for (int64_t i = helped + 1; i < n; i++) run_chunk(fn, args, units, n, i);
    int64_t taken = 0;
    for (int64_t i = 0; i < helped; i++) {
        worker *w = pool->workers[i];
        if (!claim(w, atomic_load_explicit(&w->ticket.value, memory_order_relaxed)))
            continue;
        run_chunk(fn, args, units, n, w->chunk);
        taken++;
    }
    pool->late = taken > 0;
    /* The thread that finishes the last chunk signals `finished`. If that is a worker,
     * the caller must consume the signal even if nothing is pending any more: otherwise
     * it would end the next region. */
    if (taken == 0 || atomic_fetch_sub(&pool->pending, taken) > taken)
        word_wait(&pool->finished, seen, pool->spin_ns);
    return true;
}

#endif

static void run_serially(plt_task fn, void *args, int64_t units, int64_t n) {
    int64_t base = units / n, longer = units % n, begin = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t end = begin + base + (i < longer);
        fn(args, begin, end, i);
        begin = end;
    }
}

void plt_parallel(plt_call *call, plt_task fn, void *args, int64_t units,
                  int64_t grain) {
    if (units <= 0) return;
    int64_t n = grain > 1 ? units / grain : units;
    if (n > call->threads) n = call->threads;
    if (n < 1) n = 1;
#ifndef PLT_NO_THREADS
    plt_pool *pool = call->pool;
    if (n > 1 && pool && take(pool, n)) {
        bool done = run_on_team(pool, fn, args, units, n) ||
                    run_on_workers(pool, fn, args, units, n);
        atomic_store(&pool->busy, 0);
        if (done) return;
    }
#endif
    run_serially(fn, args, units, n);
}
