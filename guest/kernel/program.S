/* The workload, linked on its own, rides inside the kernel image. */
    .section .program, "a", @progbits
    .balign 4096
    .globl program
program:
    .incbin "program.elf"
    .balign 4096

    .section .note.GNU-stack, "", @progbits
