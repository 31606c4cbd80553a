/*
 * Instructions a second, in loops with known instruction counts. The host may time the interval
 * between the BEGIN and END lines itself; ns is the guest's own clock. Caches and pages are warmed
 * before BEGIN, unless a test measures them. native/shim.c builds the program for the host itself.
 */
#include "cpubench.h"
#include "lacuna.h"

uint64_t bench_alu(uint64_t iterations);
uint64_t bench_mem(uint64_t iterations, uint64_t *base, uint64_t mask);
uint64_t bench_branchy(uint64_t passes);

struct test {
    const char *name;
    uint64_t iterations, insns; /* default count, and instructions in each */
    uint64_t bytes;             /* of memory, 0 if none */
};

static const struct test tests[] = {
    {"alu", 20000000, BENCH_ALU_INSNS, 0},
    {"mem256k", 20000000, BENCH_MEM_INSNS, 256 << 10},
    {"mem64m", 10000000, BENCH_MEM_INSNS, 64 << 20},
    {"branchy", 10000, BENCH_BRANCHY_BLOCKS * BENCH_BRANCHY_INSNS + BENCH_BRANCHY_LOOP, 0},
};

static uint64_t once(const struct test *t, uint64_t iterations) {
    if (t->bytes)
        return bench_mem(iterations, (uint64_t *)lacuna_arena(), t->bytes / 8 - 1);
    return t->insns == BENCH_ALU_INSNS ? bench_alu(iterations) : bench_branchy(iterations);
}

static int run(const struct test *t, struct lacuna_status_entry *me) {
    uint64_t iterations = lacuna_param("iters", t->iterations);
    if (!iterations)
        return 0;
    if (t->bytes > lacuna_arena_bytes()) {
        lacuna_printf("cpubench: %s needs %lu MiB of arena: give more memory\n", t->name,
                      t->bytes >> 20);
        return 2;
    }
    for (uint64_t at = 0; at < t->bytes; at += 4096)
        *(volatile uint64_t *)(lacuna_arena() + at) = 0;
    once(t, 64);
    lacuna_printf("BEGIN %s\n", t->name);
    uint64_t start = lacuna_now_ns();
    uint64_t sum = once(t, iterations);
    uint64_t ns = lacuna_now_ns() - start, insns = iterations * t->insns;
    lacuna_printf("END %s ops=%lu insns=%lu ns=%lu sum=%lx\n", t->name, iterations, insns, ns, sum);
    me->counter += insns;
    return 0;
}

int main(void) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_WORKER, "cpubench", 0);
    bool all = lacuna_param_is("test", "all") || !lacuna_param_given("test");
    int status = 0, ran = 0;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool named = lacuna_param_is("test", tests[i].name);
        if (!named && !all)
            continue;
        ran++;
        int s = run(&tests[i], me);
        status = s > status ? s : status;
    }
    if (!ran) {
        lacuna_printf("cpubench: no such test: give alu, mem256k, mem64m, branchy or all\n");
        return 2;
    }
    return status;
}
