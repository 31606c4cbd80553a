/*
 * Code that changes while it is in use. The processor must run what was written last:
 *   next       a store changes the very next instruction
 *   call       a function is rewritten, then called
 *   alias      it is rewritten by another virtual address of the same page, cpuid, then called
 *   straddle   its immediate crosses a page, and only the second page is written
 *   cross      another vCPU rewrites it and says so; cpuid, then called
 */
#include "lacuna.h"

#define PAGE 4096ull
#define ALIAS ((char *)LACUNA_ALIAS_BASE)

typedef uint32_t function(uint32_t);

static uint64_t iterations;
static uint64_t offered, taken; /* cross: rounds written, rounds run */

static char *code(uint64_t page) { return lacuna_arena() + page * PAGE; }

static void put32(char *at, uint32_t v) {
    __asm__ volatile("movl %1, (%0)" : : "r"(at), "r"(v) : "memory");
}

/* movl $value, %eax; ret */
static void put_function(char *at, uint32_t value) {
    at[0] = (char)0xb8;
    put32(at + 1, value);
    at[5] = (char)0xc3;
}

static uint32_t run(char *at, uint32_t arg) { return ((function *)at)(arg); }

static void serialize(void) {
    uint32_t eax = 0, ecx = 0;
    __asm__ volatile("cpuid" : "+a"(eax), "+c"(ecx) : : "rbx", "rdx", "memory");
}

static uint32_t value_of(uint64_t n) { return (uint32_t)lacuna_mix(n); }

static uint32_t next_once(uint64_t n) { return run(code(0), value_of(n)); }

static uint32_t call_once(uint64_t n) {
    put32(code(1) + 1, value_of(n));
    return run(code(1), 0);
}

static uint32_t alias_once(uint64_t n) {
    put32(ALIAS + 1, value_of(n));
    serialize();
    return run(code(2), 0);
}

static uint32_t straddle_once(uint64_t n) {
    /* The immediate's low half ends page 3, its high half begins page 4 and is rewritten. */
    uint16_t high = (uint16_t)(value_of(n) >> 16);
    *(volatile uint16_t *)code(4) = high;
    return run(code(4) - 3, 0) == ((uint32_t)high << 16 | 0x1234) ? value_of(n) : ~value_of(n);
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
        put32(code(5) + 1, value_of(n));
        __atomic_store_n(&offered, n, __ATOMIC_RELEASE);
        wait_until(&taken, n);
    }
    return 0;
}

static uint32_t cross_once(uint64_t n) {
    wait_until(&offered, n);
    serialize();
    uint32_t found = run(code(5), 0);
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
    /* movl %edi, 1(%rip); movl $0, %eax; ret: the store hits the immediate behind it */
    static const uint8_t next[] = {0x89, 0x3d, 1, 0, 0, 0, 0xb8, 0, 0, 0, 0, 0xc3};
    memcpy(code(0), next, sizeof next);
    put_function(code(1), 0);
    put_function(code(2), 0);
    put_function(code(4) - 3, 0x1234);
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
