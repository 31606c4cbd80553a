/*
 * Random bytes as code. At level 3 each round runs in a confined process of its own: an exception
 * or the time limit ends it, whatever it does, and the kernel continues with the next seed. At
 * level 0 the bytes run once, in the kernel. That may break the guest, but it must not harm the
 * host.
 */
#include "lacuna.h"

#define CODE_BYTES 4096ull
#define FIRST_PAGE 64ull /* random code writes anywhere in the arena, into this page too */

static char *code_page(void) { return lacuna_arena() + FIRST_PAGE * 4096; }

static void fill(uint64_t seed) {
    uint64_t x = lacuna_mix(seed) | 1, *words = (uint64_t *)code_page();
    for (uint64_t i = 0; i < CODE_BYTES / 8; i++)
        words[i] = lacuna_random(&x);
}

static int confined(uint64_t seed) {
    lacuna_confine(lacuna_param("limit_us", 2000) * 1000);
    fill(seed);
    uint64_t r = lacuna_mix(seed + 1);
    __asm__ volatile("movq %0, %%rax\n movq %0, %%rdi\n movq %1, %%rsi\n movq %1, %%rdx\n"
                     "movq %0, %%rbp\n movq %1, %%r8\n movq %0, %%r10\n jmp *%1"
                     :
                     : "b"(r), "c"(code_page())
                     : "rax", "rdi", "rsi", "rdx", "r8", "r10", "memory");
    __builtin_unreachable();
}

static int level3(uint64_t seed, uint64_t count) {
    uint64_t vectors[32] = {0}, timeouts = 0, exits = 0;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "random", count);
    for (uint64_t i = 0; i < count; i++, me->counter++) {
        if (lacuna_spawn(confined, seed + i, LACUNA_ANY_CPU) < 0) {
            lacuna_sleep_ns(1000000); /* some descendants of the last round still run */
            i--;
            continue;
        }
        uint32_t status = (uint32_t)lacuna_wait();
        if (status >= LACUNA_EXIT_FAULT && status < LACUNA_EXIT_FAULT + 32)
            vectors[status - LACUNA_EXIT_FAULT]++;
        else if (status == LACUNA_EXIT_TIMEOUT)
            timeouts++;
        else
            exits++;
    }
    for (uint32_t v = 0; v < 32; v++) {
        if (vectors[v])
            lacuna_printf("RESULT vector=%u rounds=%lu\n", v, vectors[v]);
    }
    lacuna_printf("RESULT rounds=%lu timeouts=%lu exits=%lu\n", count, timeouts, exits);
    return 0;
}

int main(void) {
    uint64_t seed = lacuna_param("seed", 1);
    if (lacuna_param("level", 3))
        return level3(seed, lacuna_param("count", 100));
    fill(seed);
    lacuna_printf("random: level 0, seed %lu\n", seed);
    lacuna_kernel_call((void (*)(void))code_page());
    lacuna_printf("random: came back\n");
    return 0;
}
