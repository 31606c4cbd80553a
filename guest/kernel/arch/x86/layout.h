/* Numbers that assembly and C share. kernel.h asserts that the structures agree. */
#ifndef LAYOUT_H
#define LAYOUT_H

#define SEL_KCODE 0x08
#define SEL_KDATA 0x10
#define SEL_UDATA 0x1b /* sysret wants user data at STAR + 8, user code at STAR + 16 */
#define SEL_UCODE 0x23
#define SEL_TSS 0x28

#define VEC_UD 6
#define VEC_PF 14
#define VEC_TIMER 32
#define VEC_RESCHED 33
#define VEC_SPURIOUS 47 /* low four bits set: older APICs require it */
#define VEC_DEVICE 48 /* every line of the I/O APIC that is in use */
#define VEC_APF_READY 0xf3 /* the vector that KVM guests use for their hypervisor's interrupt */
#define VEC_COUNT 256
#define VEC_SYSCALL 256 /* not an IDT vector: marks a frame made by the syscall instruction */

#define CPU_SIZE 8192 /* struct cpu, then its stack growing down towards it; aligned to this size */
#define CPU_SCRATCH 0
#define CPU_RSP0 16

#define THREAD_CPU 184 /* struct thread */

#define TRAMPOLINE 0x8000 /* where SIPI starts application processors */

#endif
