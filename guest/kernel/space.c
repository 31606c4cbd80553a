/*
 * Address spaces. Read-only segments of the program are mapped where they lie in the kernel image;
 * writable ones are copied for each space, so that a process has its own data. All spaces share the
 * arena's tables.
 */
#include "kernel.h"
#include <elf.h>

extern const u8 program[]; /* the workload, an ELF file, page-aligned (program.S) */
extern u64 kernel_root[];

static struct space spaces[LACUNA_MAX_THREADS];
static spinlock spaces_lock;
static bool tagged; /* the processor has tags */

/*
 * Tags: a switch keeps the TLB entries of both spaces. A space has the tag of its place in the
 * table of spaces, and an earlier space may have had that place. So when a processor enters a space
 * for the first time, it flushes that tag. No other flush is needed, because the kernel only adds
 * mappings to a space. The spaces beyond the last tag share tag 0, which every entry flushes.
 */
void space_cpu_init(void) {
    if (!has_tags() || !boot_param("pcid", 1))
        return;
    tagged = true;
    enable_tags(); /* legal, because kernel_root has tag 0 */
}

void space_enter(struct cpu *c, struct space *s) {
    u64 *entered = &s->entered[c->hardware_id / 64], bit = 1ull << c->hardware_id % 64;
    bool again = __atomic_load_n(entered, __ATOMIC_RELAXED) & bit;
    c->space = s;
    if (!again)
        __atomic_fetch_or(entered, bit, __ATOMIC_RELAXED);
    load_tables(s->tables | (again ? s->keep : 0));
}

void space_leave(struct cpu *c) {
    c->space = NULL;
    load_tables(tables_of(kernel_root, 0));
}

static struct space *claim(void) {
    struct space *found = NULL;
    lock(&spaces_lock);
    for (u32 i = 0; i < LACUNA_MAX_THREADS && !found; i++) {
        if (!__atomic_load_n(&spaces[i].used, __ATOMIC_ACQUIRE))
            found = &spaces[i];
    }
    if (found) {
        __builtin_memset(found->entered, 0, sizeof found->entered);
        found->used = true;
        found->threads = 1;
    }
    unlock(&spaces_lock);
    return found;
}

static bool map_new(struct space *s, u64 va, const u8 *from, u64 bytes) {
    u8 *page = page_alloc();
    if (!page)
        return false;
    if (from)
        __builtin_memcpy(page, from, bytes < PAGE ? bytes : PAGE);
    if (map_page(s, va, to_phys(page), MAP_DATA | PTE_OWNED))
        return true;
    page_free(page);
    return false;
}

static bool load_segment(struct space *s, const Elf64_Phdr *ph) {
    u64 va = ph->p_vaddr & ~(PAGE - 1), skew = ph->p_vaddr - va;
    const u8 *file = program + ph->p_offset - skew;
    u64 file_bytes = ph->p_filesz + skew, bytes = ph->p_memsz + skew;
    for (u64 at = 0; at < bytes; at += PAGE) {
        const u8 *from = at < file_bytes ? file + at : NULL;
        if (ph->p_flags & PF_W) {
            if (!map_new(s, va + at, from, file_bytes - at))
                return false;
        } else {
            u64 flags = ph->p_flags & PF_X ? MAP_CODE : MAP_CONST;
            if (!from || !map_page(s, va + at, to_phys(from), flags))
                return false;
        }
    }
    return true;
}

static bool load_program(struct space *s) {
    const Elf64_Ehdr *eh = (const void *)program;
    const Elf64_Phdr *ph = (const void *)(program + eh->e_phoff);
    for (int i = 0; i < eh->e_phnum; i++) {
        if (ph[i].p_type == PT_LOAD && ph[i].p_memsz && !load_segment(s, &ph[i]))
            return false;
    }
    return true;
}

/* The last entry of status page i is entry 64 i + 62. */
static bool map_status(struct space *s) {
    for (u32 i = 0; i < LACUNA_STATUS_PAGES; i++) {
        u64 pa = to_phys(status_entry(64 * i + 62)) & ~(PAGE - 1);
        if (!map_page(s, LACUNA_STATUS_VA + i * PAGE, pa, MAP_DATA))
            return false;
    }
    return true;
}

struct space *space_create(u64 *entry) {
    struct space *s = claim();
    if (!s)
        return NULL;
    s->root = page_alloc();
    if (s->root) {
        u32 tag = (u32)(s - spaces) + 1;
        bool has_tag = tagged && tag < TAGS;
        s->tables = tables_of(s->root, has_tag ? tag : 0);
        s->keep = has_tag ? TABLES_KEEP : 0;
        s->root[0] = kernel_root[0]; /* the kernel, if it is in the programs' tables at all */
        s->root[LACUNA_ARENA_BASE >> 39] = kernel_root[LACUNA_ARENA_BASE >> 39];
        if (load_program(s) &&
            map_status(s) && map_page(s, LACUNA_INFO_VA, to_phys(info), MAP_CONST)) {
            *entry = ((const Elf64_Ehdr *)program)->e_entry;
            return s;
        }
    }
    space_release(s);
    return NULL;
}

bool space_add_stack(struct space *s, u32 slot, u64 *stack_top) {
    u64 top = LACUNA_STACK_BASE + (slot + 1ull) * LACUNA_STACK_WINDOW;
    *stack_top = top;
    for (u64 va = top - LACUNA_STACK_BYTES; va < top; va += PAGE) {
        if (translate(s, va) == NEVER && !map_new(s, va, NULL, 0))
            return false;
    }
    return true;
}

/* Frees the tables and pages that a table at this level owns, then the table. Level 1 has pages. */
static void free_table(u64 *table, int level) {
    for (u32 i = 0; i < 512; i++) {
        if (!(table[i] & PTE_OWNED))
            continue;
        u64 *below = from_phys(table[i] & PTE_ADDR);
        if (level == 1)
            page_free(below);
        else
            free_table(below, level - 1);
    }
    page_free(table);
}

void space_release(struct space *s) {
    if (__atomic_sub_fetch(&s->threads, 1, __ATOMIC_ACQ_REL))
        return;
    if (s->root) {
        s->root[LACUNA_ARENA_BASE >> 39] = 0; /* shared by all spaces */
        free_table(s->root, 4);
        s->root = NULL;
    }
    __atomic_store_n(&s->used, false, __ATOMIC_RELEASE); /* only now may claim() take it */
}
