/*
 * The entry points; all lead to start64:
 *
 *   PVH (QEMU, other VMMs):  start32, 32-bit, paging off, EBX = hvm_start_info
 *   Lacuna:                  start64, long mode, identity-mapped, RBX = hvm_start_info; with
 *                            ap=direct all vCPUs start here, and halt until the one with APIC id
 *                            0 interrupts them: if they waited in a loop, a host with fewer
 *                            processors would run them instead of the first one
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

/* eax = APIC id. Until the first processor has set everything up, this touches nothing of it. All
 * wait on one stack: an interrupt's frame is the same for each, and nothing reads it. */
secondary:
    movl %eax, %r13d
    movl $waiting_stack_top, %esp
    lgdt boot_gdtr
    movl $woken, %eax
    movw %ax, woken_gate
    shrl $16, %eax
    movw %ax, woken_gate + 6
    lidt waiting_idtr
    movl $1, %eax
    cpuid
    movl %ecx, %r14d /* bit 21: x2APIC */
    movl $0x1b, %ecx /* APIC_BASE: enable */
    rdmsr
    orl $0x800, %eax
    wrmsr
    movl $0xfee000f0, %ebx /* SVR */
    btl $21, %r14d
    jc 1f
    movl $0x100 | VEC_SPURIOUS, (%rbx)
    jmp 2f
1:  orl $0xc00, %eax
    wrmsr
    movl $0x80f, %ecx
    movl $0x100 | VEC_SPURIOUS, %eax
    xorl %edx, %edx
    wrmsr
2:  mfence /* the interrupt finds the APIC enabled, or this processor finds itself released */
wait:
    cmpl $0, cpus_released
    jne released
    sti
    hlt
    cli
    jmp wait
woken:
    btl $21, %r14d
    jc 1f
    movl $0, 0xfee000b0 - 0xfee000f0(%rbx) /* EOI */
    jmp wait
1:  movl $0x80b, %ecx
    xorl %eax, %eax
    xorl %edx, %edx
    wrmsr
    jmp wait
released:
    movl %r13d, %eax
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
    .quad boot_gdt
/* The only interrupt here is VEC_RESCHED. Its gate is all that there is of the table. */
    .balign 16
woken_gate:
    .word 0, SEL_KCODE, 0x8e00, 0
    .quad 0
waiting_idtr:
    .word 16 * VEC_RESCHED + 15
    .quad woken_gate - 16 * VEC_RESCHED

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
    .skip 64
waiting_stack_top:

    .section .note.GNU-stack, "", @progbits
