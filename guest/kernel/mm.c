/*
 * Physical memory.
 *
 *            kernel      kernel_end        heap end                     top of memory
 *   | loader | the kernel | heap: page_alloc | arena ...  (more RAM: arena too) |
 *
 * Memory below the kernel is the loader's (boot information, command line, its page tables). The
 * kernel never writes there, except for x86's SIPI trampoline. The heap serves the kernel, page
 * tables and the private pages of processes; everything else is the arena. The kernel never reads
 * or writes arena pages, so the workload is the first to touch each. Their page tables are ordinary
 * heap pages, shared by all address spaces, so the host may swap them out like any other page.
 *
 * With huge=1 the arena begins with whole blocks: 2 MiB each, aligned to 2 MiB both virtually and
 * physically, mapped by one page table entry each. What is left at the ends of memory follows in 4
 * KiB pages. The arena is as large as without huge=1.
 */
#include "kernel.h"

extern u8 kernel_end[];
extern u64 kernel_root[];

struct lacuna_status *status;
struct lacuna_info *info;

static spinlock heap_lock;
static u64 heap_next, heap_end; /* physical */
static struct free_page {
    struct free_page *next;
} *heap_free;

static u64 block_up(u64 v) { return (v + BLOCK - 1) & ~(BLOCK - 1); }

void *page_alloc(void) {
    u64 *page = NULL;
    lock(&heap_lock);
    if (heap_free) {
        page = (u64 *)heap_free;
        heap_free = heap_free->next;
    } else if (heap_next < heap_end) {
        page = from_phys(heap_next);
        heap_next += PAGE;
    }
    unlock(&heap_lock);
    if (page)
        zero_page(page);
    return page;
}

void page_free(void *page) {
    struct free_page *p = page;
    lock(&heap_lock);
    p->next = heap_free;
    heap_free = p;
    unlock(&heap_lock);
}

/* The table that `entry` points to. If there is none, this makes one. */
static u64 *table_below(u64 *entry) {
    if (!(*entry & PTE_PRESENT)) {
        void *table = page_alloc();
        if (!table)
            return NULL;
        *entry = to_phys(table) | PTE_TABLE | PTE_OWNED;
    }
    return from_phys(*entry & PTE_ADDR);
}

/* The entry for an address, at the level where an entry spans 1 << level_shift. Makes the tables
 * that are missing. */
static u64 *entry_for(u64 *table, u64 va, int level_shift) {
    for (int shift = 39; shift > level_shift && table; shift -= 9)
        table = table_below(&table[va >> shift & 511]);
    return table ? &table[va >> level_shift & 511] : NULL;
}

bool map_page(struct space *s, u64 va, u64 pa, u64 flags) {
    lock(&s->lock);
    u64 *entry = entry_for(s->root, va, 12);
    bool vacant = entry && !(*entry & PTE_PRESENT);
    if (vacant) {
        *entry = pa | flags;
        tables_changed();
    }
    unlock(&s->lock);
    return vacant;
}

u64 translate(struct space *s, u64 va) {
    u64 *table = s->root;
    if (va < LACUNA_IMAGE_BASE || va >= LACUNA_USER_END)
        return NEVER;
    for (int shift = 39;; shift -= 9) {
        u64 entry = table[va >> shift & 511];
        if (!entry_is_user(entry))
            return NEVER;
        if (shift == 12 || entry_is_block(entry))
            return (entry & PTE_ADDR) | (va & ((1ull << shift) - 1));
        table = from_phys(entry & PTE_ADDR);
    }
}

/* A thread's entry. The info page lies between the first status page and the others. */
struct lacuna_status_entry *status_entry(u32 slot) {
    u64 at = offsetof(struct lacuna_status, entry[slot]);
    return (struct lacuna_status_entry *)((u8 *)status + at + (at < PAGE ? 0 : PAGE));
}

/* The heap: tables for all memory, and an eighth of it for everything else, up to what a process
 * for each processor needs, or 8 MiB. */
static void make_heap(struct boot *boot, u64 total, u64 top) {
    u64 most = boot->ncpus > 64 ? boot->ncpus * (128ull << 10) : 8ull << 20;
    u64 rest = total / 8 < most ? total / 8 : most;
    u64 bytes = page_up(total / 512) + (top >> 30) * PAGE + 16 * PAGE + rest;
    for (u32 i = 0; i < boot->nram; i++) {
        u64 kernel = to_phys(kernel_end);
        if (kernel < boot->ram[i].start || kernel >= boot->ram[i].end)
            continue;
        if (boot->ram[i].end - kernel < bytes)
            panic("memory has %lu KiB, the kernel needs %lu: give more memory", total >> 10,
                  bytes >> 10);
        heap_next = kernel;
        heap_end = page_up(kernel + bytes);
        boot->ram[i].start = heap_end;
        return;
    }
    panic("the kernel is not in memory that the memory map lists");
}

/* The next entry of the arena, for a page or a block. */
static u64 *arena_entry(int level_shift) {
    u64 *entry = entry_for(kernel_root, LACUNA_ARENA_BASE + info->arena_bytes, level_shift);
    if (!entry)
        panic("no memory for the arena's page tables: give more memory");
    return entry;
}

static void arena_add_blocks(struct ram r) {
    for (; r.start < r.end; r.start += BLOCK, info->arena_bytes += BLOCK)
        *arena_entry(21) = r.start | block_of(MAP_ARENA);
}

/* Half a million pages in 2 GiB: the inner loop is kept to three instructions. */
static void arena_add_pages(struct ram r) {
    u64 pte = r.start | MAP_ARENA;
    for (u64 left = (r.end - r.start) / PAGE, run; left; left -= run) {
        u64 room = 512 - (info->arena_bytes / PAGE & 511);
        run = left < room ? left : room;
        for (u64 *p = arena_entry(12), *end = p + run; p != end; p++, pte += PAGE)
            *p = pte;
        info->arena_bytes += run * PAGE;
    }
}

/* The whole blocks in a piece of memory; none unless huge=1. */
static struct ram blocks_in(struct ram r) {
    struct ram whole = {block_up(r.start), r.end & ~(BLOCK - 1)};
    bool some = whole.start < whole.end && boot_param("huge", 0);
    return some ? whole : (struct ram){r.start, r.start};
}

static void make_arena(const struct boot *boot) {
    for (u32 i = 0; i < boot->nram; i++)
        arena_add_blocks(blocks_in(boot->ram[i]));
    for (u32 i = 0; i < boot->nram; i++) {
        struct ram all = boot->ram[i], blocks = blocks_in(all);
        arena_add_pages((struct ram){all.start, blocks.start});
        arena_add_pages((struct ram){blocks.end, all.end});
    }
    tables_changed();
}

void mm_init(struct boot *boot) {
    u64 total = 0, top = 4ull << 30;
    for (u32 i = 0; i < boot->nram; i++) {
        total += boot->ram[i].end - boot->ram[i].start;
        if (boot->ram[i].end > top)
            top = boot->ram[i].end;
    }
    if (top >> 30 > LACUNA_MEMORY_END_GIB)
        panic("memory ends at %lu GiB, this kernel maps %u GiB: give less memory", top >> 30,
              LACUNA_MEMORY_END_GIB);
    make_heap(boot, total, top);
    map_memory(top);
    /* The heap has not yet had any page freed into it, so these are in sequence. */
    status = page_alloc();
    info = page_alloc();
    for (u32 i = 1; i < LACUNA_STATUS_PAGES; i++)
        page_alloc();
    status->magic = LACUNA_STATUS_MAGIC;
    status->version = LACUNA_STATUS_VERSION;
    const char *cmdline = boot->cmdline;
    for (u32 i = 0; cmdline && cmdline[i] && i + 1 < sizeof info->cmdline; i++)
        info->cmdline[i] = cmdline[i];
    make_arena(boot);
}
