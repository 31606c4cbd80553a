/* The host's events of async page faults: KVM's interface of x86 (apf_host.h). */
#include "apf_host.h"
#include "kernel.h"
#include "lacuna/format.h"

static u32 control; /* for apf_host_enable; 0: no async page faults */

/* Chooses the ABI: the one in apf=off|int|pf, else the first one that the host offers. */
void apf_init(void) {
    u32 features = apf_host_features();
    bool by_interrupt = features >> FEATURE_APF_INT & 1;
    const char *how = lacuna_find_param(info->cmdline, "apf");
    char delivery = how ? how[0] : by_interrupt ? 'i' : 'p';
    if (!(features >> FEATURE_APF & 1))
        return;
    if (delivery == 'i' && by_interrupt)
        control = EN_ENABLED | EN_BY_INTERRUPT;
    else if (delivery == 'p')
        control = EN_ENABLED;
    if (control && boot_param("apf_always", 0))
        control |= EN_SEND_ALWAYS;
}

bool apf_enable(struct cpu *c) {
    if (!control)
        return false;
    if (control & EN_BY_INTERRUPT && apf_host_set_vector(VEC_APF_READY))
        return false;
    return !apf_host_enable(&c->apf.area, control);
}

bool apf_sleep(struct cpu *c, struct thread *t) {
    if (c->apf.area.reason != REASON_NOT_PRESENT || !apf_try_sleep(c, t, apf_host_token()))
        return false;
    c->apf.area.reason = 0;
    return true;
}

struct thread *apf_sleeper(struct cpu *c) {
    struct thread *t = apf_try_wake(c, c->apf.area.token);
    if (!t)
        return NULL;
    c->apf.area.token = 0;
    apf_host_acknowledge_token();
    interrupt_end();
    return t;
}

bool apf_page_fault(struct cpu *c) {
    u32 reason = c->apf.area.reason;
    if (!reason)
        return false;
    c->apf.area.reason = 0;
    u32 token = apf_host_token();
    if (reason & REASON_NOT_PRESENT)
        apf_not_present(c, token);
    else
        apf_page_ready(c, token);
    return true;
}

/* If there is no token, this interrupt was already on its way when apf_disable cleared the area. */
void apf_interrupt(struct cpu *c) {
    u32 token = c->apf.area.token;
    if (!token)
        return;
    apf_page_ready(c, token);
    c->apf.area.token = 0;
    apf_host_acknowledge();
}

/* Once disabled, the host has forgotten the faults of this processor, and does not write to
 * the area any more. */
void apf_disable(struct cpu *c) {
    if (!control)
        return;
    apf_host_disable();
    c->apf.area.reason = c->apf.area.token = 0;
    apf_wake_all(c);
}
