/* The entry points of programs and threads. Both pass their function's result to lacuna_exit. */
    .text
    .globl _start
_start:
    bl main
    bl lacuna_exit

    .globl thread_start
    .hidden thread_start
thread_start: /* x0 = function, x1 = argument */
    mov x2, x0
    mov x0, x1
    blr x2
    bl lacuna_exit

    .section .note.GNU-stack, "", @progbits
