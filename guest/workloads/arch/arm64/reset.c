/* The machine ends by a reset that the guest asks for (PSCI SYSTEM_RESET). */
#include "lacuna.h"

int main(void) {
    uint64_t x[4] = {0x84000009, 0, 0, 0};
    lacuna_printf("reset: now\n");
    lacuna_hypercall(x);
    lacuna_printf("reset: still here\n");
    return 1;
}
