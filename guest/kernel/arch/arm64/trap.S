/*
 * Kernel entry and exit.
 *
 * The kernel is event-driven: no thread has a kernel stack. While a program runs, SP_EL1 is the
 * running thread, which begins with its register frame. So an exception saves the registers in the
 * thread. The handler then runs on the processor's only stack, and ends with resume(any thread).
 *
 * The kernel runs with interrupts off. Only the idle loop enables them, and it has nothing to save.
 * But async page faults of the first form (RFCv2) are data aborts, which nothing masks. So ELR,
 * SPSR, ESR and FAR are live only between `vectors` and `vectors_end`: the kernel has the host send
 * no event while the processor is there. Everywhere else an event saves all registers on the stack
 * and returns.
 */
#include "layout.h"

    .macro SAVE_MOST
    stp x0, x1, [sp]
    stp x2, x3, [sp, #16]
    stp x4, x5, [sp, #32]
    stp x6, x7, [sp, #48]
    stp x8, x9, [sp, #64]
    stp x10, x11, [sp, #80]
    stp x12, x13, [sp, #96]
    stp x14, x15, [sp, #112]
    stp x16, x17, [sp, #128]
    stp x18, x19, [sp, #144]
    stp x20, x21, [sp, #160]
    stp x22, x23, [sp, #176]
    stp x24, x25, [sp, #192]
    stp x26, x27, [sp, #208]
    stp x28, x29, [sp, #224]
    mrs x0, elr_el1
    mrs x1, spsr_el1
    stp x0, x1, [sp, #FRAME_PC]
    .endm

    .macro RESTORE_MOST
    ldp x0, x1, [sp, #FRAME_PC]
    msr elr_el1, x0
    msr spsr_el1, x1
    ldp x28, x29, [sp, #224]
    ldp x26, x27, [sp, #208]
    ldp x24, x25, [sp, #192]
    ldp x22, x23, [sp, #176]
    ldp x20, x21, [sp, #160]
    ldp x18, x19, [sp, #144]
    ldp x16, x17, [sp, #128]
    ldp x14, x15, [sp, #112]
    ldp x12, x13, [sp, #96]
    ldp x10, x11, [sp, #80]
    ldp x8, x9, [sp, #64]
    ldp x6, x7, [sp, #48]
    ldp x4, x5, [sp, #32]
    ldp x2, x3, [sp, #16]
    ldp x0, x1, [sp]
    .endm

/* From a program: x0 = the thread, x1 = its processor, whose stack is empty, x2 = ESR, x3 = FAR. */
    .macro FROM_PROGRAM handler
    .balign 128
    SAVE_MOST
    mrs x2, sp_el0
    stp x30, x2, [sp, #FRAME_SP - 8]
    mov x0, sp
    ldr x1, [x0, #THREAD_CPU]
    add sp, x1, #CPU_SIZE
    mrs x2, esr_el1
    mrs x3, far_el1
    b \handler
    .endm

    .macro FROM_KERNEL handler
    .balign 128
    sub sp, sp, #FRAME_SIZE
    SAVE_MOST
    add x2, sp, #FRAME_SIZE
    stp x30, x2, [sp, #FRAME_SP - 8]
    mov x0, sp
    mrs x1, tpidr_el1
    mrs x2, esr_el1
    mrs x3, far_el1
    b \handler
    .endm

    .section .vectors, "ax"
    .balign 2048
    .globl vectors, vectors_end
vectors:
    .rept 4
    FROM_KERNEL trap_fatal /* with SP_EL0, which the kernel does not use */
    .endr
    FROM_KERNEL kernel_entered
    .balign 128
    mrs x0, tpidr_el1
    add sp, x0, #CPU_SIZE
    b trap_idle
    .rept 2
    FROM_KERNEL trap_fatal
    .endr
    FROM_PROGRAM trap_exception
    FROM_PROGRAM trap_interrupt
    .rept 6 /* FIQ, SError, and the four of AArch32 */
    FROM_PROGRAM trap_fatal
    .endr
    .balign 128

kernel_entered:
    bl trap_kernel
    cbz w0, 1f
    mrs x1, tpidr_el1
    str wzr, [x1, #CPU_REASON] /* the next event may arrive as soon as this one has returned */
1:  ldr x30, [sp, #FRAME_SP - 8]
    RESTORE_MOST
    add sp, sp, #FRAME_SIZE
    eret

    .globl resume
resume: /* x0 = thread, which begins with its frame */
    ldr x1, [x0, #THREAD_CPU]
    ldr w2, [x1, #CPU_LATER]
    cbnz w2, 1f
    mov sp, x0
    ldp x30, x2, [sp, #FRAME_SP - 8]
    msr sp_el0, x2
    RESTORE_MOST
    eret
1:  mov x0, x1 /* an event arrived after apf_before_user */

    .globl restart
restart: /* x0 = processor: leaves what it does in the kernel */
    add sp, x0, #CPU_SIZE
    b sched_resume
vectors_end:

    .text
/*
 * From `idle` to `idle_end` an event is handled at once, and the processor starts over. An
 * interrupt that is pending ends wfi although it is masked, so no wake-up is missed.
 */
    .globl idle, idle_end
idle: /* x0 = processor */
    add sp, x0, #CPU_SIZE
    ldr w1, [x0, #CPU_LATER]
    cbnz w1, 1f
    dsb sy
    wfi
    msr daifclr, #2
    isb
    msr daifset, #2
idle_end:
1:  b sched_resume

/*
 * Waits until the word is 0. An event between `apf_halt` and `apf_halt_end` starts this function
 * over, so no event is missed between the look and wfi.
 */
    .globl apf_halt, apf_halt_end
apf_halt: /* x0 = the word */
    ldr w1, [x0]
    cbz w1, apf_halt_end
    dsb sy
    wfi
    b apf_halt
apf_halt_end:
    ret

/*
 * The SDEI event of page-not-present. x1 = processor; x0 to x17 are this code's own. The event
 * stays in the area, so that no other one is sent, until this interrupt is handled.
 */
    .globl apf_event
apf_event:
    ldr x2, [x1, #CPU_INTERRUPT_SELF]
    msr s3_0_c12_c11_5, x2 /* ICC_SGI1R_EL1 */
    isb
    movz w0, #0xc400, lsl #16
    movk w0, #0x25 /* SDEI_EVENT_COMPLETE */
    mov x1, #0
    hvc #0
    b .

/*
 * System registers by number. The instruction is written here first. If it is undefined,
 * trap_kernel moves pc to msr_failed.
 */
    .macro PATCH label
    adr x3, \label
    str w0, [x3]
    dc cvau, x3
    dsb ish
    ic ivau, x3
    dsb ish
    isb
    .endm

    .globl msr_run_read, msr_read_insn, msr_run_write, msr_write_insn, msr_failed
msr_run_read: /* (instruction mrs x2, ..., u64 *value) -> 0 or -1 */
    PATCH msr_read_insn
msr_read_insn:
    nop
    str x2, [x1]
    mov w0, #0
    ret
msr_run_write: /* (instruction msr ..., x1, value) -> 0 or -1 */
    PATCH msr_write_insn
msr_write_insn:
    nop
    isb
    mov w0, #0
    ret
msr_failed:
    mov w0, #-1
    ret

    .section .note.GNU-stack, "", @progbits
