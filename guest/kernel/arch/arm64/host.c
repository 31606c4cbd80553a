/* Firmware calls (SMCCC, PSCI), the console, and the end of the machine. */
#include "kernel.h"
#include "lacuna/format.h"

#define PSCI_VERSION 0x84000000
#define PSCI_FEATURES 0x8400000a
#define PSCI_SYSTEM_OFF 0x84000008
#define PSCI_CPU_ON 0xc4000003
#define SMCCC_VERSION 0x80000000
#define VENDOR_UID 0x8600ff01
#define VENDOR_SERVICES 0x86000000

#define UART_DATA 0x00 /* PL011 */

u32 kernel_has_lse; /* bit 0, for atomics.S */

/* The calling convention leaves x4 to x17 to the callee. */
struct smccc firmware_call(u64 function, const u64 args[5]) {
    register u64 x0 asm("x0") = function;
    register u64 x1 asm("x1") = args[0];
    register u64 x2 asm("x2") = args[1];
    register u64 x3 asm("x3") = args[2];
    register u64 x4 asm("x4") = args[3];
    register u64 x5 asm("x5") = args[4];
    dsb();
    if (machine.by_smc)
        asm volatile("smc #0"
                     : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3), "+r"(x4), "+r"(x5)
                     :
                     : "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
                       "x17", "memory");
    else
        asm volatile("hvc #0"
                     : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3), "+r"(x4), "+r"(x5)
                     :
                     : "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
                       "x17", "memory");
    return (struct smccc){{x0, x1, x2, x3}};
}

static struct smccc call(u64 function, u64 a, u64 b, u64 c) {
    return firmware_call(function, (const u64[5]){a, b, c, 0, 0});
}

/* Whether SMCCC 1.1 is there, without which unknown functions may be undefined instructions. */
static bool has_smccc(void) {
    int32_t psci = (int32_t)call(PSCI_VERSION, 0, 0, 0).x[0];
    if (psci < 0x10000 || (int32_t)call(PSCI_FEATURES, SMCCC_VERSION, 0, 0).x[0] < 0)
        return false;
    return (int32_t)call(SMCCC_VERSION, 0, 0, 0).x[0] >= 0x10001;
}

bool vendor_services(u32 features[4]) {
    static const u32 kvm[4] = {0xb66fb428, 0xe911c52e, 0x564bcaa9, 0x743a004d};
    if (!has_smccc())
        return false;
    struct smccc uid = call(VENDOR_UID, 0, 0, 0), bitmap = call(VENDOR_SERVICES, 0, 0, 0);
    for (int i = 0; i < 4; i++) {
        if ((u32)uid.x[i] != kvm[i])
            return false;
        features[i] = (u32)bitmap.x[i];
    }
    return true;
}

void console_out(u8 byte) {
    if (machine.uart)
        write32(machine.uart + UART_DATA, byte);
}

void announce_status(u64 frame) {
    dsb();
    if (machine.host)
        write32(machine.host + LACUNA_HOST_STATUS, (u32)frame);
}

/* QEMU has no device for an exit code, but the debugger's calls have one (semihosting). */
static void semihosting_exit(u32 code) {
    const u64 block[2] = {0x20026, code}; /* the application has ended */
    register u64 x0 asm("x0") = 0x18;
    register u64 x1 asm("x1") = (u64)block;
    asm volatile("hlt #0xf000" : "+r"(x0) : "r"(x1) : "memory");
}

void exit_machine(u32 code) {
    const char *how = machine.cmdline ? lacuna_find_param(machine.cmdline, "exit") : NULL;
    dsb();
    if (machine.host)
        write32(machine.host + LACUNA_HOST_EXIT, code);
    if (how && how[0] == 's')
        semihosting_exit(code);
    call(PSCI_SYSTEM_OFF, 0, 0, 0);
}

void start_other_cpus(void) {
    extern u8 secondary[];
    for (u32 i = 1; i < ncpus; i++) {
        int32_t error = (int32_t)call(PSCI_CPU_ON, machine.ids[i], to_phys(secondary), i).x[0];
        if (error)
            panic("processor %u (%lx) does not start: PSCI error %d", i, machine.ids[i], error);
    }
}

u32 processor_init(void) {
    bool has = (read_sysreg(id_aa64isar0_el1) >> 20 & 15) >= 2;
    bool rcpc = read_sysreg(id_aa64isar1_el1) >> 20 & 15;
    kernel_has_lse = has && boot_param("lse", 1) ? LACUNA_HAS_LSE : 0;
    return kernel_has_lse | (rcpc ? LACUNA_HAS_RCPC : 0);
}

/* A program's hypercall: four words, aligned to their size, are arguments and results. */
u64 processor_call(struct thread *t, u64 number, u64 arg) {
    u64 pa = translate(t->space, arg);
    if (number != LACUNA_SYS_HYPERCALL || t->kill_at || arg % 32 || pa == NEVER)
        return ~0ull;
    u64 *x = from_phys(pa);
    struct smccc result = call(x[0], x[1], x[2], x[3]);
    for (int i = 0; i < 4; i++)
        x[i] = result.x[i];
    return 0;
}
