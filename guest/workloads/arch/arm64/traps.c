/*
 * What each exception leaves behind: vector, ESR_EL1, FAR_EL1, ELR_EL1 and SPSR_EL1. The workload
 * takes over the vectors of EL1 and one entry of the top table, and executes one instruction after
 * the other at EL0 or EL1, on translation tables that it makes for it. The lines that it prints do
 * not depend on where memory is, so two implementations of the architecture can be compared.
 *
 * A line `trap` is one instruction without tables of its own. A line `walks` is a digest of many
 * random ones: the tables have a leaf at level 1, 2 or 3, with random bits. `show` gives the
 * numbers of those that are printed, one line each.
 *
 * Some cases are left out. WFI traps only if no interrupt is pending. QEMU 7.2 checks no alignment
 * of SP, traps no WFE, and has its own way with a trapped MSR (immediate) of DAIF, with ISS.WnR of
 * atomic instructions, with cache maintenance by address that fails, with a block at level 0, and
 * with DBM for AT and for fetches. Tests of the processor cover these.
 */
#include "lacuna.h"

#define PAGE 4096ull
#define TEST_ENTRY 8ull /* of the top table: no one else uses it */
#define TEST_BASE (TEST_ENTRY << 39)
#define KERNEL_BASE 0xffff000000000000 /* all of memory, for EL1 */

enum { EL0 = 0x3c0, EL1T = 0x3c4, EL1 = 0x3c5, PAN = 1 << 22 };
enum { BLOB, LEVEL_1, LEVEL_2, LEVEL_3, TARGET, CODE, PAGES };

#define V 1ull
#define TABLE 2ull
#define USER (1ull << 6)
#define READ_ONLY (1ull << 7)
#define SHAREABLE (3ull << 8)
#define AF (1ull << 10)
#define DBM (1ull << 51)
#define PXN (1ull << 53)
#define UXN (1ull << 54)
#define FRAME 0x0000fffffffff000ull
#define BEYOND (1ull << 33) /* an address outside TCR_EL1.IPS, which is 32 bits here */
#define NO_MEMORY 0x70000000ull

#define ID_AA64MMFR1 0x4039 /* for lacuna_rdmsr: op0 3, op1 0, CRn 0, CRm 7, op2 1 */

#define PAR_NS (1ull << 9) /* unknown in PAR_EL1 */
#define TCR_HA (1ull << 39)
#define TCR_HD (1ull << 40)
#define TCR_TBI0 (1ull << 37)
#define TCR_IPS (7ull << 32)

/* The inputs of one instruction, and its results. traps_run and the vectors know the order. */
struct block {
    uint64_t pc, pstate, sp, x0, x1, sctlr;
    uint64_t vector, esr, far, elr, spsr, out_x0, out_x1;
    uint64_t kernel_sctlr, kernel_sp, saved[12];
};

/*
 * Copied to a page of memory, and used at its address in TTBR1: the vectors, the way into an
 * instruction, and the block. SP and all registers are the instruction's; only TPIDR_EL0 is free.
 */
#define BLOCK_AT 0xc00
#define RUN_AT 0x900
#define BLOB_BYTES 0xa00
__asm__(".pushsection .text\n .balign 128\n"
        "traps_blob:\n"
        ".set vector, 0\n"
        ".rept 16\n .balign 128\n"
        "msr tpidr_el0, x0\n adr x0, traps_blob + 0xc00\n str x1, [x0, #96]\n"
        "mov x1, #vector\n b traps_entered\n"
        ".set vector, vector + 128\n .endr\n"
        ".balign 128\n"
        "traps_entered:\n"
        "str x1, [x0, #48]\n mrs x1, tpidr_el0\n str x1, [x0, #88]\n"
        "mrs x1, esr_el1\n str x1, [x0, #56]\n mrs x1, far_el1\n str x1, [x0, #64]\n"
        "mrs x1, elr_el1\n str x1, [x0, #72]\n mrs x1, spsr_el1\n str x1, [x0, #80]\n"
        "ldr x1, [x0, #104]\n msr sctlr_el1, x1\n isb\n"
        "ldr x1, [x0, #112]\n mov sp, x1\n"
        "ldp x19, x20, [x0, #120]\n ldp x21, x22, [x0, #136]\n ldp x23, x24, [x0, #152]\n"
        "ldp x25, x26, [x0, #168]\n ldp x27, x28, [x0, #184]\n ldp x29, x30, [x0, #200]\n"
        ".inst 0xd500409f\n" /* msr pan, #0: the program's memory */
        "ret\n"
        ".org traps_blob + 0x900\n"
        "traps_run:\n"
        "adr x0, traps_blob + 0xc00\n"
        "stp x19, x20, [x0, #120]\n stp x21, x22, [x0, #136]\n stp x23, x24, [x0, #152]\n"
        "stp x25, x26, [x0, #168]\n stp x27, x28, [x0, #184]\n stp x29, x30, [x0, #200]\n"
        "mov x1, sp\n str x1, [x0, #112]\n mrs x1, sctlr_el1\n str x1, [x0, #104]\n"
        "ldp x1, x2, [x0]\n msr elr_el1, x1\n msr spsr_el1, x2\n"
        "ldr x1, [x0, #40]\n msr sctlr_el1, x1\n isb\n"
        "ldr x3, [x0, #16]\n"
        "tbz x2, #2, 1f\n tbz x2, #0, 1f\n mov sp, x3\n b 2f\n"
        "1: msr sp_el0, x3\n"
        "2: ldp x0, x1, [x0, #24]\n eret\n"
        ".org traps_blob + 0xa00\n .popsection\n");
extern const char traps_blob[];

struct instruction {
    const char *name;
    uint32_t code;
    bool fetch;     /* it is fetched from the tested address */
    bool el1_only;  /* of EL0 there is a line `trap` */
    uint64_t shift; /* added to the address: alignment, or the end of the page */
};

/* On the address in x0, and x1. */
static const struct instruction accesses[] = {
    {"ldr", 0xf9400001, false, false, 0},
    {"str", 0xf9000001, false, false, 0},
    {"ldrb", 0x39400001, false, false, 5},
    {"strh", 0x79000001, false, false, 6},
    {"ldp", 0xa9400801, false, false, 0},
    {"fetch", 0, true, false, 0},
    {"ldtr", 0xf8400801, false, false, 0},
    {"sttr", 0xf8000801, false, false, 0},
    {"ldar", 0xc8dffc01, false, false, 0},
    {"stlr", 0xc89ffc01, false, false, 0},
    {"ldxr", 0xc85f7c01, false, false, 0},
    {"ldar_misaligned", 0xc8dffc01, false, false, 4},
    {"ldr_misaligned", 0xf9400001, false, false, 3},
    {"str_misaligned", 0xf9000001, false, false, 3},
    {"dc_zva", 0xd50b7420, false, false, 0x40},
    {"at_s1e1r", 0xd5087800, false, true, 0},
    {"at_s1e1w", 0xd5087820, false, true, 0},
    {"at_s1e0r", 0xd5087840, false, true, 0},
    {"at_s1e0w", 0xd5087860, false, true, 0},
};
#define ACCESSES (sizeof accesses / sizeof *accesses)

#define SVC_END 0xd4000ee1u /* svc #0x77, behind the instruction */

/* SCTLR_EL1: what is set, and what is cleared, beside what the kernel has. */
#define A (1u << 1)
#define SA (1u << 3)
#define SA0 (1u << 4)
#define UMA (1u << 9)
#define DZE (1u << 14)
#define UCT (1u << 15)
#define NTWI (1u << 16)
#define NTWE (1u << 18)
#define SPAN (1u << 23)
#define UCI (1u << 26)

struct plain {
    const char *name;
    uint32_t code;
    uint64_t pstate;
    uint32_t set, clear;
    uint64_t sp, pc; /* added to SP and PC */
};

static const struct plain plains[] = {
    {"svc", 0xd4002461, EL0, 0, 0, 0, 0},
    {"svc", 0xd4002461, EL1, 0, 0, 0, 0},
    {"svc", 0xd4002461, EL1T, 0, 0, 0, 0},
    {"svc, flags", 0xd4002461, EL0 | 0xa0000000, 0, 0, 0, 0},
    {"svc, pan", 0xd4002461, EL1 | PAN, 0, 0, 0, 0},
    {"svc, span", 0xd4002461, EL0, SPAN, 0, 0, 0},
    {"svc, unmasked", 0xd4002461, EL0 & ~0x240u, 0, 0, 0, 0},
    {"brk", 0xd4357980, EL0, 0, 0, 0, 0},
    {"brk", 0xd4357980, EL1, 0, 0, 0, 0},
    {"udf", 0x00000000, EL0, 0, 0, 0, 0},
    {"udf", 0x00000000, EL1, 0, 0, 0, 0},
    {"hlt", 0xd4400020, EL0, 0, 0, 0, 0},
    {"hvc", 0xd4000002, EL0, 0, 0, 0, 0},
    {"smc", 0xd4000003, EL0, 0, 0, 0, 0},
    {"eret", 0xd69f03e0, EL0, 0, 0, 0, 0},
    {"mrs sctlr_el1", 0xd5381001, EL0, 0, 0, 0, 0},
    {"msr vbar_el1", 0xd518c001, EL0, 0, 0, 0, 0},
    {"tlbi", 0xd508871f, EL0, 0, 0, 0, 0},
    {"dc ivac", 0xd5087620, EL0, 0, 0, 0, 0},
    {"at", 0xd5087800, EL0, 0, 0, 0, 0},
    {"mrs of no register", 0xd53bffe1, EL1, 0, 0, 0, 0},
    {"msr of a constant", 0xd51b0021, EL1, 0, 0, 0, 0},
    {"msr spsel", 0xd50041bf, EL0, 0, 0, 0, 0},
    {"mrs daif", 0xd53b4221, EL0, 0, UMA, 0, 0},
    {"mrs daif, uma", 0xd53b4221, EL0, UMA, 0, 0, 0},
    {"mrs ctr_el0", 0xd53b0021, EL0, 0, UCT, 0, 0},
    {"dc cvau", 0xd50b7b20, EL0, 0, UCI, 0, 0},
    {"ic ivau", 0xd50b7520, EL0, 0, UCI, 0, 0},
    {"dc zva", 0xd50b7420, EL0, 0, DZE, 0, 0},
    {"mrs cntp_ctl_el0", 0xd53be221, EL0, 0, 0, 0, 0},
    {"msr cntv_cval_el0", 0xd51be341, EL0, 0, 0, 0, 0},
    {"mrs icc_iar1_el1", 0xd538cc01, EL0, 0, 0, 0, 0},
    {"misaligned pc", 0xd503201f, EL0, 0, 0, 0, 2},
    {"misaligned pc", 0xd503201f, EL1, 0, 0, 0, 1},
    {"misaligned sp, unchecked", 0xf94003e1, EL0, SA, SA0, 8, 0},
    {"ldr misaligned, checked", 0xf84037e1, EL0, A, SA0, 3, 0},
    {"strh misaligned, checked", 0x780013e1, EL1, A, SA, 0, 0},
    {"return to el2", 0xd503201f, 0x3c9, 0, 0, 0, 0},
    {"return to el1 with mode bit 1", 0xd503201f, 0x3c6, 0, 0, 0, 0},
    {"return with il", 0xd503201f, EL0 | 1 << 20, 0, 0, 0, 0},
};
#define PLAINS (sizeof plains / sizeof *plains)

static char *page(int n) { return lacuna_arena() + n * PAGE; }
static uint64_t place[PAGES]; /* guest-physical addresses */
static void *linear(int n) { return (void *)(place[n] | KERNEL_BASE); }

/* Between the program at EL0 and its calls in the kernel. */
static struct {
    uint64_t pc, base, x0, tcr_bits, par;
    uint64_t entries[4], after[4]; /* of levels 0 to 3 */
    uint32_t code;
    bool el0, fetch;
    struct block block;
} now;

#define READ(name)                                                                                 \
    ({                                                                                             \
        uint64_t value_;                                                                           \
        __asm__ volatile("mrs %0, " #name : "=r"(value_));                                         \
        value_;                                                                                    \
    })
#define WRITE(name, value)                                                                         \
    __asm__ volatile("msr " #name ", %0" : : "r"((uint64_t)(value)) : "memory")

static void synchronize(void) {
    __asm__ volatile("dsb ish\n tlbi vmalle1\n dsb ish\n ic iallu\n dsb ish\n isb" : : : "memory");
}

static void copy(uint64_t *to, const uint64_t *from, size_t bytes) {
    for (size_t i = 0; i < bytes / 8; i++)
        to[i] = from[i];
}

/* In the kernel: makes the tables, executes the instruction, and notes what has become of both. */
static void execute(void) {
    uint64_t root = (READ(ttbr0_el1) & FRAME) | KERNEL_BASE;
    uint64_t *at[4] = {(uint64_t *)root + TEST_ENTRY, linear(LEVEL_1), linear(LEVEL_2),
                       linear(LEVEL_3)};
    uint64_t va = now.x0, vbar = READ(vbar_el1), tcr = READ(tcr_el1), pointer = READ(tpidr_el0);
    struct block *block = (struct block *)((char *)linear(BLOB) + BLOCK_AT);
    for (int level = 1; level < 4; level++)
        at[level] += va >> (39 - 9 * level) & 511;
    for (int level = 0; level < 4; level++)
        *at[level] = now.entries[level];
    uint32_t *stub = linear(now.fetch ? TARGET : CODE);
    if (now.fetch)
        stub += va % PAGE / 4;
    else
        *stub++ = now.code;
    *stub = SVC_END;
    WRITE(par_el1, 0);
    WRITE(vbar_el1, linear(BLOB));
    WRITE(tcr_el1, (tcr & ~(TCR_HA | TCR_HD | TCR_TBI0 | TCR_IPS)) | now.tcr_bits);
    synchronize();
    now.block.sctlr = now.block.sctlr ? now.block.sctlr : READ(sctlr_el1);
    copy(&block->pc, &now.block.pc, 6 * 8);
    ((void (*)(void))((char *)linear(BLOB) + RUN_AT))();
    copy(&now.block.vector, &block->vector, 7 * 8);
    now.par = READ(par_el1);
    for (int level = 0; level < 4; level++) {
        now.after[level] = *at[level];
        *at[level] = 0;
    }
    WRITE(tcr_el1, tcr);
    WRITE(vbar_el1, vbar);
    WRITE(tpidr_el0, pointer);
    synchronize();
}

/* Of SPSR_EL1: NZCV, PAN, IL, DAIF and the mode. Later extensions have more. */
#define SPSR_BITS 0xf05003dful

static const struct plain *current;

static void execute_plain(void) {
    uint64_t sctlr = READ(sctlr_el1);
    now.block.sctlr = (sctlr & ~(uint64_t)current->clear) | current->set;
    execute();
}

static void plain_case(const struct plain *plain) {
    bool el0 = !(plain->pstate & 0x1f);
    uint64_t code = el0 ? (uint64_t)page(CODE) : (uint64_t)linear(CODE);
    uint64_t stack = (el0 ? (uint64_t)page(TARGET) : (uint64_t)linear(TARGET)) + 0x800 + plain->sp;
    memset(&now, 0, sizeof now);
    now.x0 = TEST_BASE;
    now.code = plain->code;
    now.tcr_bits = TCR_HA | TCR_HD | 5ull << 32;
    now.block = (struct block){.pc = code + plain->pc, .pstate = plain->pstate, .sp = stack};
    if (plain->set & A)
        now.block.sp = stack | 3;
    current = plain;
    lacuna_kernel_call(execute_plain);
    const struct block *b = &now.block;
    bool has_far = b->esr >> 26 == 0x22 || b->esr >> 26 >= 0x24;
    has_far = has_far && b->esr >> 26 != 0x26 && b->esr >> 26 != 0x3c;
    uint64_t base = b->esr >> 26 == 0x22 ? code : stack - plain->sp;
    lacuna_printf("trap %s, pstate %lx: vector %lx esr %lx elr %lx spsr %lx", plain->name,
                  plain->pstate, b->vector, b->esr, b->elr - code, b->spsr & SPSR_BITS);
    lacuna_printf(has_far ? " far %lx\n" : "\n", b->far - base);
}

static uint64_t bits(uint64_t *x, uint64_t mask) { return lacuna_random(x) & mask; }
static bool one_in(uint64_t *x, uint64_t n) { return !lacuna_below(lacuna_random(x), n); }

/* Random descriptors with a leaf at `level`, for the address of the target page. */
static void make_tables(uint64_t *x, int level) {
    static const int next[] = {LEVEL_1, LEVEL_2, LEVEL_3};
    uint64_t size = 1ull << (39 - 9 * level);
    for (int l = 0; l < level; l++) {
        now.entries[l] = place[next[l]] | TABLE | V | bits(x, 0x0780000000000000);
        if (one_in(x, 6))
            now.entries[l] |= bits(x, 15ull << 59);
    }
    now.entries[level] = (place[TARGET] & ~(size - 1)) | V | SHAREABLE | (level == 3 ? TABLE : 0) |
                         bits(x, USER | READ_ONLY | DBM | PXN | UXN | 1ull << 11) |
                         (one_in(x, 5) ? 0 : AF);
    int wrong = (int)lacuna_below(lacuna_random(x), (uint64_t)level + 1);
    if (one_in(x, 10))
        now.entries[wrong] &= ~V;
    else if (one_in(x, 12))
        now.entries[wrong] |= BEYOND;
    else if (one_in(x, 20))
        now.entries[level] ^= level == 3 ? TABLE : 0;
    else if (one_in(x, 12) && wrong < level)
        now.entries[wrong] = NO_MEMORY | TABLE | V;
}

static struct block *walk_case(uint64_t *x, const struct instruction **which) {
    memset(&now, 0, sizeof now);
    const struct instruction *i = &accesses[lacuna_below(lacuna_random(x), ACCESSES)];
    int level = 1 + (int)lacuna_below(lacuna_random(x), 3);
    uint64_t size = 1ull << (39 - 9 * level), tag = 0;
    make_tables(x, level);
    if (i->el1_only || i->fetch)
        now.entries[level] &= ~DBM;
    now.tcr_bits = one_in(x, 3) ? 0 : one_in(x, 2) ? TCR_HA : TCR_HA | TCR_HD;
    if (!i->fetch && one_in(x, 8)) {
        tag = bits(x, 0xffull << 56);
        now.tcr_bits |= one_in(x, 3) ? 0 : TCR_TBI0;
    }
    now.el0 = !i->el1_only && one_in(x, 2);
    now.fetch = i->fetch;
    now.base = TEST_BASE | (place[TARGET] & (size - 1)) | tag;
    now.x0 = TEST_BASE | (place[TARGET] & (size - 1)) | (0x200 + i->shift);
    now.code = i->code;
    now.pc = now.fetch ? now.x0 : now.el0 ? (uint64_t)page(CODE) : (uint64_t)linear(CODE);
    uint64_t pstate = (now.el0 ? EL0 : EL1) | (one_in(x, 3) ? PAN : 0);
    uint64_t stack = now.el0 ? (uint64_t)page(TARGET) : (uint64_t)linear(TARGET);
    now.block = (struct block){.pc = now.pc, .pstate = pstate, .sp = stack + 0x800};
    now.block.x0 = now.x0 | tag;
    now.block.x1 = 0x1122334455667788;
    uint64_t *target = (uint64_t *)page(TARGET);
    target[0x200 / 8] = 0x99aabbccddeeff00;
    target[0x208 / 8] = 0x0123456789abcdef;
    target[0x240 / 8] = 0x5555555555555555;
    *which = i;
    lacuna_kernel_call(execute);
    return &now.block;
}

/* What a case has left behind, without the places of memory. */
static int record(uint64_t *words) {
    const struct block *b = &now.block;
    uint32_t class = (uint32_t)(b->esr >> 26 & 0x3f);
    bool abort = (class & ~5u) == 0x20 && class != 0x22;
    const uint64_t *target = (const uint64_t *)page(TARGET);
    int n = 0;
    words[n++] = b->vector;
    words[n++] = b->esr;
    words[n++] = abort ? b->far - now.base : 0;
    words[n++] = b->elr - now.pc;
    words[n++] = b->spsr & SPSR_BITS;
    words[n++] = b->out_x1;
    bool at = (now.code & 0xffffff9f) == 0xd5087800;
    bool failed = now.par & 1 || !now.par;
    words[n++] = !at ? 0 : failed ? now.par & 0x7f : (now.par & ~PAR_NS) - place[TARGET];
    for (int level = 0; level < 4; level++)
        words[n++] = now.after[level] ^ now.entries[level];
    words[n++] = now.fetch ? 0 : target[0x200 / 8] ^ target[0x208 / 8] ^ target[0x240 / 8];
    return n;
}

static void walks(uint64_t seed, uint64_t count, uint64_t batch) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "traps", count);
    uint64_t from = lacuna_param("show", ~0ull), to = from + lacuna_param("shown", 1);
    uint64_t digest = 0, faults = 0;
    for (uint64_t c = 0; c < count; c++, me->counter++) {
        uint64_t x = lacuna_mix(seed + c) | 1, words[16];
        const struct instruction *i;
        memset(page(TARGET), 0, 0x400);
        struct block *b = walk_case(&x, &i);
        int n = record(words);
        for (int w = 0; w < n; w++)
            digest = lacuna_mix(digest ^ words[w]) + (uint64_t)w;
        faults += words[1] != (0x15ull << 26 | 1 << 25 | 0x77);
        if (c >= from && c < to) {
            lacuna_printf("case %lu: %s el0 %u pstate %lx tcr %lx x0 %lx\n", c, i->name, now.el0,
                          b->pstate, now.tcr_bits, b->x0);
            for (int l = 0; l < 4; l++)
                lacuna_printf("  %lx", now.entries[l]);
            lacuna_printf("\n ");
            for (int w = 0; w < n; w++)
                lacuna_printf(" %lx", words[w]);
            lacuna_printf("\n");
        }
        if ((c + 1) % batch == 0 || c + 1 == count) {
            lacuna_printf("walks to %lu: faults %lu digest %lx\n", c + 1, faults, digest);
            digest = faults = 0;
        }
    }
}

int main(void) {
    uint64_t count = lacuna_param("count", 20000), batch = lacuna_param("batch", 1000);
    uint64_t features = 0;
    lacuna_rdmsr(ID_AA64MMFR1, &features);
    if (!batch || (features & 15) < 2 || !(features >> 20 & 15)) {
        lacuna_printf("traps: needs a processor with PAN and HAFDBS, and batch above 0\n");
        return 2;
    }
    lacuna_apf_disable();
    for (int n = 0; n < PAGES; n++) {
        memset(page(n), 0, PAGE);
        place[n] = lacuna_gpa(page(n));
    }
    memcpy(page(BLOB), traps_blob, BLOB_BYTES);
    lacuna_code_written(page(BLOB), PAGE);
    for (size_t n = 0; n < PLAINS; n++)
        plain_case(&plains[n]);
    walks(lacuna_param("seed", 1) << 32, count, batch);
    lacuna_printf("RESULT traps=%lu walks=%lu\n", PLAINS, count);
    return 0;
}
