/* What a workload uses of the processor that the compiler builds for: one header each. */
#ifndef LACUNA_ARCH_H
#define LACUNA_ARCH_H

#if defined(__x86_64__)
#include "lacuna/arch/x86.h"
#elif defined(__aarch64__)
#include "lacuna/arch/arm64.h"
#else
#error "the guest library has no header for this processor: see include/lacuna/arch"
#endif

#endif
