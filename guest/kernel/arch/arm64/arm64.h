/* Instructions and constants of the processor, as far as the kernel uses them. */
#ifndef ARM64_H
#define ARM64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

#define PAGE 4096ull
#define BLOCK (512 * PAGE) /* what one entry of a level 2 table can map */

/* VMSAv8-64 descriptors (Arm ARM, D8.3): 4 KiB granule, 48 bits. */
#define PTE_VALID 0x1ull
#define PTE_TABLE_OR_PAGE 0x2ull
#define PTE_DEVICE (1ull << 2) /* AttrIndx 1 of MAIR_EL1; 0 is normal memory */
#define PTE_EL0 (1ull << 6)
#define PTE_READ_ONLY (1ull << 7)
#define PTE_INNER_SHAREABLE (3ull << 8)
#define PTE_AF (1ull << 10)
#define PTE_NOT_GLOBAL (1ull << 11)
#define PTE_DBM (1ull << 51)
#define PTE_PXN (1ull << 53)
#define PTE_UXN (1ull << 54)
#define PTE_OWNED (1ull << 55) /* software bit: the page is freed with its address space */
#define PTE_ADDR 0x0000fffffffff000ull

/* ESR_EL1 */
#define ESR_CLASS(esr) ((u32)((esr) >> 26 & 0x3f))
#define ESR_STATUS(esr) ((u32)((esr)&0x3f)) /* of an abort */
#define CLASS_SVC64 0x15
#define CLASS_ABORT_EL0 0x24
#define CLASS_ABORT_EL1 0x25
#define STATUS_EXTERNAL 0x10

#define read_sysreg(name)                                                                          \
    ({                                                                                             \
        u64 value_;                                                                                \
        asm volatile("mrs %0, " #name : "=r"(value_));                                             \
        value_;                                                                                    \
    })
#define write_sysreg(name, value)                                                                  \
    asm volatile("msr " #name ", %x0" : : "rZ"((u64)(value)) : "memory")

static inline void isb(void) { asm volatile("isb" : : : "memory"); }
static inline void dsb(void) { asm volatile("dsb ish" : : : "memory"); }
static inline void dsb_stores(void) { asm volatile("dsb ishst" : : : "memory"); }

static inline u32 read32(u64 at) {
    u32 v;
    asm volatile("ldr %w0, [%1]" : "=r"(v) : "r"(at) : "memory");
    return v;
}

static inline u64 read64(u64 at) {
    u64 v;
    asm volatile("ldr %0, [%1]" : "=r"(v) : "r"(at) : "memory");
    return v;
}

static inline void write32(u64 at, u32 v) {
    asm volatile("str %w1, [%0]" : : "r"(at), "rZ"(v) : "memory");
}

static inline void write8(u64 at, u8 v) {
    asm volatile("strb %w1, [%0]" : : "r"(at), "rZ"(v) : "memory");
}

static inline void pause(void) { asm volatile("yield"); }

/* a * b / c. The caller ensures that the quotient and b * c fit 64 bits. */
static inline u64 muldiv(u64 a, u64 b, u64 c) { return a / c * b + a % c * b / c; }

#endif
