/*
 * The entry points; all lead to start64:
 *
 *   PVH (QEMU, other VMMs):  start32, 32-bit, paging off, EBX = hvm_start_info
 *   Lacuna:                  start64, long mode, identity-mapped, RBX = hvm_start_info; with
 *                            ap=direct all vCPUs start here, and wait for the one with APIC id 0
 *   SIPI:                    a copy of `trampoline` in low memory, real mode
 *
 * The kernel runs in an identity map: virtual = physical below the user's part. With the usual
 * high-half layout it would need relocation, and a larger trampoline.
 */
#include "layout.h"

#define CR4_BITS 0xa0      /* PAE, PGE */
#define EFER_BITS 0x901    /* NXE, LME, SCE */
#define CR0_BITS 0x80010025 /* PG, WP, NE, EM (no FPU state exists here), PE */

    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 8, 18 /* name size, descriptor size, XEN_ELFNOTE_PHYS32_ENTRY */
    .asciz "Xen"
    .quad start32

    .text
    .code32
    .globl start32
start32:
    cli
    cld
    movl $CR4_BITS, %eax
    movl %eax, %cr4
    movl $kernel_root, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    movl $EFER_BITS, %eax
    xorl %edx, %edx
    wrmsr
    movl $CR0_BITS, %eax
    movl %eax, %cr0
    lgdt boot_gdtr
    ljmp $SEL_KCODE, $start64

    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    movl $CR4_BITS, %eax
    movl %eax, %cr4
    movl $kernel_root, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    movl $EFER_BITS, %eax
    xorl %edx, %edx
    wrmsr
    movl $CR0_BITS, %eax
    movl %eax, %cr0
    lgdtl TRAMPOLINE + trampoline_gdtr - trampoline
    ljmpl $SEL_KCODE, $start64
trampoline_gdtr:
    .word 23
    .long boot_gdt
trampoline_end:

    .code64
    .globl start64
start64:
    cli
    cld
    movl $CR4_BITS, %eax
    movq %rax, %cr4
    movl $kernel_root, %eax
    movq %rax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $EFER_BITS, %eax
    wrmsr
    movl $CR0_BITS, %eax
    movq %rax, %cr0
    movq %rbx, %r12 /* cpuid overwrites rbx */
    xorl %eax, %eax
    cpuid
    cmpl $0xb, %eax
    jb 1f
    movl $0xb, %eax
    xorl %ecx, %ecx
    cpuid
    testl %ebx, %ebx /* leaf present but empty: no x2APIC id there */
    jz 1f
    movl %edx, %eax
    jmp 2f
1:  movl $1, %eax
    cpuid
    shrl $24, %ebx
    movl %ebx, %eax
2:  testl %eax, %eax
    jnz secondary
    movl $boot_stack_top, %esp
    movq %r12, %rdi
    call kernel_main

/* eax = APIC id. This loop touches nothing before the first processor has set everything up. */
secondary:
    pause
    cmpl $0, cpus_released
    je secondary
    cmpl ncpus, %eax
    jae park
    movl %eax, %edi
    imulq $CPU_SIZE, %rdi, %rcx
    addq cpus, %rcx
    leaq CPU_SIZE(%rcx), %rsp
    call secondary_main
park:
    cli
    hlt
    jmp park

    .data
    .balign 16
boot_gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
boot_gdtr:
    .word 23
    .long boot_gdt

/* The first 4 GiB in 2 MiB pages, supervisor only. mm.c adds what lies above. */
    .balign 4096
    .globl kernel_root
kernel_root:
    .quad kernel_pdpt + 3
    .fill 511, 8, 0
    .globl kernel_pdpt
kernel_pdpt:
    .quad kernel_pd + 0x3, kernel_pd + 0x1003, kernel_pd + 0x2003, kernel_pd + 0x3003
    .fill 508, 8, 0
kernel_pd:
    .set address, 0
    .rept 2048
    .if address == 0xfee00000
    .quad address + 0x193 /* the local APIC, uncached */
    .else
    .quad address + 0x183
    .endif
    .set address, address + 0x200000
    .endr

    .bss
    .balign 16
    .skip 4096
boot_stack_top:

    .section .note.GNU-stack, "", @progbits
