/* A triple fault, on purpose: an exception with no table to find its handler in. */
#include "lacuna.h"

static void fall(void) {
    static const struct {
        uint16_t limit;
        uint64_t base;
    } __attribute__((packed)) nothing = {0, 0};
    __asm__ volatile("lidt %0; int3" : : "m"(nothing));
}

int main(void) {
    lacuna_printf("triple: now\n");
    lacuna_kernel_call(fall);
    lacuna_printf("triple: still here\n");
    return 1;
}
