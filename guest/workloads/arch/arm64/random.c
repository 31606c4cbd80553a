/*
 * Random words as code. At level 0 (EL0) each round runs in a confined process of its own: an
 * exception or the time limit ends it, whatever it does, and the kernel continues with the next
 * seed. At level 1 (EL1) the words run once, in the kernel. That may break the guest, but it must
 * not harm the host.
 */
#include "lacuna.h"

#define CODE_BYTES 4096ull
#define FIRST_PAGE 64ull /* random code writes anywhere in the arena, into this page too */
#define CLASSES 64

static char *code_page(void) { return lacuna_arena() + FIRST_PAGE * 4096; }

static void fill(uint64_t seed) {
    uint64_t x = lacuna_mix(seed) | 1, *words = (uint64_t *)code_page();
    for (uint64_t i = 0; i < CODE_BYTES / 8; i++)
        words[i] = lacuna_random(&x);
    lacuna_code_written(code_page(), CODE_BYTES);
}

static int confined(uint64_t seed) {
    lacuna_confine(lacuna_param("limit_us", 2000) * 1000);
    fill(seed);
    uint64_t r = lacuna_mix(seed + 1);
    __asm__ volatile("mov x0, %0\n mov x1, %1\n mov x2, %0\n mov x3, %1\n mov x4, %0\n"
                     "mov x5, %1\n mov x8, %0\n mov x9, %1\n mov x29, %1\n mov x30, %1\n br %1"
                     :
                     : "r"(r), "r"(code_page())
                     : "x0", "x1", "x2", "x3", "x4", "x5", "x8", "x9", "x30", "memory");
    __builtin_unreachable();
}

static int in_programs(uint64_t seed, uint64_t count) {
    uint64_t classes[CLASSES] = {0}, timeouts = 0, exits = 0;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "random", count);
    for (uint64_t i = 0; i < count; i++, me->counter++) {
        if (lacuna_spawn(confined, seed + i, LACUNA_ANY_CPU) < 0) {
            lacuna_sleep_ns(1000000); /* some descendants of the last round still run */
            i--;
            continue;
        }
        uint32_t status = (uint32_t)lacuna_wait();
        if (status >= LACUNA_EXIT_FAULT && status < LACUNA_EXIT_FAULT + CLASSES)
            classes[status - LACUNA_EXIT_FAULT]++;
        else if (status == LACUNA_EXIT_TIMEOUT)
            timeouts++;
        else
            exits++;
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        if (classes[c])
            lacuna_printf("RESULT class=%x rounds=%lu\n", c, classes[c]);
    }
    lacuna_printf("RESULT rounds=%lu timeouts=%lu exits=%lu\n", count, timeouts, exits);
    return 0;
}

int main(void) {
    uint64_t seed = lacuna_param("seed", 1);
    if (!lacuna_param("level", 0))
        return in_programs(seed, lacuna_param("count", 100));
    fill(seed);
    lacuna_printf("random: level 1, seed %lu\n", seed);
    lacuna_kernel_call((void (*)(void))code_page());
    lacuna_printf("random: came back\n");
    return 0;
}
