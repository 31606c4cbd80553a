/*
 * Clock frequencies. CPUID leaf 0x40000010 under the KVM signature has them (TSC kHz, APIC bus
 * kHz), on Lacuna and where a VMM on KVM sets it. Elsewhere the APIC is assumed to run at 1 GHz, as
 * it does in QEMU and KVM, and the TSC is measured against it for 10 ms.
 */
#include "kernel.h"

#define CALIBRATE_MS 10

u64 clock_khz, apic_khz = 1000000;

static bool told_by_cpuid(void) {
    if (kvm_leaves() < 0x40000010)
        return false;
    struct cpuid clocks = cpuid(0x40000010);
    clock_khz = clocks.eax;
    if (clocks.ebx)
        apic_khz = clocks.ebx;
    return clock_khz != 0;
}

void time_init(void) {
    if (told_by_cpuid())
        return;
    apic_timer_free_run();
    u32 from = apic_timer_elapsed();
    u64 tsc = rdtsc();
    while (apic_timer_elapsed() - from < CALIBRATE_MS * apic_khz)
        pause();
    clock_khz = (rdtsc() - tsc) / CALIBRATE_MS;
    if (!clock_khz)
        clock_khz = 1;
    interrupts_init();
}
