/* The plans of the shapes seen lately: a hash table and a recency list over the same
 * entries. The model's lock is held around every function here. */
#include "internal.h"

#include <string.h>

bool plt_plans_init(plt_plans *p, const plt_services *s, int64_t capacity,
                    int64_t key_length) {
    uint64_t buckets = 16;
    while (buckets < 2 * (uint64_t)capacity) buckets *= 2;
    *p = (plt_plans){.capacity = capacity, .key_length = key_length};
    p->mask = buckets - 1;
    p->buckets = plt_allocate(s, buckets * sizeof(plt_entry *));
    return p->buckets != NULL;
}

void plt_plans_destroy(plt_plans *p, const plt_services *s) {
    if (!p->buckets) return;
    plt_plans_clear(p, s);
    plt_release(s, p->buckets, (p->mask + 1) * sizeof(plt_entry *));
    p->buckets = NULL;
}

void plt_plans_forget(plt_plans *p) {
    memset(p->buckets, 0, (p->mask + 1) * sizeof(plt_entry *));
    p->newest = p->oldest = NULL;
    p->count = 0;
}

uint64_t plt_plans_hash(const int64_t *key, int64_t length) {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (int64_t i = 0; i < length; i++) {
        h = (h ^ (uint64_t)key[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h;
}

static void unlink_recency(plt_plans *p, plt_entry *e) {
    if (e->newer) e->newer->older = e->older;
    else p->newest = e->older;
    if (e->older) e->older->newer = e->newer;
    else p->oldest = e->newer;
}

static void link_newest(plt_plans *p, plt_entry *e) {
    e->newer = NULL;
    e->older = p->newest;
    if (p->newest) p->newest->newer = e;
    else p->oldest = e;
    p->newest = e;
}

static void evict(plt_plans *p, const plt_services *s, plt_entry *e) {
    plt_entry **at = &p->buckets[e->hash & p->mask];
    while (*at != e) at = &(*at)->chain;
    *at = e->chain;
    unlink_recency(p, e);
    e->listed = false;
    p->count--;
    plt_plans_drop(s, e);
}

void plt_plans_clear(plt_plans *p, const plt_services *s) {
    while (p->oldest) evict(p, s, p->oldest);
}

static void touch(plt_plans *p, plt_entry *e) {
    if (p->newest == e) return;
    unlink_recency(p, e);
    link_newest(p, e);
}

plt_entry *plt_plans_find(plt_plans *p, const int64_t *key, uint64_t hash) {
    size_t bytes = (size_t)p->key_length * sizeof(int64_t);
    plt_entry *e = p->buckets[hash & p->mask];
    while (e && (e->hash != hash || memcmp(e->key, key, bytes) != 0)) e = e->chain;
    if (!e) return NULL;
    e->refs++;
    touch(p, e);
    return e;
}

plt_entry *plt_plans_insert(plt_plans *p, const plt_services *s, plt_entry *entry) {
    plt_entry *twin = plt_plans_find(p, entry->key, entry->hash);
    if (twin) { /* another call planned the same shape meanwhile */
        plt_plans_drop(s, entry);
        return twin;
    }
    if (p->count == p->capacity) evict(p, s, p->oldest);
    plt_entry **bucket = &p->buckets[entry->hash & p->mask];
    entry->chain = *bucket;
    *bucket = entry;
    link_newest(p, entry);
    entry->listed = true;
    p->count++;
    entry->refs++;
    return entry;
}

void plt_plans_leave(plt_plans *p, const plt_services *s, plt_entry *entry) {
    if (entry->listed) touch(p, entry);
    plt_plans_drop(s, entry);
}

void plt_plans_drop(const plt_services *s, plt_entry *entry) {
    if (--entry->refs == 0) plt_release(s, entry, entry->block_bytes);
}
