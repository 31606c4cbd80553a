/* printf for kernel and programs: %s %c %d %u %x %p, with l, 0 and width. */
#ifndef LACUNA_FORMAT_H
#define LACUNA_FORMAT_H

#include <stdarg.h>
#include <stddef.h>

/* Formats into out, always terminated; returns the length written, at most n - 1. */
size_t lacuna_format(char *out, size_t n, const char *fmt, va_list args);

/*
 * Finds `name=value` as a word of a command line. Returns the value, which ends at a space or
 * at the end of the string, or NULL.
 */
const char *lacuna_find_param(const char *cmdline, const char *name);

/* Reads a number: decimal or 0x hexadecimal, then an optional K, M or G. */
unsigned long lacuna_parse_number(const char *s);

#endif
