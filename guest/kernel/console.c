/* Output on the console, and the end of the machine. The kernel polls no status, because no device
 * here is ever busy. */
#include "kernel.h"
#include "lacuna/format.h"

static spinlock console_lock;

void console_write(const char *s, size_t n) {
    lock(&console_lock);
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\n')
            console_out('\r');
        console_out((u8)s[i]);
    }
    unlock(&console_lock);
}

static void vprint(const char *fmt, va_list args) {
    char line[200];
    console_write(line, lacuna_format(line, sizeof line, fmt, args));
}

void kprintf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vprint(fmt, args);
    va_end(args);
}

void panic(const char *fmt, ...) {
    va_list args;
    interrupts_off();
    kprintf("\npanic: ");
    va_start(args, fmt);
    vprint(fmt, args);
    va_end(args);
    kprintf("\n");
    shutdown(LACUNA_EXIT_PANIC);
}

void shutdown(u32 code) {
    if (status) {
        for (u32 i = 0; cpus && i < ncpus; i++)
            apf_publish(cpu_at(i));
        status->exit_code = code;
        __atomic_store_n(&status->state, LACUNA_STATE_DONE, __ATOMIC_RELEASE);
    }
    exit_machine(code);
    for (;;)
        halt();
}
