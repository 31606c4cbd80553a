/* From the boot information to the first program. */
#include "kernel.h"
#include "lacuna/format.h"

u32 ncpus = 1;
struct cpu *cpus;

u64 boot_param(const char *name, u64 otherwise) {
    const char *v = lacuna_find_param(info->cmdline, name);
    return v ? lacuna_parse_number(v) : otherwise;
}

static void cpu_init(u32 i) {
    struct cpu *c = cpu_at(i);
    c->tick_at = c->timer_at = NEVER;
    trap_cpu_init(c);
    space_cpu_init();
    interrupts_init();
    apf_enable(c);
}

void secondary_main(u32 i) {
    cpu_init(i);
    sched_resume(cpu_at(i));
}

static void count_cpus(struct boot *boot) {
    const char *smp = boot->cmdline ? lacuna_find_param(boot->cmdline, "smp") : NULL;
    u64 wanted = smp ? lacuna_parse_number(smp) : boot->ncpus;
    if (wanted > LACUNA_MAX_CPUS)
        panic("smp=%lu: this kernel supports 1 to %u processors", wanted, LACUNA_MAX_CPUS);
    boot->ncpus = wanted < 1 ? 1 : (u32)wanted;
}

static void start_cpus(u32 all) {
    info->ncpus = ncpus = all;
    apf_init();
    /* The heap has not yet had any page freed into it, so page_alloc returns pages in sequence. */
    cpus = page_alloc();
    if (to_phys(cpus) & (CPU_SIZE - 1))
        cpus = page_alloc();
    for (u32 i = 1; i < ncpus * (CPU_SIZE / PAGE); i++) {
        if (page_alloc() != (u8 *)cpus + i * PAGE)
            panic("no memory for %u processors: give more memory, or a smaller smp=", ncpus);
    }
    /* Before any other processor runs, because threads may be assigned to it before it runs. */
    for (u32 i = 0; i < ncpus; i++)
        cpu_at(i)->hardware_id = i;
    cpu_init(0);
    time_init();
    info->tsc_khz = clock_khz;
    sched_init(boot_param("tick_us", 1000), boot_param("slice_us", 4000));
    start_other_cpus();
    virtio_init();
}

/* start: what the loader passes. */
_Noreturn void kernel_main(const void *start) {
    static struct boot boot;
    boot_read(start, &boot);
    count_cpus(&boot);
    mm_init(&boot);
    announce_status(to_phys(status) / PAGE);
    info->processor = processor_init();
    trap_init();
    start_cpus(boot.ncpus);

    u64 entry;
    struct space *space = space_create(&entry);
    if (!space)
        panic("no memory for the program: give more memory");
    status->state = LACUNA_STATE_RUNNING;
    if (thread_create(NULL, space, (const u64[3]){entry, 0, 0}, 0) < 0)
        panic("no memory for the first thread: give more memory");
    sched_resume(cpu_at(0));
}
