/*
 * The instructions that touch the most pages. The data crosses a page at a boundary where all four
 * levels of page tables change, and the code is in a page with tables of its own, so that one
 * instruction needs
 *
 *   3 pages + 3 x 3 tables below one top table = 13 pages, all at once
 *
 * A host that keeps too few pages for a vCPU, or evicts one before the instruction is complete,
 * never completes it. Code cannot cross a page, because instructions are aligned.
 */
#include "lacuna.h"

#define PAGE 4096ull
#define SLOT(n) ((uint64_t)(n) << 39) /* where a top-level entry begins */
#define CODE SLOT(5)
#define DATA SLOT(7)

#define RET 0xd65f03c0u

struct pair {
    uint64_t low, high;
};

typedef struct pair function(uint64_t low, uint64_t high, void *at);

static int cross(uint64_t boundary, int first_page) {
    for (int half = 0; half < 2; half++) {
        char *page = lacuna_arena() + (uint64_t)(first_page + half) * PAGE;
        if (lacuna_alias((void *)(boundary - PAGE + (uint64_t)half * PAGE), page))
            return -1;
    }
    return 0;
}

struct instruction {
    const char *name;
    uint32_t code;
    uint64_t offset; /* from the boundary, down */
    bool loads;
};

static const struct instruction instructions[] = {
    {"ldp", 0xa9400440, 8, true},          /* ldp x0, x1, [x2] */
    {"stp", 0xa9000440, 8, false},         /* stp x0, x1, [x2] */
    {"ldp_misaligned", 0xa9400440, 5, true},
    {"stp_misaligned", 0xa9000440, 5, false},
};

static function *put_code(uint32_t code) {
    uint32_t *at = (uint32_t *)CODE;
    __asm__("" : "+r"(at)); /* gcc 12 emits no call to an address that it knows */
    at[0] = code;
    at[1] = RET;
    lacuna_code_written(at, 8);
    return (function *)at;
}

static bool once(const struct instruction *i, function *fn, uint64_t key) {
    char *at = (char *)(DATA - i->offset);
    struct pair want = {key, lacuna_mix(key)}, found = {0, 0};
    memcpy(at, i->loads ? &want : &found, sizeof want);
    struct pair result = fn(want.low, want.high, at);
    memcpy(&found, at, sizeof found);
    if (i->loads)
        found = result;
    if (found.low == want.low && found.high == want.high)
        return true;
    lacuna_printf("maxpage: %s: expected %lx %lx found %lx %lx\n", i->name, want.low, want.high,
                  found.low, found.high);
    return false;
}

int main(void) {
    uint64_t iterations = lacuna_param("iters", 1000);
    size_t n = sizeof instructions / sizeof *instructions;
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "maxpage", n * iterations);
    if (lacuna_alias((void *)CODE, lacuna_arena()) || cross(DATA, 16)) {
        lacuna_printf("maxpage: no memory for page tables: give more memory\n");
        return 2;
    }
    for (size_t i = 0; i < n; i++) {
        function *fn = put_code(instructions[i].code);
        for (uint64_t k = 0; k < iterations; k++, me->counter++) {
            if (!once(&instructions[i], fn, lacuna_mix(k + i)))
                return 1;
        }
        lacuna_printf("RESULT instruction=%s iterations=%lu\n", instructions[i].name, iterations);
    }
    return 0;
}
