/* Offsets for buffers with known sizes and lifetimes, in as small an arena as can be
 * found in well under a millisecond.
 *
 * Optimal packing is NP-hard; the largest sum of live sizes is a lower bound, and
 * greedy placement usually meets it under one order or another. So: try a few orders,
 * stop at the first that meets the bound, else improve the best one by placing first
 * what did not fit. Ties are broken by number: same sizes, same offsets.
 */
#include "internal.h"

#include <string.h>

typedef struct item {
    int64_t major, minor; /* sort keys, descending then ascending */
    int64_t index;
} item;

typedef struct placed {
    int64_t begin, end;  /* bytes */
    int64_t first, last; /* steps */
} placed;

typedef struct packer {
    const plt_interval *intervals;
    int64_t n;          /* items that take space */
    int64_t bound;      /* no arena is smaller */
    int64_t best;       /* the smallest so far */
    int64_t *best_offsets;
    int64_t *offsets;   /* of the attempt under way */
    item *order;
    item *best_order;
    placed *placed;     /* by begin */
    int64_t stuck;      /* position in order at which an attempt gave up */
} packer;

static bool before(const item *a, const item *b) {
    if (a->major != b->major) return a->major > b->major;
    if (a->minor != b->minor) return a->minor < b->minor;
    return a->index < b->index;
}

static void sift(item *v, int64_t root, int64_t n) {
    for (int64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && before(&v[child], &v[child + 1])) child++;
        if (!before(&v[root], &v[child])) return;
        item t = v[root];
        v[root] = v[child];
        v[child] = t;
    }
}

/* Heap sort: in place, and qsort may call malloc. */
static void sort(item *v, int64_t n) {
    for (int64_t i = n / 2 - 1; i >= 0; i--) sift(v, i, n);
    for (int64_t i = n - 1; i > 0; i--) {
        item t = v[0];
        v[0] = v[i];
        v[i] = t;
        sift(v, 0, i);
    }
}

/* The largest sum of sizes live at one step, or -1 on overflow. events is
 * scratch for 2n: starts are numbered below ends, so that at one step they sort first,
 * as lifetimes are inclusive. */
static int64_t live_bound(const plt_interval *v, int64_t n, item *events) {
    int64_t count = 0, live = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (v[i].size == 0) continue;
        events[count++] = (item){.major = 0, .minor = v[i].first, .index = i};
        events[count++] = (item){.major = 0, .minor = v[i].last, .index = n + i};
    }
    sort(events, count);
    for (int64_t k = 0; k < count; k++) {
        int64_t i = events[k].index;
        if (i >= n) {
            live -= v[i - n].size;
        } else if (__builtin_add_overflow(live, v[i].size, &live)) {
            return -1;
        } else if (live > most) {
            most = live;
        }
    }
    return most;
}

/* Places the items of p->order one after another in the tightest gap that is free for
 * their whole life (or the lowest, if not best_fit); gives up once the arena cannot
 * beat the best. Returns whether it became the best. */
static bool attempt(packer *p, bool best_fit) {
    int64_t count = 0, extent = 0;
    for (int64_t k = 0; k < p->n; k++) {
        const plt_interval *v = &p->intervals[p->order[k].index];
        int64_t top = 0, at = -1, slack = INT64_MAX;
        for (int64_t j = 0; j < count; j++) {
            const placed *q = &p->placed[j];
            if (q->last < v->first || v->last < q->first) continue;
            int64_t gap = q->begin - top;
            if (gap >= v->size && gap - v->size < slack) {
                at = top;
                slack = gap - v->size;
                if (!best_fit || slack == 0) break;
            }
            if (q->end > top) top = q->end;
        }
        if (at < 0) at = top;
        int64_t end;
        p->stuck = k;
        if (__builtin_add_overflow(at, v->size, &end)) return false;
        if (end >= p->best) return false;
        if (end > extent) extent = end;
        p->offsets[p->order[k].index] = at;

        int64_t low = 0, high = count;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (p->placed[middle].begin <= at) low = middle + 1;
            else high = middle;
        }
        memmove(&p->placed[low + 1], &p->placed[low],
                (size_t)(count - low) * sizeof(placed));
        p->placed[low] = (placed){at, end, v->first, v->last};
        count++;
    }
    p->best = extent;
    int64_t *t = p->best_offsets;
    p->best_offsets = p->offsets;
    p->offsets = t;
    memcpy(p->best_order, p->order, (size_t)p->n * sizeof(item));
    return true;
}

/* As attempt, for items in order of first step: what ended is forgotten, so the cost is
 * items times live items however many items there are. */
static void sweep(packer *p, bool best_fit) {
    int64_t count = 0, extent = 0;
    for (int64_t k = 0; k < p->n; k++) {
        const plt_interval *v = &p->intervals[p->order[k].index];
        int64_t kept = 0, top = 0, at = -1, slack = INT64_MAX;
        for (int64_t j = 0; j < count; j++) {
            placed q = p->placed[j];
            if (q.last < v->first) continue;
            p->placed[kept++] = q;
            int64_t gap = q.begin - top;
            if (gap >= v->size && gap - v->size < slack && (best_fit || at < 0)) {
                at = top;
                slack = gap - v->size;
            }
            top = q.end;
        }
        count = kept;
        if (at < 0) at = top;
        int64_t end;
        if (__builtin_add_overflow(at, v->size, &end)) return;
        if (end >= p->best) return;
        if (end > extent) extent = end;
        p->offsets[p->order[k].index] = at;
        int64_t j = count++;
        for (; j > 0 && p->placed[j - 1].begin > at; j--) p->placed[j] = p->placed[j - 1];
        p->placed[j] = (placed){at, end, v->first, v->last};
    }
    p->best = extent;
    int64_t *t = p->best_offsets;
    p->best_offsets = p->offsets;
    p->offsets = t;
    memcpy(p->best_order, p->order, (size_t)p->n * sizeof(item));
}

enum { BY_FIRST, BY_SIZE, BY_AREA, BY_LIFE };

static void arrange(packer *p, int how) {
    for (int64_t k = 0; k < p->n; k++) {
        item *it = &p->order[k];
        const plt_interval *v = &p->intervals[it->index];
        int64_t life = v->last - v->first + 1, area;
        switch (how) {
        case BY_FIRST:
            it->major = 0;
            it->minor = v->first;
            break;
        case BY_SIZE:
            it->major = v->size;
            it->minor = -life;
            break;
        case BY_AREA:
            if (__builtin_mul_overflow(v->size, life, &area)) area = INT64_MAX;
            it->major = area;
            it->minor = v->first;
            break;
        default:
            it->major = life;
            it->minor = -v->size;
        }
    }
    sort(p->order, p->n);
    if (how == BY_FIRST) {
        /* among those that start together, the largest first; a second pass, as the
         * comparison has room for two keys */
        for (int64_t a = 0, b; a < p->n; a = b) {
            int64_t first = p->order[a].minor;
            for (b = a; b < p->n && p->order[b].minor == first; b++) {
                p->order[b].major = p->intervals[p->order[b].index].size;
            }
            sort(p->order + a, b - a);
        }
    }
}

/* Placing costs n * n / 2 steps of about a nanosecond; beyond this many items only the
 * sweep is affordable. */
#define PLT_DENSE_ITEMS 1024
/* Steps that improve() may spend: a fraction of a millisecond. */
#define PLT_IMPROVE_STEPS 300000

/* Conflict-driven: the item that could not be placed below the best arena so far goes
 * to the front, and all are placed again. */
static void improve(packer *p) {
    int64_t rounds = PLT_IMPROVE_STEPS / (p->n * p->n / 2 + 1);
    if (rounds > 64) rounds = 64;
    memcpy(p->order, p->best_order, (size_t)p->n * sizeof(item));
    for (int64_t r = 0; r < rounds && p->best > p->bound; r++) {
        if (attempt(p, (r & 1) == 0)) continue;
        item stuck = p->order[p->stuck];
        memmove(p->order + 1, p->order, (size_t)p->stuck * sizeof(item));
        p->order[0] = stuck;
    }
}

int plt_pack(const plt_services *s, const plt_interval *intervals, int64_t n,
             int64_t *offsets, int64_t *arena, int64_t *bound) {
    *arena = *bound = 0;
    if (n == 0) return PLT_OK;
    size_t count = (size_t)n;
    size_t bytes = count * (2 * sizeof(int64_t) + 3 * sizeof(item) + sizeof(placed));
    char *block = plt_allocate(s, bytes);
    if (!block) return PLT_ERR_MEMORY;

    packer p = {.intervals = intervals, .best = INT64_MAX};
    p.order = (item *)block; /* [2n]: also the events of live_bound */
    p.best_order = p.order + 2 * count;
    p.placed = (placed *)(p.best_order + count);
    p.offsets = (int64_t *)(p.placed + count);
    p.best_offsets = p.offsets + count;

    int status = PLT_OK;
    p.bound = live_bound(intervals, n, p.order);
    if (p.bound < 0) {
        status = PLT_ERR_OVERFLOW;
        goto done;
    }
    for (int64_t i = 0; i < n; i++) {
        if (intervals[i].size > 0) p.order[p.n++] = (item){.index = i};
    }
    if (p.n > 0) {
        arrange(&p, BY_FIRST);
        sweep(&p, true);
        if (p.best > p.bound) sweep(&p, false);
        if (p.n <= PLT_DENSE_ITEMS) {
            static const int orders[] = {BY_SIZE, BY_AREA, BY_LIFE};
            for (int k = 0; k < 3 && p.best > p.bound; k++) {
                arrange(&p, orders[k]);
                attempt(&p, true);
                if (p.best > p.bound) attempt(&p, false);
            }
            if (p.best > p.bound && p.best < INT64_MAX) improve(&p);
        }
        if (p.best == INT64_MAX) {
            status = PLT_ERR_OVERFLOW;
            goto done;
        }
        *arena = p.best;
    }
    for (int64_t i = 0; i < n; i++) {
        offsets[i] = intervals[i].size > 0 ? p.best_offsets[i] : 0;
    }
    *bound = p.bound;
done:
    plt_release(s, block, bytes);
    return status;
}
