/* Packs buffers with known sizes and lifetimes into as small an arena as can be found
 * in well under a millisecond.
 *
 * Optimal packing is NP-hard. The largest sum of live sizes is a lower bound, and
 * greedy placement often reaches it in one order or another. So the packer tries a few
 * orders, stops at the first that reaches the bound, and otherwise improves the best
 * order by moving the item that did not fit forward. The effort is counted in
 * comparisons, never in time, and ties are broken by number, so that the same sizes
 * give the same offsets.
 *
 * To place an item, the packer looks at those that are live at the same time. If there
 * are few items, it scans all that have been placed, by address. If there are many, it
 * lists the pairs with overlapping lifetimes once, so that the cost is proportional to
 * the number of pairs. */
#include "internal.h"

#include <string.h>

/* An arena within 1/512 of the bound is not improved. */
#define PLT_CLOSE 512
/* Up to this many items, all of them are scanned. */
#define PLT_FEW 1024
/* Scanning an adjacent item is this many times cheaper than following a list. */
#define PLT_NEAR 4
/* Lists of pairs take eight bytes each; with more, only the sweep is tried. */
#define PLT_MOST_PAIRS (1 << 20)

typedef struct item {
    int64_t major, minor; /* sort keys, descending then ascending */
    int64_t index;
} item;

typedef struct placed {
    int64_t begin, end;  /* bytes */
    int64_t first, last; /* steps */
} placed;

typedef struct packer {
    const plt_interval *intervals; /* [n_all] */
    int64_t n_all;
    int64_t n;      /* items that take space */
    int64_t bound;  /* no arena is smaller */
    int64_t enough; /* an arena of this size or less is not improved */
    int64_t best;   /* the smallest so far */
    int64_t effort; /* left */
    int64_t stuck;  /* position in order at which an attempt gave up */
    /* scratch */
    item *order;           /* [2 * n_all] */
    item *best_order;      /* [n_all] */
    placed *placed;        /* [n_all] */
    int64_t *offsets;      /* [n_all] of the attempt under way; -1: not placed */
    int64_t *best_offsets; /* [n_all] */
    /* items live together with i: together[start[i] .. start[i + 1]) */
    int64_t *start; /* [n_all + 1] */
    int32_t *together; /* NULL: items are few */
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

/* The largest sum of sizes live at one step, or -1 on overflow. events is scratch for
 * 2n: starts are numbered below ends, so that at one step they sort first, as lifetimes
 * are inclusive. */
static int64_t live_bound(const plt_interval *v, int64_t n, item *events) {
    int64_t count = 0, live = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (v[i].size == 0) continue;
        events[count++] = (item){.minor = v[i].first, .index = i};
        events[count++] = (item){.minor = v[i].last, .index = n + i};
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

/* Records the current attempt, which is complete within extent, as the best. */
static void keep(packer *p, int64_t extent) {
    p->best = extent;
    int64_t *t = p->best_offsets;
    p->best_offsets = p->offsets;
    p->offsets = t;
    memcpy(p->best_order, p->order, (size_t)p->n * sizeof(item));
}

static void insert_by_begin(placed *v, int64_t count, placed q) {
    for (; count > 0 && v[count - 1].begin > q.begin; count--) v[count] = v[count - 1];
    v[count] = q;
}

/* Places items in order of first step. Items that have ended are dropped, so that the
 * cost is items times live items. best_fit takes the tightest gap, else the lowest. */
static void sweep(packer *p, bool best_fit) {
    int64_t count = 0, extent = 0;
    for (int64_t k = 0; k < p->n; k++) {
        const plt_interval *v = &p->intervals[p->order[k].index];
        int64_t kept = 0, top = 0, at = -1, slack = INT64_MAX, end;
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
        if (at < 0) at = top;
        if (__builtin_add_overflow(at, v->size, &end) || end >= p->best) return;
        if (end > extent) extent = end;
        p->offsets[p->order[k].index] = at;
        insert_by_begin(p->placed, kept, (placed){at, end, v->first, v->last});
        count = kept + 1;
    }
    keep(p, extent);
}

/* Lists in p->placed, by address, the items that are live together with item i. If
 * there are few items, all that were placed are there already. Returns their number. */
static int64_t list_neighbours(packer *p, int64_t i, int64_t k) {
    if (!p->together) {
        p->effort -= k / PLT_NEAR + 1;
        return k;
    }
    int64_t count = 0;
    for (int64_t e = p->start[i]; e < p->start[i + 1]; e++) {
        const plt_interval *v = &p->intervals[p->together[e]];
        int64_t begin = p->offsets[p->together[e]];
        if (begin < 0) continue;
        placed q = {begin, begin + v->size, v->first, v->last};
        insert_by_begin(p->placed, count++, q);
    }
    p->effort -= p->start[i + 1] - p->start[i] + count * count / 4 + 1;
    return count;
}

/* Places the items in the order given; gives up once the arena cannot beat the best. */
static bool attempt(packer *p, bool best_fit) {
    int64_t extent = 0;
    for (int64_t i = 0; i < p->n_all; i++) p->offsets[i] = -1;
    for (int64_t k = 0; k < p->n; k++) {
        int64_t i = p->order[k].index, count = list_neighbours(p, i, k);
        const plt_interval *v = &p->intervals[i];
        int64_t top = 0, at = -1, slack = INT64_MAX, end;
        for (int64_t j = 0; j < count; j++) {
            const placed *q = &p->placed[j];
            if (q->first > v->last || q->last < v->first) continue;
            int64_t gap = q->begin - top;
            if (gap >= v->size && gap - v->size < slack) {
                at = top;
                slack = gap - v->size;
                if (!best_fit || slack == 0) break;
            }
            if (q->end > top) top = q->end;
        }
        if (at < 0) at = top;
        p->stuck = k;
        if (__builtin_add_overflow(at, v->size, &end) || end >= p->best) return false;
        if (end > extent) extent = end;
        p->offsets[i] = at;
        placed made = {at, end, v->first, v->last};
        if (!p->together) insert_by_begin(p->placed, count, made);
    }
    keep(p, extent);
    return true;
}

enum { BY_FIRST, BY_SIZE, BY_AREA, BY_LIFE };

static void arrange(packer *p, int how) {
    for (int64_t k = 0; k < p->n; k++) {
        item *it = &p->order[k];
        const plt_interval *v = &p->intervals[it->index];
        int64_t life = v->last - v->first + 1, area;
        switch (how) {
        case BY_FIRST:
            it->major = -v->first;
            it->minor = -v->size;
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
}

/* Lists the pairs of items that are live together; p->order is by first step. start
 * holds counts first, then positions. Returns false if there are too many pairs, or no
 * memory. */
static bool list_pairs(packer *p, const plt_services *s, size_t *bytes) {
    int64_t pairs = 0;
    for (int fill = 0; fill < 2; fill++) {
        int64_t live = 0; /* as indices in placed[].begin */
        for (int64_t k = 0; k < p->n; k++) {
            int64_t i = p->order[k].index, kept = 0;
            for (int64_t j = 0; j < live; j++) {
                int64_t other = p->placed[j].begin;
                if (p->intervals[other].last < p->intervals[i].first) continue;
                p->placed[kept++].begin = other;
                if (fill) {
                    p->together[p->start[i]++] = (int32_t)other;
                    p->together[p->start[other]++] = (int32_t)i;
                } else {
                    p->start[i]++;
                    p->start[other]++;
                }
            }
            p->placed[kept].begin = i;
            live = kept + 1;
            pairs += fill ? 0 : kept;
            if (pairs > PLT_MOST_PAIRS) return false;
        }
        int64_t sum = 0;
        for (int64_t i = 0; i <= p->n_all; i++) {
            /* counts become starts; after filling, each start has moved to the next */
            int64_t t = p->start[i];
            p->start[i] = sum;
            sum = fill ? t : sum + t;
        }
        if (!fill) {
            *bytes = (size_t)(2 * pairs + 1) * sizeof(int32_t);
            p->together = plt_allocate_raw(s, *bytes);
            if (!p->together) return false;
        }
    }
    return true;
}

/* Moves the item that did not fit below the best arena towards the front (half-way the
 * first time, to the very front from then on), and places all items again. */
static void improve(packer *p) {
    memcpy(p->order, p->best_order, (size_t)p->n * sizeof(item));
    for (int64_t k = 0; k < p->n; k++) p->order[k].major = 0;
    for (int64_t round = 0; p->best > p->enough && p->effort > 0; round++) {
        if (attempt(p, (round & 1) == 0)) continue;
        item stuck = p->order[p->stuck];
        int64_t to = stuck.major++ ? 0 : p->stuck / 2;
        item *hole = p->order + to;
        memmove(hole + 1, hole, (size_t)(p->stuck - to) * sizeof(item));
        *hole = stuck;
    }
}

static void pack(packer *p, const plt_services *s) {
    size_t bytes = 0;
    p->best = INT64_MAX;
    arrange(p, BY_FIRST);
    sweep(p, true);
    if (p->best > p->enough) sweep(p, false);
    if (p->best <= p->enough) return;
    if (p->n > PLT_FEW && !list_pairs(p, s, &bytes)) return;
    static const int orders[] = {BY_SIZE, BY_AREA, BY_LIFE};
    for (int k = 0; k < 3 && p->best > p->enough && p->effort > 0; k++) {
        arrange(p, orders[k]);
        attempt(p, true);
        if (p->best > p->enough) attempt(p, false);
    }
    if (p->best < INT64_MAX) improve(p);
    plt_release(s, p->together, bytes);
}

int plt_pack(const plt_services *s, const plt_interval *intervals, int64_t n,
             int64_t enough, int64_t effort, int64_t *offsets, int64_t *arena,
             int64_t *bound) {
    *arena = *bound = 0;
    if (n == 0) return PLT_OK;
    size_t count = (size_t)n;
    size_t each = 3 * sizeof(item) + sizeof(placed) + 3 * sizeof(int64_t);
    size_t bytes = count * each + sizeof(int64_t);
    char *block = plt_allocate(s, bytes);
    if (!block) return PLT_ERR_MEMORY;

    packer p = {.intervals = intervals, .n_all = n};
    p.order = (item *)block;
    p.best_order = p.order + 2 * count;
    p.placed = (placed *)(p.best_order + count);
    p.offsets = (int64_t *)(p.placed + count);
    p.best_offsets = p.offsets + count;
    p.start = p.best_offsets + count;

    int status = PLT_OK;
    p.bound = live_bound(intervals, n, p.order);
    for (int64_t i = 0; i < n; i++) {
        if (intervals[i].size > 0) p.order[p.n++] = (item){.index = i};
    }
    p.effort = effort;
    if (__builtin_add_overflow(p.bound, p.bound / PLT_CLOSE, &p.enough)) {
        p.enough = p.bound;
    }
    if (enough > p.enough) p.enough = enough;
    if (p.bound > 0) pack(&p, s);
    if (p.bound < 0 || p.best == INT64_MAX) {
        status = PLT_ERR_OVERFLOW;
    } else {
        *arena = p.best;
        *bound = p.bound;
        for (int64_t i = 0; i < n; i++) {
            offsets[i] = intervals[i].size > 0 ? p.best_offsets[i] : 0;
        }
    }
    plt_release(s, block, bytes);
    return status;
}
