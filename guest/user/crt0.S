/* Where programs and threads begin, and the system call itself. */
#include "lacuna/abi.h"

    .text
    .globl _start
_start:
    call main
1:  movl %eax, %edi
    movl $LACUNA_SYS_EXIT, %eax
    syscall

    .globl thread_start
    .hidden thread_start
thread_start: /* rdi = function, rsi = argument */
    movq %rdi, %rax
    movq %rsi, %rdi
    call *%rax
    jmp 1b

    .section .note.GNU-stack, "", @progbits
