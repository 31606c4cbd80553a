/* The workload, which is linked separately, is embedded in the kernel image. */
    .section .program, "a", @progbits
    .balign 4096
    .globl program
program:
    .incbin "program.elf"
    .balign 4096

    .section .note.GNU-stack, "", @progbits
