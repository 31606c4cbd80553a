/*
 * The host's side of async page faults: KVM's interface (Documentation/virt/kvm/x86/msr.rst).
 *
 *                    page not present               page ready
 *   today's          #PF, reason 1, CR2 = token     interrupt, token in the area; then ACK
 *   original (2010)  #PF, reason 1, CR2 = token     #PF, reason 2, CR2 = token
 */
#ifndef APF_HOST_H
#define APF_HOST_H

#include "kernel.h"

#define MSR_APF_EN 0x4b564d02
#define MSR_APF_INT 0x4b564d06
#define MSR_APF_ACK 0x4b564d07

#define EN_ENABLED 1u
#define EN_SEND_ALWAYS 2u /* at CPL 0, too */
#define EN_BY_INTERRUPT 8u

#define FEATURE_APF 4
#define FEATURE_APF_INT 14

#define REASON_NOT_PRESENT 1u

static inline u32 apf_host_features(void) { return kvm_leaves() ? cpuid(0x40000001).eax : 0; }

/* The token of a page fault. */
static inline u32 apf_host_token(void) { return (u32)read_cr2(); }

/* Each of the following returns 0, or -1 where the host refuses. */
static inline int apf_host_set_vector(u32 vector) { return msr_write(MSR_APF_INT, vector); }
static inline int apf_host_enable(const struct apf_area *area, u32 control) {
    return msr_write(MSR_APF_EN, (u64)area | control);
}
static inline int apf_host_disable(void) { return msr_write(MSR_APF_EN, 0); }
static inline int apf_host_acknowledge(void) { return msr_write(MSR_APF_ACK, 1); }

/* For a token that the host has announced: it does not refuse then. */
static inline void apf_host_acknowledge_token(void) { wrmsr(MSR_APF_ACK, 1); }

#endif
