/*
 * Code that changes while it is in use. After the sequence that the architecture asks for (Arm ARM,
 * B2.4.4), the processor must run what was written last:
 *   next       a store changes the next instructions; the sequence is between
 *   call       a function is rewritten, then called
 *   alias      it is rewritten by another virtual address of the same page, then called
 *   straddle   its two instructions lie in two pages, and only the second page is written
 *   cross      another vCPU rewrites it and says so; isb, then called
 */
#include "lacuna.h"

#define PAGE 4096ull
#define ALIAS ((char *)LACUNA_ALIAS_BASE)

#define MOVZ_W0 0x52800000u          /* movz w0, #imm: imm in bits 5 to 20 */
#define MOVK_W0_HIGH 0x72a00000u     /* movk w0, #imm, lsl #16 */
#define RET 0xd65f03c0u
#define STR_W0_X1 0xb9000020u
#define DC_CVAU_X1 0xd50b7b21u
#define IC_IVAU_X1 0xd50b7521u
#define DSB_ISH 0xd5033b9fu
#define ISB 0xd5033fdfu

typedef uint32_t function(uint32_t insn, void *at);

static uint64_t iterations;
static uint64_t offered, taken; /* cross: rounds written, rounds run */

static char *code(uint64_t page) { return lacuna_arena() + page * PAGE; }

static void put(char *at, uint32_t insn) { *(volatile uint32_t *)at = insn; }

static uint32_t movz(uint32_t value) { return MOVZ_W0 | (value & 0xffff) << 5; }
static uint32_t movk(uint32_t value) { return MOVK_W0_HIGH | (value >> 16) << 5; }

/* w0 = value, by two instructions; return */
static void put_value(char *at, uint32_t value) {
    put(at, movz(value));
    put(at + 4, movk(value));
}

static void put_function(char *at, uint32_t value) {
    put_value(at, value);
    put(at + 8, RET);
    lacuna_code_written(at, 12);
}

static uint32_t run(char *at) { return ((function *)at)(0, NULL); }

static uint32_t value_of(uint64_t n) { return (uint32_t)lacuna_mix(n); }

static uint32_t next_once(uint64_t n) {
    uint32_t low = value_of(n) & 0xffff;
    uint32_t found = ((function *)code(0))(movz(low), code(0) + 24);
    return found == low ? value_of(n) : ~value_of(n);
}

static uint32_t call_once(uint64_t n) {
    put_value(code(1), value_of(n));
    lacuna_code_written(code(1), 8);
    return run(code(1));
}

/* The data cache is cleaned by one address, and the instruction cache emptied by the other. */
static uint32_t alias_once(uint64_t n) {
    put_value(ALIAS, value_of(n));
    lacuna_code_written(ALIAS, 8);
    lacuna_code_written(code(2), 8);
    return run(code(2));
}

static uint32_t straddle_once(uint64_t n) {
    put(code(4), movk(value_of(n)));
    lacuna_code_written(code(4), 4);
    uint32_t wanted = (value_of(n) & 0xffff0000) | 0x1234;
    return run(code(4) - 4) == wanted ? value_of(n) : ~value_of(n);
}

static void wait_until(uint64_t *word, uint64_t at_least) {
    for (int spins = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < at_least; spins++) {
        if (spins > 2000) {
            lacuna_yield();
            spins = 0;
        }
    }
}

static int writer(uint64_t unused) {
    (void)unused;
    lacuna_status(LACUNA_KIND_OTHER, "writer", 0);
    for (uint64_t n = 1; n <= iterations; n++) {
        put_value(code(5), value_of(n));
        lacuna_code_written(code(5), 8);
        __atomic_store_n(&offered, n, __ATOMIC_RELEASE);
        wait_until(&taken, n);
    }
    return 0;
}

static uint32_t cross_once(uint64_t n) {
    wait_until(&offered, n);
    __asm__ volatile("isb" : : : "memory");
    uint32_t found = run(code(5));
    __atomic_store_n(&taken, n, __ATOMIC_RELEASE);
    return found;
}

static const struct {
    const char *name;
    uint32_t (*once)(uint64_t n);
} tests[] = {
    {"next", next_once},         {"call", call_once},   {"alias", alias_once},
    {"straddle", straddle_once}, {"cross", cross_once},
};

static void prepare(void) {
    static const uint32_t next[] = {STR_W0_X1, DC_CVAU_X1, DSB_ISH, IC_IVAU_X1, DSB_ISH, ISB,
                                    MOVZ_W0, RET};
    memcpy(code(0), next, sizeof next);
    lacuna_code_written(code(0), sizeof next);
    put_function(code(1), 0);
    put_function(code(2), 0);
    put_function(code(4) - 4, 0x1234);
    put_function(code(5), 0);
}

int main(void) {
    iterations = lacuna_param("iters", 2000);
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "smc", 5 * iterations);
    int status = 0;
    prepare();
    if (lacuna_alias(ALIAS, code(2)) || lacuna_thread(writer, 0, lacuna_cpus() - 1) < 0) {
        lacuna_printf("smc: no memory\n");
        return 2;
    }
    for (size_t t = 0; t < sizeof tests / sizeof *tests; t++) {
        uint64_t wrong = 0;
        for (uint64_t n = 1; n <= iterations; n++, me->counter++)
            wrong += tests[t].once(n) != value_of(n);
        lacuna_printf("RESULT test=%s iterations=%lu wrong=%lu\n", tests[t].name, iterations,
                      wrong);
        status |= wrong != 0;
    }
    lacuna_wait();
    return status;
}
