/* Loops with exactly known instruction counts, so that cpubench.c multiplies and needs no
 * counter. */
#include "cpubench.h"

    .text
/* (iterations, -) -> checksum; BENCH_ALU_INSNS each: short chains beside independent work */
    .globl bench_alu
    .hidden bench_alu
bench_alu:
    mov x1, #1
    mov x2, #2
    mov x3, #3
    mov x4, #5
    mov x5, #7
    mov x6, #11
    movz w9, #0x4567
    movk w9, #0x123, lsl #16
    .balign 32
1:  add x1, x1, x2
    eor x3, x3, x1
    add x4, x4, x5, lsl #1
    sub x5, x5, x3
    add w2, w2, w9
    lsr x6, x6, #3
    orr x6, x6, x4
    and x7, x5, x6
    add x3, x3, x7
    ror w2, w2, #27
    eor x4, x4, x7
    add x6, x6, #9
    sub w2, w2, w6
    madd x8, x4, x5, x6
    subs x0, x0, #1
    b.ne 1b
    add x0, x1, x3
    add x0, x0, x4
    add x0, x0, x2
    add x0, x0, x8
    ret

/* (iterations, base, mask of 8-byte words) -> last state; BENCH_MEM_INSNS each */
    .globl bench_mem
    .hidden bench_mem
bench_mem:
    movz x3, #0x7c15
    movk x3, #0x7f4a, lsl #16
    movk x3, #0x79b9, lsl #32
    movk x3, #0x9e37, lsl #48
    .balign 32
1:  eor x3, x3, x3, lsl #13
    eor x3, x3, x3, lsr #7
    eor x3, x3, x3, lsl #17
    and x4, x3, x2
    ldr x5, [x1, x4, lsl #3]
    add x5, x5, #1
    str x5, [x1, x4, lsl #3]
    subs x0, x0, #1
    b.ne 1b
    mov x0, x3
    ret

/*
 * (passes) -> checksum; a pass runs BENCH_BRANCHY_BLOCKS blocks of BENCH_BRANCHY_INSNS instructions
 * each, whichever way they branch, and BENCH_BRANCHY_LOOP more. It is some 105 KB of code without
 * repetition. Branches depend on data; passes take four paths in turn, because programs repeat
 * themselves.
 */
    .globl bench_branchy
    .hidden bench_branchy
bench_branchy:
    mov x2, #0
    .balign 32
1:  and w1, w0, #3
    .set key, 12345
    .rept BENCH_BRANCHY_BLOCKS
    .set key, (key * 1103515245 + 12345) & 0x7fffffff
    movz w3, #(key & 0xffff | 1)
    movk w3, #(key >> 16), lsl #16
    mul x1, x1, x3
    add x1, x1, x3
    tbz x1, #(20 + (key >> 16) % 24), 2f
    add x2, x2, x1
    eor x2, x2, x3
    b 3f
2:  sub x2, x2, x1
    ror x2, x2, #61
    add x2, x2, #1
3:
    .endr
    subs x0, x0, #1
    b.ne 1b
    mov x0, x2
    ret

    .section .note.GNU-stack, "", @progbits
