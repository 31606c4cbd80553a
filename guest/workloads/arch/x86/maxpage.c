/*
 * The instructions that touch the most pages. Code, source and destination each cross a page at a
 * boundary where all four levels of page tables change, so that one instruction needs
 *
 *   6 pages + 6 x 3 tables below one top table = 25 pages, all at once
 *
 * A host that keeps too few pages for a vCPU, or evicts one before the instruction is complete,
 * never completes it.
 */
#include "lacuna.h"

#define PAGE 4096ull
#define SLOT(n) ((uint64_t)(n) << 39) /* where a top-level entry begins */
#define CODE SLOT(5)
#define FROM SLOT(7)
#define TO SLOT(9)

static int cross(uint64_t boundary, int first_page) {
    for (int half = 0; half < 2; half++) {
        char *page = lacuna_arena() + (uint64_t)(first_page + half) * PAGE;
        if (lacuna_alias((void *)(boundary - PAGE + (uint64_t)half * PAGE), page))
            return -1;
    }
    return 0;
}

/* Puts a two-byte instruction across the code boundary, and after it a jump to rdx. */
static void put_code(uint8_t first, uint8_t second) {
    volatile uint8_t *at = (volatile uint8_t *)CODE;
    at[-1] = first;
    at[0] = second;
    at[1] = 0xff; /* jmp *%rdx */
    at[2] = 0xe2;
    uint32_t eax = 0, ecx = 0;
    __asm__ volatile("cpuid" : "+a"(eax), "+c"(ecx) : : "rbx", "rdx");
}

/* Runs it with rsi at the source, rdi at the destination, and for pushes rsp there too. */
static void run_code(uint64_t rsi, uint64_t rdi, uint64_t rsp) {
    __asm__ volatile("movq %%rsp, %%rbx\n"
                     "movq %[sp], %%rsp\n"
                     "leaq 1f(%%rip), %%rdx\n"
                     "jmp *%[code]\n"
                     "1: movq %%rbx, %%rsp"
                     : "+S"(rsi), "+D"(rdi)
                     : [sp] "r"(rsp), [code] "r"(CODE - 1)
                     : "rbx", "rdx", "memory");
}

struct instruction {
    const char *name;
    uint8_t code[2];
    uint64_t rsi, rdi, rsp;
};

static const struct instruction instructions[] = {
    {"movsq", {0x48, 0xa5}, FROM - 4, TO - 4, TO + 64},    /* rex.w movs: rsi to rdi */
    {"push_mem", {0xff, 0x36}, FROM - 4, TO + 64, TO + 4}, /* push (%rsi) */
};

static bool moved(uint64_t i, uint64_t key) {
    uint64_t found;
    memcpy(&found, (void *)(TO - 4), 8);
    if (found == key)
        return true;
    lacuna_printf("maxpage: %s: expected %lx found %lx\n", instructions[i].name, key, found);
    return false;
}

int main(void) {
    uint64_t iterations = lacuna_param("iters", 1000);
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "maxpage", 2 * iterations);
    if (cross(CODE, 0) || cross(FROM, 16) || cross(TO, 32)) {
        lacuna_printf("maxpage: no memory for page tables: give more memory\n");
        return 2;
    }
    for (uint64_t i = 0; i < 2; i++) {
        put_code(instructions[i].code[0], instructions[i].code[1]);
        for (uint64_t n = 0; n < iterations; n++, me->counter++) {
            uint64_t key = lacuna_mix(n + i), zero = 0;
            memcpy((void *)(FROM - 4), &key, 8);
            memcpy((void *)(TO - 4), &zero, 8);
            run_code(instructions[i].rsi, instructions[i].rdi, instructions[i].rsp);
            if (!moved(i, key))
                return 1;
        }
        lacuna_printf("RESULT instruction=%s iterations=%lu\n", instructions[i].name, iterations);
    }
    return 0;
}
