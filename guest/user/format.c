#include "lacuna/format.h"

struct sink {
    char *out;
    size_t n, used;
};

static void put(struct sink *s, char c) {
    if (s->used + 1 < s->n)
        s->out[s->used++] = c;
}

static void put_number(struct sink *s, unsigned long v, unsigned base, int width, char fill) {
    char digits[24];
    int n = 0;
    do {
        digits[n++] = "0123456789abcdef"[v % base];
        v /= base;
    } while (v);
    for (; width > n; width--)
        put(s, fill);
    while (n)
        put(s, digits[--n]);
}

static void put_string(struct sink *s, const char *text, int width) {
    if (!text)
        text = "(null)";
    for (; *text; text++, width--)
        put(s, *text);
    for (; width > 0; width--)
        put(s, ' ');
}

static void put_signed(struct sink *s, long v, int width, char fill) {
    if (v < 0)
        put(s, '-');
    put_number(s, v < 0 ? -(unsigned long)v : (unsigned long)v, 10, width, fill);
}

size_t lacuna_format(char *out, size_t n, const char *fmt, va_list args) {
    struct sink s = {out, n, 0};
    for (; *fmt; fmt++) {
        if (*fmt != '%') {
            put(&s, *fmt);
            continue;
        }
        fmt++;
        char fill = ' ';
        int width = 0, wide = 0;
        if (*fmt == '-')
            fmt++; /* strings are left-aligned anyway */
        if (*fmt == '0')
            fill = *fmt++;
        while (*fmt >= '0' && *fmt <= '9')
            width = width * 10 + *fmt++ - '0';
        while (*fmt == 'l') {
            wide = 1;
            fmt++;
        }
        switch (*fmt) {
        case 's': put_string(&s, va_arg(args, const char *), width); break;
        case 'c': put(&s, (char)va_arg(args, int)); break;
        case 'd': put_signed(&s, wide ? va_arg(args, long) : va_arg(args, int), width, fill); break;
        case 'u':
        case 'x':
        case 'p': {
            unsigned long v = wide || *fmt == 'p' ? va_arg(args, unsigned long)
                                                  : va_arg(args, unsigned);
            put_number(&s, v, *fmt == 'u' ? 10 : 16, width, fill);
            break;
        }
        case '%': put(&s, '%'); break;
        default: put(&s, '?'); break;
        }
        if (!*fmt)
            break;
    }
    if (n)
        out[s.used] = 0;
    return s.used;
}

const char *lacuna_find_param(const char *cmdline, const char *name) {
    const char *word = cmdline;
    while (*word) {
        const char *p = word, *q = name;
        while (*q && *p == *q)
            p++, q++;
        if (!*q && *p == '=')
            return p + 1;
        while (*word && *word != ' ')
            word++;
        while (*word == ' ')
            word++;
    }
    return NULL;
}

unsigned long lacuna_parse_number(const char *s) {
    unsigned long v = 0;
    if (s[0] == '0' && (s[1] | 32) == 'x') {
        for (s += 2;; s++) {
            if (*s >= '0' && *s <= '9')
                v = v * 16 + (unsigned long)(*s - '0');
            else if ((*s | 32) >= 'a' && (*s | 32) <= 'f')
                v = v * 16 + (unsigned long)((*s | 32) - 'a' + 10);
            else
                break;
        }
    } else {
        for (; *s >= '0' && *s <= '9'; s++)
            v = v * 10 + (unsigned long)(*s - '0');
    }
    switch (*s | 32) {
    case 'k': return v << 10;
    case 'm': return v << 20;
    case 'g': return v << 30;
    default: return v;
    }
}
