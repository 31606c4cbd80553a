/*
 * Nonsense in system registers. Every one that MRS and MSR can name is read; each that this kernel
 * does not depend on is written with a wrong value, and the old value is put back at once. An
 * undefined-instruction exception is a valid answer. With wild=1 the others are written last and
 * not restored. The guest may not survive that; the host must.
 *
 * A register's number is the field of the instruction: op0's low bit, op1, CRn, CRm, op2.
 */
#include "lacuna.h"

#define REGISTER(op0, op1, n, m, op2)                                                              \
    (((op0)&1u) << 14 | (op1) << 11 | (n) << 7 | (m) << 3 | (op2))
#define ALL 0x8000u
#define OF_DEBUG 0x4000u /* op0 is 2 below this number */

static uint64_t reads, writes, refused;

static bool is_group(uint32_t i, uint32_t op1, uint32_t n) {
    return (i & 0x7f80) == REGISTER(3, op1, n, 0, 0);
}

/* Reading takes an interrupt: ICC_IAR0_EL1, ICC_IAR1_EL1. */
static bool takes(uint32_t i) {
    return i == REGISTER(3, 0, 12, 8, 0) || i == REGISTER(3, 0, 12, 12, 0);
}

/* By group: translation control, tables and address attributes, exception state, vectors and the
 * interrupt controller, this processor's pointer, the timer. */
static bool is_vital(uint32_t i) {
    return i < OF_DEBUG || is_group(i, 0, 1) || is_group(i, 0, 2) || is_group(i, 0, 4) ||
           is_group(i, 3, 4) || is_group(i, 0, 9) || is_group(i, 3, 9) || is_group(i, 0, 10) ||
           is_group(i, 0, 12) || is_group(i, 0, 13) || is_group(i, 0, 14) || is_group(i, 3, 14);
}

static void try(uint32_t index, uint64_t nonsense) {
    uint64_t old = 0;
    if (takes(index))
        return;
    bool readable = !lacuna_rdmsr(index, &old);
    reads++;
    refused += !readable;
    if (is_vital(index))
        return;
    writes++;
    if (lacuna_wrmsr(index, nonsense))
        refused++;
    else if (readable)
        lacuna_wrmsr(index, old);
}

static void wild(uint64_t *x) {
    for (uint32_t i = 0; i < ALL; i++) {
        if (!is_vital(i))
            continue;
        if (i % 128 == 0)
            lacuna_printf("msr: wild writes from %x\n", i);
        lacuna_wrmsr(i, lacuna_random(x));
    }
}

int main(void) {
    uint64_t rounds = lacuna_param("rounds", 1), x = lacuna_mix(lacuna_param("seed", 1)) | 1;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "msr", rounds * ALL);
    for (uint64_t r = 0; r < rounds; r++) {
        for (uint32_t i = 0; i < ALL; i++, me->counter++)
            try(i, r & 1 ? ~0ull : lacuna_random(&x));
    }
    lacuna_printf("RESULT reads=%lu writes=%lu refused=%lu\n", reads, writes, refused);
    if (lacuna_param("wild", 0))
        wild(&x);
    return 0;
}
