/*
 * Loops with exactly known instruction counts, so that cpubench.c multiplies and needs no counter.
 * The same object runs in the guest and natively.
 */
#include "cpubench.h"

    .text
/* (iterations, -) -> checksum; BENCH_ALU_INSNS each: short chains beside independent work */
    .globl bench_alu
    .hidden bench_alu
bench_alu:
    movl $1, %eax
    movl $2, %ecx
    movl $3, %edx
    movl $5, %esi
    movl $7, %r8d
    movl $11, %r9d
    .balign 32
1:  addq %rcx, %rax
    xorq %rax, %rdx
    leaq 3(%rsi,%r8,2), %rsi
    subq %rdx, %r8
    addl $0x1234567, %ecx
    shrq $3, %r9
    orq %rsi, %r9
    movq %r8, %r10
    andq %r9, %r10
    addq %r10, %rdx
    roll $5, %ecx
    xorq %r10, %rsi
    addq $9, %r9
    subl %r9d, %ecx
    decq %rdi
    jnz 1b
    addq %rdx, %rax
    addq %rsi, %rax
    addq %rcx, %rax
    ret

/* (iterations, base, mask of 8-byte words) -> last state; BENCH_MEM_INSNS each */
    .globl bench_mem
    .hidden bench_mem
bench_mem:
    movabsq $0x9e3779b97f4a7c15, %rax
    .balign 32
1:  movq %rax, %rcx
    shlq $13, %rcx
    xorq %rcx, %rax
    movq %rax, %rcx
    shrq $7, %rcx
    xorq %rcx, %rax
    movq %rax, %rcx
    shlq $17, %rcx
    xorq %rcx, %rax
    movq %rax, %rcx
    andq %rdx, %rcx
    addq $1, (%rsi,%rcx,8)
    decq %rdi
    jnz 1b
    ret

/*
 * (passes) -> checksum; a pass runs BENCH_BRANCHY_BLOCKS blocks of BENCH_BRANCHY_INSNS instructions
 * each, whichever way they branch, and BENCH_BRANCHY_LOOP more. It is some 115 KB of code without
 * repetition. Branches depend on data; passes take four paths in turn, because programs repeat
 * themselves.
 */
    .globl bench_branchy
    .hidden bench_branchy
bench_branchy:
    xorl %edx, %edx
    .balign 32
1:  movl %edi, %eax
    andl $3, %eax
    .set key, 12345
    .rept BENCH_BRANCHY_BLOCKS
    .set key, (key * 1103515245 + 12345) & 0x7fffffff
    imulq $(key | 1), %rax, %rax
    .set key, (key * 1103515245 + 12345) & 0x7fffffff
    addq $(key | 0x1000000), %rax
    movq %rax, %rcx
    shrq $(20 + (key >> 16) % 24), %rcx
    testb $1, %cl
    jz 2f
    addq %rax, %rdx
    xorq $(key >> 1 | 0x1000000), %rdx
    jmp 3f
2:  subq %rcx, %rdx
    rolq $3, %rdx
    leaq 1(%rdx), %rdx
3:
    .endr
    decq %rdi
    jnz 1b
    movq %rdx, %rax
    ret
    .globl bench_branchy_end
    .hidden bench_branchy_end
bench_branchy_end:

    .section .note.GNU-stack, "", @progbits
