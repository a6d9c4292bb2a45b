/* The memory of one call: pages mapped for exactly what its plan needs.
 *
 * Growing extends the mapping in place if the addresses after it are free. Otherwise
 * the old mapping is unmapped before the new one is made, so that both are never held
 * at once (the contents of an arena are not kept between calls). Shrinking unmaps the
 * tail. */
#define _GNU_SOURCE
#include "internal.h"

#include <string.h>

#ifndef PLT_NO_MMAP
#include <sys/mman.h>
#include <unistd.h>
#define PLT_HUGE (2 * 1024 * 1024)
#endif

static void arena_free(plt_arena *a, const plt_services *s) {
    if (a->map) {
#ifndef PLT_NO_MMAP
        if (!(s->flags & PLT_FLAG_NO_MAP)) munmap(a->map, (size_t)a->mapped);
        else
#endif
            plt_release(s, a->map, (size_t)a->mapped);
    }
    *a = (plt_arena){0};
}

/* Without mmap: one block, replaced whenever the need changes. */
static bool fit_block(plt_arena *a, const plt_services *s, int64_t need) {
    if (need == a->need) return true;
    arena_free(a, s);
    if ((uint64_t)need > SIZE_MAX) return false;
    char *p = plt_allocate_raw(s, (size_t)need);
    if (!p) return false;
    *a = (plt_arena){p, p, need, need};
    return true;
}

#ifndef PLT_NO_MMAP

static void *map_pages(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* Large arenas are aligned to huge pages, so that the kernel can use them. The mapping
 * ends at the last page needed, so huge pages never make it larger. */
static char *map_arena(size_t bytes) {
#ifdef MADV_HUGEPAGE
    if (bytes >= PLT_HUGE && bytes < SIZE_MAX - PLT_HUGE) {
        char *p = map_pages(bytes + PLT_HUGE);
        if (p) {
            uintptr_t start = (uintptr_t)p + PLT_HUGE - 1;
            start -= start % PLT_HUGE;
            size_t head = start - (uintptr_t)p;
            if (head) munmap(p, head);
            if (head < PLT_HUGE) munmap((char *)start + bytes, PLT_HUGE - head);
            madvise((void *)start, bytes, MADV_HUGEPAGE);
            return (char *)start;
        }
    }
#endif
    return map_pages(bytes);
}

/* The arena ends exactly at a page without access. */
static bool fit_guarded(plt_arena *a, const plt_services *s, int64_t need,
                        int64_t pages, int64_t page) {
    if (need == a->need && a->map) return true;
    arena_free(a, s);
    char *p = map_pages((size_t)(pages + page));
    if (!p) return false;
    if (mprotect(p + pages, (size_t)page, PROT_NONE) != 0) {
        munmap(p, (size_t)(pages + page));
        return false;
    }
    *a = (plt_arena){p + pages - need, p, pages + page, need};
    return true;
}

#endif

#if !defined(PLT_NO_MMAP) && defined(__linux__)
#define PLT_POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14 */
/* malloc maps blocks of this size or more afresh (it is its largest mmap threshold), so
 * none of their pages is present yet. */
#define PLT_FRESH (32 * 1024 * 1024)

typedef struct block {
    char *data;
    int64_t page;
} block;

static void populate(void *args, int64_t begin, int64_t end, int64_t worker) {
    (void)worker;
    block *b = args;
    madvise(b->data + begin * b->page, (size_t)((end - begin) * b->page),
            PLT_POPULATE_WRITE);
}

/* Requests huge pages only where they lie entirely inside the block. */
static void ask_huge(char *data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    int64_t skip = -(int64_t)(uintptr_t)data & (PLT_HUGE - 1);
    int64_t whole = (bytes - skip) / PLT_HUGE * PLT_HUGE;
    if (whole > 0) madvise(data + skip, (size_t)whole, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

void plt_touch(plt_call *call, void *data, int64_t bytes) {
    if (bytes < PLT_FRESH) return;
    ask_huge(data, bytes);
    int64_t page = sysconf(_SC_PAGESIZE);
    int64_t skip = -(int64_t)(uintptr_t)data & (page - 1);
    block b = {(char *)data + skip, page};
    plt_parallel(call, populate, &b, (bytes - skip) / page, 1024);
}
#else
void plt_touch(plt_call *call, void *data, int64_t bytes) {
    (void)call, (void)data, (void)bytes;
}
#endif

int64_t plt_arena_held(const plt_arena *a, const plt_services *s) {
    if (!a->map) return 0;
    int64_t unused = 0;
#ifndef PLT_NO_MMAP
    if (!(s->flags & PLT_FLAG_NO_MAP)) {
        int64_t page = sysconf(_SC_PAGESIZE);
        unused = (page - a->need % page) % page;
        if (s->flags & PLT_FLAG_GUARD_PAGES) unused += page;
    }
#else
    (void)s;
#endif
    return a->mapped - unused;
}

bool plt_arena_fit(plt_arena *a, const plt_services *s, int64_t need) {
    if (need == a->need) return true;
    if (need == 0) {
        arena_free(a, s);
        return true;
    }
#ifndef PLT_NO_MMAP
    if (!(s->flags & PLT_FLAG_NO_MAP)) {
        int64_t page = sysconf(_SC_PAGESIZE), pages, total;
        if (__builtin_add_overflow(need, page - 1, &pages) ||
            __builtin_add_overflow(pages, page, &total) || (uint64_t)total > SIZE_MAX) {
            arena_free(a, s);
            return false;
        }
        pages -= pages % page;
        if (s->flags & PLT_FLAG_GUARD_PAGES) {
            return fit_guarded(a, s, need, pages, page);
        }
        if (pages < a->mapped) {
            munmap(a->map + pages, (size_t)(a->mapped - pages));
            a->mapped = pages;
        } else if (pages > a->mapped) {
            bool grown = false;
#ifdef __linux__
            /* a small mapping is not aligned for huge pages: make a new one */
            bool keep = a->map && (a->mapped >= PLT_HUGE || pages < PLT_HUGE);
            grown = keep && mremap(a->map, (size_t)a->mapped, (size_t)pages, 0) !=
                                MAP_FAILED;
#endif
            if (!grown) {
                arena_free(a, s);
                if (!(a->map = map_arena((size_t)pages))) return false;
            }
            a->mapped = pages;
        }
        a->base = a->map;
        a->need = need;
        return true;
    }
#endif
    return fit_block(a, s, need);
}

void plt_arena_shrink(plt_arena *a, const plt_services *s, int64_t need) {
    if (need >= a->need) return;
#ifndef PLT_NO_MMAP
    if (need > 0 && !(s->flags & (PLT_FLAG_NO_MAP | PLT_FLAG_GUARD_PAGES))) {
        plt_arena_fit(a, s, need);
        return;
    }
#endif
    arena_free(a, s);
}
