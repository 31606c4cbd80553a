/*
 * Kernel entry and exit.
 *
 * The kernel is event-driven: no thread has a kernel stack. RSP0 points at the end of the running
 * thread's own register frame, so that a trap from user mode saves the registers in the thread. The
 * handler then runs on the processor's only stack, and ends with resume(any thread). So a thread
 * switch needs nothing but a resume of another thread. A thread that sleeps in a page fault is only
 * not resumed.
 *
 * The kernel runs with interrupts off. Only the idle loop enables them, and it has nothing to save.
 */
#include "layout.h"

    .macro SAVE
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %rax
    pushq %r8
    pushq %r9
    pushq %r10
    pushq %r11
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    .endm

    .macro RESTORE
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    popq %r11
    popq %r10
    popq %r9
    popq %r8
    popq %rax
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    .endm

/*
 * From user mode, with the vector on the stack: rdi = the thread, whose frame is complete;
 * rsi = its processor, whose stack is empty.
 */
    .macro ENTER
    SAVE
    movq %rsp, %rdi
    movq THREAD_CPU(%rsp), %rsi
    leaq CPU_SIZE - 8(%rsi), %rsp /* as if called */
    .endm

    .text
    .globl syscall_entry
syscall_entry: /* the only entry that needs gs to find its stack */
    swapgs
    movq %rsp, %gs:CPU_SCRATCH
    movq %gs:CPU_RSP0, %rsp
    pushq $SEL_UDATA
    pushq %gs:CPU_SCRATCH
    swapgs
    pushq %r11
    pushq $SEL_UCODE
    pushq %rcx
    pushq $0
    pushq $VEC_SYSCALL
    jmp user_entered

trap_entry: /* vector and error code are on the stack */
    testb $3, 24(%rsp)
    jz kernel_entered
user_entered:
    ENTER
    movl 8 * 15(%rdi), %edx /* vector */
    jmp trap_user

/* The two most frequent events have stubs of their own. trap.c has the rest of these fast paths. */
    .globl page_fault_entry, page_ready_entry
page_fault_entry:
    testb $3, 16(%rsp)
    jz trap_stubs + 16 * VEC_PF
    pushq $VEC_PF
    ENTER
    jmp trap_page_fault
page_ready_entry:
    testb $3, 8(%rsp)
    jz trap_stubs + 16 * VEC_APF_READY
    subq $8, %rsp /* the error code's place: interrupts push none */
    pushq $VEC_APF_READY
    ENTER
    jmp trap_page_ready

kernel_entered:
    cmpl $32, (%rsp)
    jae idle_interrupted
    SAVE
    movq %rsp, %rdi
    movq %rsp, %rsi
    andq $-CPU_SIZE, %rsi
    call trap_kernel
    RESTORE
    addq $16, %rsp
    iretq

idle_interrupted:
    movl (%rsp), %edi
    movq %rsp, %rsi
    andq $-CPU_SIZE, %rsi
    leaq CPU_SIZE - 8(%rsi), %rsp
    jmp trap_idle

    .globl idle
idle: /* rdi = processor */
    leaq CPU_SIZE - 8(%rdi), %rsp
    sti
    hlt /* no interrupt is taken between sti and hlt: no wake-up is missed */
    cli /* if the host ended the halt without an interrupt: look for work, halt again */
    jmp sched_resume

    .globl resume, resume_any
resume: /* rdi = thread, which begins with its frame */
    cmpl $VEC_SYSCALL, 8 * 15(%rdi)
    jne resume_any
    movq %rdi, %rsp
    RESTORE
    movq 40(%rsp), %rsp /* rcx and r11 hold rip and rflags as syscall left them */
    sysretq
resume_any: /* works for every kind of frame */
    movq %rdi, %rsp
    RESTORE
    addq $16, %rsp
    iretq

/* rdmsr and wrmsr that survive #GP: trap_kernel moves rip to msr_failed. */
    .globl msr_read, msr_read_insn, msr_write, msr_write_insn, msr_failed
msr_read: /* (index, u64 *value) -> 0 or -1 */
    movl %edi, %ecx
msr_read_insn:
    rdmsr
    movl %eax, (%rsi)
    movl %edx, 4(%rsi)
    xorl %eax, %eax
    ret
msr_write: /* (index, value) -> 0 or -1 */
    movl %edi, %ecx
    movl %esi, %eax
    shrq $32, %rsi
    movl %esi, %edx
msr_write_insn:
    wrmsr
    xorl %eax, %eax
    ret
msr_failed:
    movl $-1, %eax
    ret

    .globl load_segments
load_segments: /* reload cs and ss from the new GDT; fs and gs bases are set by MSR */
    popq %rax
    movl $SEL_KDATA, %ecx
    movl %ecx, %ss
    movl %ecx, %ds
    movl %ecx, %es
    pushq $SEL_KCODE
    pushq %rax
    lretq

/* All stubs have one size: stub n is at trap_stubs + 16 n. */
    .balign 16
    .globl trap_stubs
trap_stubs:
    .set vector, 0
    .rept VEC_COUNT
    .balign 16
    .if !((vector == 8) | ((vector >= 10) & (vector <= 14)) | (vector == 17) | (vector == 21))
    pushq $0
    .endif
    pushq $vector
    .if (vector == 2) | (vector == 8) | (vector == 18)
    jmp fatal_entry /* NMI, #DF, #MC: on a stack of their own, never resumed */
    .else
    jmp trap_entry
    .endif
    .set vector, vector + 1
    .endr

fatal_entry:
    SAVE
    movq %rsp, %rdi
    call trap_fatal

    .section .note.GNU-stack, "", @progbits
