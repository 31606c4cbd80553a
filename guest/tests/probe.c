/* Runs on the building machine: prints what the C compiler makes of layouts and patterns. */
#include "../workloads/pattern.h"
#include "../workloads/zipf.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OFFSET(type, field) printf(#type "." #field " %zu\n", offsetof(struct type, field))

/* Prints how often each of 3000 ranks is drawn, and how often written if `zipf` writes half. */
static int draw(uint64_t s) {
    static struct zipf law;
    static unsigned count[3000], written[3000];
    uint64_t random = 4711;
    zipf_init(&law, 3000, s);
    for (int i = 0; i < 4000000; i++) {
        uint64_t rank = zipf_draw(&law, &random);
        count[rank]++;
        written[rank] += zipf_share(&random, 1 << 15);
    }
    for (int i = 0; i < 3000; i++)
        printf("%u %u\n", count[i], written[i]);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2)
        return draw(strtoul(argv[2], NULL, 10));
    if (argc > 1) {
        uint64_t key = pattern_key(1, 4711, 3);
        for (uint64_t w = 0; w < 512; w++) {
            uint64_t v = strcmp(argv[1], "keyed") ? pattern_random(key, w) : pattern_keyed(key, w);
            fwrite(&v, sizeof v, 1, stdout);
        }
        return 0;
    }
    printf("magic %lu\n", (unsigned long)LACUNA_STATUS_MAGIC);
    printf("version %d\n", LACUNA_STATUS_VERSION);
    printf("threads %d\n", LACUNA_MAX_THREADS);
    printf("more_bytes %d\n", (LACUNA_STATUS_PAGES - 1) * 4096);
    printf("cpus %d\n", LACUNA_MAX_CPUS);
    printf("memory_end_gib %d\n", LACUNA_MEMORY_END_GIB);
    printf("ports %d %d %d\n", LACUNA_PORT_COM1, LACUNA_PORT_EXIT, LACUNA_PORT_STATUS);
    printf("host %d %d\n", LACUNA_HOST_EXIT, LACUNA_HOST_STATUS);
    printf("exits %d %d\n", LACUNA_EXIT_PANIC, LACUNA_EXIT_FAULT);
    printf("entry_bytes %zu\n", sizeof(struct lacuna_status_entry));
    printf("name_bytes %zu\n", sizeof(((struct lacuna_status_entry *)0)->name));
    OFFSET(lacuna_status, magic);
    OFFSET(lacuna_status, version);
    OFFSET(lacuna_status, nthreads);
    OFFSET(lacuna_status, state);
    OFFSET(lacuna_status, exit_code);
    OFFSET(lacuna_status, apf_not_present);
    OFFSET(lacuna_status, apf_ready);
    OFFSET(lacuna_status, apf_wake_all);
    OFFSET(lacuna_status, apf_dummy);
    OFFSET(lacuna_status, apf_idle);
    OFFSET(lacuna_status, apf_lost);
    OFFSET(lacuna_status, paused);
    OFFSET(lacuna_status, setting);
    OFFSET(lacuna_status, entry);
    printf("kinds %d %d %d\n", LACUNA_KIND_WORKER, LACUNA_KIND_FAULTER, LACUNA_KIND_OTHER);
    OFFSET(lacuna_status_entry, counter);
    OFFSET(lacuna_status_entry, goal);
    OFFSET(lacuna_status_entry, kind);
    OFFSET(lacuna_status_entry, cpu);
    OFFSET(lacuna_status_entry, name);
    OFFSET(lacuna_status_entry, latency_ns);
    return 0;
}
