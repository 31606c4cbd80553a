/*
 * Entry by the arm64 boot protocol of Linux (Documentation/arch/arm64/booting.rst): MMU off, EL1,
 * x0 = device tree; the image lies at any address that is a multiple of 2 MiB. QEMU loads it 2 MiB
 * above the beginning of memory. Other processors start at `secondary`, by PSCI.
 *
 * The kernel then runs at KERNEL_BASE + physical address. One table of level 1 maps each GiB by one
 * entry; here for the image and the device tree, in fdt.c for memory and devices. The same tables
 * serve TTBR0 until the jump.
 */
#include "layout.h"

#define BLOCK_NORMAL 0x701  /* block, AttrIndx 0, EL1 read and write, inner shareable, AF */
#define UXN_TOP 0x40        /* bits 63:48 of UXN */
#define TABLE 0x3

#define MAIR_BITS 0x04ff /* 0: write-back memory; 1: device, nGnRE */
#define TCR_LOW 0xb510   /* TTBR1: 4 KiB, shareable, write-back, 48 bits */
#define TCR_BITS 0xb5103510
#define TCR_HA (1 << 39)
#define TCR_HD (1 << 40)
#define SCTLR_BITS 0x3454d81d /* UCI, nTWE, UCT, DZE, I, SA0, SA, C, M; RES1 */
#define SCTLR_SPAN 0x800000

    .section .head, "ax"
    .globl image
image:
    b start
    .long 0
    .quad 0 /* text_offset */
    /* kernel.ld puts image_size here */

    .section .head.rest, "ax"
    .quad 0xa /* little-endian, 4 KiB pages, anywhere in memory */
    .quad 0, 0, 0
    .ascii "ARM\x64"
    .long 0

start:
    msr daifset, #0xf
    mov x19, x0
    adrp x0, bss_start
    add x0, x0, :lo12:bss_start
    adrp x1, kernel_end
    mov x2, x0
1:  stp xzr, xzr, [x2], #16
    cmp x2, x1
    b.lo 1b

    adrp x3, linear_root
    adrp x4, linear_l1
    orr x5, x4, #TABLE
    str x5, [x3]
    adrp x5, image
    bl map_gib
    mov x5, x19
    bl map_gib

    mrs x3, ctr_el0 /* what the cache has of this memory is older than what was written */
    ubfx x3, x3, #16, #4
    mov x4, #4
    lsl x4, x4, x3
    dsb sy
2:  dc ivac, x0
    add x0, x0, x4
    cmp x0, x1
    b.lo 2b
    dsb sy

    bl mmu_on
    adrp x0, boot_stack_top
    mov sp, x0
    movz x0, #KERNEL_BASE_TOP, lsl #48
    orr x0, x0, x19
    mov x29, #0
    bl kernel_main

map_gib: /* x4 = table, x5 = physical address */
    lsr x6, x5, #30
    and x6, x6, #511
    lsl x7, x6, #30
    mov x8, #BLOCK_NORMAL
    orr x7, x7, x8
    movk x7, #UXN_TOP, lsl #48
    str x7, [x4, x6, lsl #3]
    ret

/* Returns at KERNEL_BASE, with x19 and x20 unchanged. */
mmu_on:
    mrs x2, id_aa64mmfr0_el1
    and x2, x2, #7 /* PARange; 6 and 7 do not occur with 48 bits */
    cmp x2, #5
    mov x3, #5
    csel x2, x2, x3, ls
    ldr w3, =TCR_BITS
    orr x3, x3, x2, lsl #32
    mrs x2, id_aa64mmfr1_el1
    and x2, x2, #15 /* HAFDBS: hardware sets the access flag; and dirty state */
    cbz x2, 1f
    orr x3, x3, #TCR_HA
    cmp x2, #1
    b.eq 1f
    orr x3, x3, #TCR_HD
1:  msr tcr_el1, x3
    mov x3, #MAIR_BITS
    msr mair_el1, x3
    adrp x3, linear_root
    msr ttbr0_el1, x3
    msr ttbr1_el1, x3
    msr cpacr_el1, xzr /* no FPU state exists here */
    mov x3, #2
    msr cntkctl_el1, x3 /* programs read the virtual counter */
    tlbi vmalle1
    dsb nsh
    isb
    ldr w3, =SCTLR_BITS
    mrs x2, id_aa64mmfr1_el1
    ubfx x2, x2, #20, #4
    cbnz x2, 1f
    orr x3, x3, #SCTLR_SPAN /* RES1 without PAN */
    msr sctlr_el1, x3
    isb
    b 2f
1:  msr sctlr_el1, x3 /* with SPAN = 0, an exception sets PAN */
    isb
    .inst 0xd500419f /* msr pan, #1 */
2:  movz x3, #KERNEL_BASE_TOP, lsl #48
    orr x30, x30, x3
    adr x2, 3f
    orr x2, x2, x3
    br x2
3:  adrp x2, kernel_root
    and x2, x2, #0x0000ffffffffffff
    msr ttbr0_el1, x2
    isb
    tlbi vmalle1
    dsb nsh
    isb
    ret

    .globl secondary
secondary: /* x0 = the number of this processor */
    msr daifset, #0xf
    mov x19, x0
    bl mmu_on
    adrp x1, cpus
    ldr x1, [x1, #:lo12:cpus]
    add x2, x19, #1
    mov x3, #CPU_SIZE
    madd x1, x2, x3, x1
    mov sp, x1
    mov x0, x19
    mov x29, #0
    bl secondary_main

    .ltorg

    .bss
    .balign 4096
    .globl linear_root, linear_l1, kernel_root
linear_root: .skip 4096
linear_l1: .skip 4096
kernel_root: .skip 4096 /* programs' part of the address space, without a program: the arena */
    .skip 8192
boot_stack_top:
    .balign 4096

    .section .note.GNU-stack, "", @progbits
