/* Numbers that assembly and C share. kernel.h and arch.h assert that the structures agree. */
#ifndef LAYOUT_H
#define LAYOUT_H

/* struct frame */
#define FRAME_SP 248
#define FRAME_PC 256
#define FRAME_PSTATE 264
#define FRAME_SIZE 288

#define CPU_SIZE 8192 /* struct cpu, then its stack growing down towards it */
#define CPU_REASON 448 /* the reason word of async page faults, which the host writes */
#define CPU_LATER 0 /* struct arch_cpu: events that wait until the kernel has done its work */
#define CPU_INTERRUPT_SELF 8

#define THREAD_CPU 296 /* struct thread */

/* The kernel's virtual addresses are physical ones plus this; loaded by one movz. */
#define KERNEL_BASE 0xffff000000000000
#define KERNEL_BASE_TOP 0xffff

/* Interrupts: software-generated ones that the kernel uses. */
#define VEC_RESCHED 0 /* another processor has work for this one */
#define VEC_APF 1     /* this processor's own: a page-not-present event arrived (apf.c) */

#define PSTATE_EL0 0x0
#define PSTATE_EL1H 0x5
#define PSTATE_ALL_MASKED 0x3c0 /* D, A, I, F */

#endif
