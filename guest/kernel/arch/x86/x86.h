/* Instructions and constants of the processor, as far as the kernel uses them. */
#ifndef X86_H
#define X86_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define PAGE 4096ull
#define BLOCK (512 * PAGE) /* what one entry of a page directory can map */

#define PTE_P 0x1ull
#define PTE_W 0x2ull
#define PTE_U 0x4ull
#define PTE_PCD 0x10ull
#define PTE_PS 0x80ull
#define PTE_G 0x100ull
#define PTE_OWNED 0x200ull /* software bit: the page is freed with its address space */
#define PTE_NX (1ull << 63)
#define PTE_ADDR 0x000ffffffffff000ull

#define MSR_APIC_BASE 0x1b
#define MSR_TSC_DEADLINE 0x6e0
#define MSR_X2APIC 0x800
#define MSR_X2APIC_EOI 0x80b
#define MSR_EFER 0xc0000080
#define MSR_STAR 0xc0000081
#define MSR_LSTAR 0xc0000082
#define MSR_FMASK 0xc0000084
#define MSR_GS_BASE 0xc0000101
#define MSR_KERNEL_GS_BASE 0xc0000102

#define CR3_KEEP (1ull << 63) /* keep the TLB entries of the PCID being loaded */
#define CR4_PCIDE 0x20000ull

#define RFLAGS_IF 0x200u

#define EFER_SCE 1u
#define EFER_NXE 0x800u

static inline void outb(u16 port, u8 v) { asm volatile("outb %0, %1" : : "a"(v), "Nd"(port)); }
static inline void outl(u16 port, u32 v) { asm volatile("outl %0, %1" : : "a"(v), "Nd"(port)); }

static inline u32 read32(u64 at) { return *(volatile u32 *)at; }
static inline void write32(u64 at, u32 v) { *(volatile u32 *)at = v; }

static inline u64 rdmsr(u32 index) {
    u32 lo, hi;
    asm volatile("rdmsr" : "=a"(lo), "=d"(hi) : "c"(index));
    return (u64)hi << 32 | lo;
}

static inline void wrmsr(u32 index, u64 v) {
    asm volatile("wrmsr" : : "c"(index), "a"((u32)v), "d"((u32)(v >> 32)) : "memory");
}

static inline u64 rdtsc(void) {
    u32 lo, hi;
    asm volatile("rdtsc" : "=a"(lo), "=d"(hi));
    return (u64)hi << 32 | lo;
}

struct cpuid {
    u32 eax, ebx, ecx, edx;
};

static inline struct cpuid cpuid(u32 leaf) {
    struct cpuid r;
    asm volatile("cpuid" : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx) : "a"(leaf), "c"(0));
    return r;
}

/* The highest of KVM's own CPUID leaves; 0 if there is no KVM. */
static inline u32 kvm_leaves(void) {
    struct cpuid sig = cpuid(0x40000000);
    if (sig.ebx != 0x4b4d564b || sig.ecx != 0x564b4d56 || sig.edx != 0x4d) /* KVMKVMKVM */
        return 0;
    return sig.eax ? sig.eax : 0x40000001; /* old hosts report 0 */
}

static inline u64 read_cr2(void) {
    u64 v;
    asm volatile("movq %%cr2, %0" : "=r"(v));
    return v;
}

static inline void write_cr3(u64 v) { asm volatile("movq %0, %%cr3" : : "r"(v) : "memory"); }

static inline u64 read_cr4(void) {
    u64 v;
    asm volatile("movq %%cr4, %0" : "=r"(v));
    return v;
}

static inline void write_cr4(u64 v) { asm volatile("movq %0, %%cr4" : : "r"(v) : "memory"); }

static inline void pause(void) { asm volatile("pause"); }

/* a * b / c with a 128-bit product. The caller ensures that the quotient fits 64 bits. */
static inline u64 muldiv(u64 a, u64 b, u64 c) {
    u64 hi, lo;
    asm("mulq %3" : "=a"(lo), "=d"(hi) : "a"(a), "r"(b));
    asm("divq %2" : "+a"(lo), "+d"(hi) : "r"(c));
    return lo;
}

#endif
