/* The part of the library that only this processor has. */
#include "lacuna.h"
#include "library.h"

int lacuna_hypercall(uint64_t x[4]) {
    uint64_t words[4] __attribute__((aligned(32))) = {x[0], x[1], x[2], x[3]};
    int result = (int)system_call((const struct lacuna_info *)LACUNA_INFO_VA, LACUNA_SYS_HYPERCALL,
                                  (uint64_t)words, 0, 0, 0);
    for (int i = 0; i < 4; i++)
        x[i] = words[i];
    return result;
}
