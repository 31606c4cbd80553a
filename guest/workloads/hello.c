/* The smallest program: shows that a guest boots and prints. */
#include "lacuna.h"

int main(void) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "hello", 1);
    lacuna_printf("hello from a guest: %u vCPU, %lu MiB of arena\n", lacuna_cpus(),
                  lacuna_arena_bytes() >> 20);
    me->counter = 1;
    return 0;
}
