/* Sorting and selecting of one row, for one kind of item. Included once per kind, with
 *
 *   ITEM       a key and the place it came from
 *   KEY(e)     the key, a KEY_TYPE of KEY_BITS bits
 *   MAKE(k,p)  the item of a key and a place
 *   LESS(a,b)  the order of keys, then of places: no two items are equal
 *   NAME(f)    the function's name for this kind
 *   KEYS       the function that computes keys
 *   LONG       the length of rows from which on the radix sort is faster
 *
 * The sort is by radix for long rows, by merging for short ones. Both keep the order of
 * equal keys, so it suffices that the places ascend. */

static void NAME(insert)(ITEM *a, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        ITEM e = a[i];
        int64_t j = i;
        for (; j > 0 && LESS(e, a[j - 1]); j--) a[j] = a[j - 1];
        a[j] = e;
    }
}

static void NAME(merge)(const ITEM *restrict a, int64_t n, const ITEM *restrict b,
                        int64_t m, ITEM *restrict out) {
    const ITEM *end_a = a + n, *end_b = b + m;
    while (a != end_a && b != end_b) {
        int second = LESS(*b, *a);
        *out++ = second ? *b : *a;
        b += second;
        a += !second;
    }
    while (a != end_a) *out++ = *a++;
    while (b != end_b) *out++ = *b++;
}

/* Merges two adjacent runs of n from both ends at once. The n steps from each end meet in
 * the middle, so neither run is exhausted before. */
static void NAME(merge_even)(const ITEM *restrict a, int64_t n, ITEM *restrict out) {
    const ITEM *p = a, *q = a + n, *r = a + n - 1, *s = a + 2 * n - 1;
    ITEM *low = out, *high = out + 2 * n - 1;
    for (int64_t i = 0; i < n; i++) {
        int second = LESS(*q, *p), first = LESS(*s, *r);
        *low++ = *(second ? q : p);
        q += second;
        p += !second;
        *high-- = *(first ? r : s);
        r -= first;
        s -= !first;
    }
}

/* Sorts short runs, then merges them to runs twice as long, between the two arrays. */
static ITEM *NAME(sort_short)(ITEM *a, ITEM *b, int64_t n) {
    int64_t run = 8;
    for (int64_t i = 0; i < n; i += run) NAME(insert)(a + i, plt_min(run, n - i));
    for (; run < n; run *= 2) {
        int64_t i = 0;
        for (; i + 2 * run <= n; i += 2 * run) NAME(merge_even)(a + i, run, b + i);
        if (i < n) {
            int64_t first = plt_min(run, n - i);
            NAME(merge)(a + i, first, a + i + first, n - i - first, b + i);
        }
        ITEM *other = a;
        a = b;
        b = other;
    }
    return a;
}

static ITEM *NAME(sort_long)(ITEM *a, ITEM *b, int64_t n, uint64_t differ) {
    int low = 0, span = KEY_BITS;
    while (!(differ >> low & 1)) low++;
    while (!(differ >> (span - 1) & 1)) span--;
    span -= low;
    int width = n < 8192 ? 8 : 11;
    int passes = (span + width - 1) / width;
    width = (span + passes - 1) / passes;
    uint64_t mask = (UINT64_C(1) << width) - 1;
    int64_t counts[1 << 11];
    for (int pass = 0; pass < passes; pass++) {
        int shift = low + pass * width;
        memset(counts, 0, sizeof *counts << width);
        for (int64_t i = 0; i < n; i++) counts[KEY(a[i]) >> shift & mask]++;
        if (counts[KEY(a[0]) >> shift & mask] == n) continue;
        int64_t sum = 0;
        for (uint64_t d = 0; d <= mask; d++) {
            int64_t count = counts[d];
            counts[d] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) b[counts[KEY(a[i]) >> shift & mask]++] = a[i];
        ITEM *other = a;
        a = b;
        b = other;
    }
    return a;
}

/* Sorts a, with b as room for as many; returns which of them holds the result. Places
 * ascend where keys are equal. */
static ITEM *NAME(sort)(ITEM *a, ITEM *b, int64_t n) {
    uint64_t differ = 0, falls = 0;
    for (int64_t i = 1; i < n; i++) {
        differ |= KEY(a[i]) ^ KEY(a[0]);
        falls |= KEY(a[i]) < KEY(a[i - 1]);
    }
    if (!falls) return a;
    return n < LONG ? NAME(sort_short)(a, b, n) : NAME(sort_long)(a, b, n, differ);
}

/* Moves the k least items to the front; 0 < k < n. All stay in order but a few of the
 * last ones compared, which are sorted: so places still ascend where keys are equal.
 * `room` is for n more. */
static void NAME(select)(ITEM *a, int64_t n, int64_t k, ITEM *room) {
    int64_t low = 0, high = n;
    for (int turns = 0; high - low > 16 && turns < 64; turns++) {
        ITEM p = a[low], q = a[low + (high - low) / 2], r = a[high - 1];
        ITEM pivot = LESS(p, q) ? (LESS(q, r) ? q : LESS(p, r) ? r : p)
                                : (LESS(p, r) ? p : LESS(q, r) ? r : q);
        int64_t below = low, above = 0;
        for (int64_t i = low; i < high; i++) {
            ITEM e = a[i];
            int less = LESS(e, pivot);
            a[below] = e;
            room[above] = e;
            below += less;
            above += !less;
        }
        memcpy(a + below, room, sizeof *a * (size_t)above);
        if (k == below) return;
        if (k < below)
            high = below;
        else
            low = below;
    }
    ITEM *sorted = NAME(sort_short)(a + low, room, high - low);
    if (sorted != a + low) memcpy(a + low, sorted, sizeof *a * (size_t)(high - low));
}

/* ---- rows of tensors ---- */

/* The items of elements first .. first + n - 1 of the row x. */
static void NAME(items)(const rows *r, const char *x, int64_t first, int64_t n,
                        ITEM *items) {
    KEY_TYPE keys[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = plt_min(BLOCK, n - i);
        KEYS(keys, x + (first + i) * r->inner * r->bytes, count, r->inner, r->dtype,
             (KEY_TYPE)r->flip);
        for (int64_t j = 0; j < count; j++)
            items[i + j] = MAKE(keys[j], (uint64_t)(first + i + j));
    }
}

static void NAME(sort_row)(const rows *r, const char *x, char *values, int64_t *places,
                           ITEM *items, ITEM *room) {
    NAME(items)(r, x, 0, r->n, items);
    items = NAME(sort)(items, room, r->n);
    NAME(write)(r, x, values, places, items, r->n);
}

/* Collects items while they beat the k-th best of those before, of a few at first; when
 * their number reaches `most`, the best k of them stay. Returns their number. */
static int64_t NAME(collect)(const rows *r, const char *x, ITEM *items, int64_t most) {
    int64_t n = r->n, k = r->k, few = plt_min(most, plt_max(2 * k, BLOCK)), count = few;
    NAME(items)(r, x, 0, few, items);
    KEY_TYPE keys[BLOCK], worst = (KEY_TYPE)UINT64_MAX;
    for (int64_t i = few; i < n; i += BLOCK) {
        if (i == few || count > most - BLOCK) {
            NAME(select)(items, count, k, items + most);
            worst = 0;
            for (int64_t j = 0; j < k; j++) {
                KEY_TYPE key = (KEY_TYPE)KEY(items[j]);
                worst = key > worst ? key : worst;
            }
            count = k;
        }
        int64_t more = plt_min(BLOCK, n - i);
        KEY_TYPE any = 0;
        KEYS(keys, x + i * r->inner * r->bytes, more, r->inner, r->dtype,
             (KEY_TYPE)r->flip);
        for (int64_t j = 0; j < more; j++) any |= keys[j] < worst;
        for (int64_t j = 0; any && j < more; j++) {
            items[count] = MAKE(keys[j], (uint64_t)(i + j));
            count += keys[j] < worst;
        }
    }
    return count;
}

static void NAME(top_row)(const rows *r, const char *x, char *values, int64_t *places,
                          ITEM *items) {
    int64_t k = r->k, most = most_items(r->n, k);
    int64_t count = NAME(collect)(r, x, items, most);
    if (count > 2 * k) {
        NAME(select)(items, count, k, items + most);
        count = k;
    }
    items = NAME(sort)(items, items + most, count);
    NAME(write)(r, x, values, places, items, k);
}

#undef ITEM
#undef KEY
#undef KEY_TYPE
#undef KEY_BITS
#undef MAKE
#undef LESS
#undef NAME
#undef KEYS
#undef LONG
