/* A deliberate triple fault: an exception while the IDT is empty. */
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
