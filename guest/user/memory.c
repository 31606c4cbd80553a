/* The four functions that the compiler may call in a freestanding program. */
#include "library.h"

void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    copy_up(to, from, n);
    return to;
}

void *memset(void *to, int v, size_t n) {
    fill(to, (unsigned char)v, n);
    return to;
}

void *memmove(void *to, const void *from, size_t n) {
    char *t = to;
    const char *f = from;
    if (t <= f || t >= f + n)
        return memcpy(to, from, n);
    while (n--)
        t[n] = f[n];
    return to;
}

int memcmp(const void *a, const void *b, size_t n) {
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < n; i++) {
        if (x[i] != y[i])
            return x[i] - y[i];
    }
    return 0;
}
