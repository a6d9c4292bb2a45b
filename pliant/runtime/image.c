/* Machine code that was linked ahead (pliant/artifact/link.py), and checksums.
 *
 * An image is code, then data, both whole pages. Code is position-independent; data hold
 * constants, addresses inside the image, and the addresses of what the code calls. No
 * page is ever writable and executable at once, and none is writable in the end. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "internal.h"

#include <string.h>

#ifndef PLT_NO_MMAP
#include <sys/mman.h>

#define PLT_PAGE 4096
#define PLT_MOST_IMAGE ((int64_t)1 << 30) /* 32-bit distances reach everywhere */

/* Whether a pointer at this place lies inside the data. */
static bool in_data(const plt_image_desc *d, int64_t place) {
    return place % 8 == 0 && place >= d->code_bytes &&
           place <= d->code_bytes + d->data_bytes - 8;
}

static bool image_well_formed(const plt_image_desc *d) {
    const int64_t most = PLT_MOST_IMAGE;
    if (!d->bytes || d->code_bytes < 1 || d->code_bytes > most) return false;
    if (d->data_bytes < 0 || d->data_bytes > most) return false;
    if (d->code_bytes % PLT_PAGE || d->data_bytes % PLT_PAGE) return false;
    if (d->n_pointers < 0 || d->n_imports < 0) return false;
    for (int64_t i = 0; i < d->n_pointers; i++) {
        const plt_image_pointer *p = &d->pointers[i];
        if (!in_data(d, p->place)) return false;
        if (p->target < 0 || p->target >= d->code_bytes + d->data_bytes) return false;
    }
    for (int64_t i = 0; i < d->n_imports; i++) {
        if (!in_data(d, d->imports[i].place) || !d->imports[i].address) return false;
    }
    return true;
}

static void put(char *image, int64_t place, const void *address) {
    memcpy(image + place, &address, sizeof address);
}

void *plt_image_map(const plt_image_desc *d) {
    if (!image_well_formed(d)) return NULL;
    size_t code = (size_t)d->code_bytes, data = (size_t)d->data_bytes;
    char *image = mmap(NULL, code + data, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (image == MAP_FAILED) return NULL;
    memcpy(image, d->bytes, code + data);
    for (int64_t i = 0; i < d->n_pointers; i++) {
        put(image, d->pointers[i].place, image + d->pointers[i].target);
    }
    for (int64_t i = 0; i < d->n_imports; i++) {
        put(image, d->imports[i].place, d->imports[i].address);
    }
    bool sealed = mprotect(image, code, PROT_READ | PROT_EXEC) == 0 &&
                  (!data || mprotect(image + code, data, PROT_READ) == 0);
    if (sealed) return image;
    munmap(image, code + data);
    return NULL;
}

void plt_image_unmap(void *image, int64_t bytes) {
    if (image) munmap(image, (size_t)bytes);
}

#else

void *plt_image_map(const plt_image_desc *d) {
    (void)d;
    return NULL;
}

void plt_image_unmap(void *image, int64_t bytes) { (void)image, (void)bytes; }

#endif

/* ---- checksums ---- */

#define PLT_LANES 8
#define PLT_PRIME 0x9E3779B97F4A7C15u /* odd, so that multiplying loses nothing */

static uint64_t mixed(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * PLT_PRIME;
    return sum ^ sum >> 29;
}

uint64_t plt_checksum(const void *data, int64_t bytes) {
    const char *at = data;
    uint64_t lanes[PLT_LANES] = {1, 2, 3, 4, 5, 6, 7, 8}, words[PLT_LANES];
    int64_t left = bytes;
    for (; left >= (int64_t)sizeof words; left -= (int64_t)sizeof words) {
        memcpy(words, at, sizeof words);
        for (int k = 0; k < PLT_LANES; k++) {
            lanes[k] = (lanes[k] ^ words[k]) * PLT_PRIME;
        }
        at += sizeof words;
        /* High bits come down, so that they are not pushed out. */
        for (int k = 0; k < PLT_LANES; k++) lanes[k] ^= lanes[k] >> 29;
    }
    memset(words, 0, sizeof words);
    memcpy(words, at, (size_t)left);
    uint64_t sum = (uint64_t)bytes;
    for (int k = 0; k < PLT_LANES; k++) sum = mixed(sum, mixed(lanes[k], words[k]));
    return sum;
}
