/*
 * The entry points of programs and threads. Both pass their function's result to lacuna_exit. The
 * stack is entered as by a call (rsp + 8 is a multiple of 16) and aligned for the next one.
 */
    .text
    .globl _start
_start:
    subq $8, %rsp
    call main
    movl %eax, %edi
    call lacuna_exit

    .globl thread_start
    .hidden thread_start
thread_start: /* rdi = function, rsi = argument */
    subq $8, %rsp
    movq %rdi, %rax
    movq %rsi, %rdi
    call *%rax
    movl %eax, %edi
    call lacuna_exit

    .section .note.GNU-stack, "", @progbits
