/* The four functions that the compiler may call in a freestanding program. */
#include <stddef.h>

void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    void *result = to;
    size_t words = n / 8;
    n %= 8;
    asm volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
    return result;
}

void *memset(void *to, int v, size_t n) {
    void *result = to;
    size_t words = n / 8, pattern = (unsigned char)v * 0x0101010101010101ull;
    n %= 8;
    asm volatile("rep stosq" : "+D"(to), "+c"(words) : "a"(pattern) : "memory");
    asm volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(pattern) : "memory");
    return result;
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
