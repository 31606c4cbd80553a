/*
 * Nonsense in model-specific registers. Every index of the usual ranges, and many random ones, are
 * read and written with a wrong value; the old value is put back at once. #GP is a valid answer.
 * Registers that this kernel depends on are left out, unless wild=1: then they are written last and
 * not restored. The guest may not survive that; the host must.
 */
#include "lacuna.h"

static uint64_t reads, writes, refused;

static bool vital(uint32_t i) {
    return i == 0x10 || i == 0x1b || i == 0x6e0 || (i >= 0x800 && i < 0x900) ||
           (i >= 0xc0000080 && i <= 0xc0000084) || (i >= 0xc0000100 && i <= 0xc0000102) ||
           i == 0x277;
}

static void try(uint32_t index, uint64_t nonsense) {
    uint64_t old = 0;
    bool readable = !lacuna_rdmsr(index, &old);
    reads++;
    refused += !readable;
    if (vital(index))
        return;
    writes++;
    if (lacuna_wrmsr(index, nonsense))
        refused++;
    else if (readable)
        lacuna_wrmsr(index, old);
}

static void range(uint32_t from, uint32_t to, uint64_t *x) {
    for (uint32_t i = from; i < to; i++) {
        try(i, lacuna_random(x));
        try(i, ~0ull);
    }
}

static void wild(uint64_t *x) {
    static const uint32_t indexes[] = {0x277, 0x10, 0x6e0, 0xc0000084, 0xc0000100, 0xc0000102,
                                       0xc0000081, 0xc0000083, 0x80b, 0x838, 0x83e, 0x80f, 0x830,
                                       0x1b, 0xc0000080, 0xc0000082, 0xc0000101};
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
        lacuna_printf("msr: wild write to %x\n", indexes[i]);
        lacuna_wrmsr(indexes[i], lacuna_random(x));
    }
}

int main(void) {
    uint64_t count = lacuna_param("count", 2000), x = lacuna_mix(lacuna_param("seed", 1)) | 1;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "msr", count);
    range(0, 0x400, &x);
    range(0x480, 0x4d0, &x);
    range(0x800, 0x840, &x);
    range(0x40000000, 0x40000010, &x);
    range(0x4b564d00, 0x4b564d10, &x);
    range(0xc0000080, 0xc0000110, &x);
    range(0xc0010000, 0xc0010140, &x);
    for (uint64_t i = 0; i < count; i++, me->counter++)
        try((uint32_t)lacuna_random(&x), lacuna_random(&x));
    lacuna_printf("RESULT reads=%lu writes=%lu refused=%lu\n", reads, writes, refused);
    if (lacuna_param("wild", 0))
        wild(&x);
    return 0;
}
