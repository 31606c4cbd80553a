/*
 * Physical memory.
 *
 *   0        1 MiB       kernel_end        heap end                     top of memory
 *   | loader | the kernel | heap: page_alloc | arena ...  (more RAM: arena too) |
 *
 * Memory below 1 MiB is the loader's (start info, command line, its page tables). The kernel never
 * writes there, except for the SIPI trampoline. The heap serves the kernel, page tables and the
 * private pages of processes; everything else is the arena. The kernel never reads or writes arena
 * pages, so the workload is the first to touch each. Their page tables are ordinary heap pages,
 * shared by all address spaces, so the host may swap them out like any other page.
 *
 * With huge=1 the arena begins with whole blocks: 2 MiB each, aligned to 2 MiB both virtually and
 * physically, mapped by one page table entry each. What is left at the ends of memory follows in 4
 * KiB pages. The arena is as large as without huge=1.
 */
#include "kernel.h"
#include "pvh.h"

#define MAX_RAM 32
#define LOW_END 0x100000ull

struct ram {
    u64 start, end;
};

extern u8 kernel_end[];
extern u64 kernel_root[], kernel_pdpt[];

struct lacuna_status *status;
struct lacuna_info *info;

static struct ram ram[MAX_RAM];
static u32 nram;
static spinlock heap_lock;
static u64 heap_next, heap_end;
static struct free_page {
    struct free_page *next;
} *heap_free;

static u64 page_up(u64 v) { return (v + PAGE - 1) & ~(PAGE - 1); }
static u64 block_up(u64 v) { return (v + BLOCK - 1) & ~(BLOCK - 1); }

void *page_alloc(void) {
    u64 *page = NULL;
    lock(&heap_lock);
    if (heap_free) {
        page = (u64 *)heap_free;
        heap_free = heap_free->next;
    } else if (heap_next < heap_end) {
        page = (u64 *)heap_next;
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
    if (!(*entry & PTE_P)) {
        void *table = page_alloc();
        if (!table)
            return NULL;
        *entry = (u64)table | PTE_P | PTE_W | PTE_U | PTE_OWNED;
    }
    return (u64 *)(*entry & PTE_ADDR);
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
    bool vacant = entry && !(*entry & PTE_P);
    if (vacant)
        *entry = pa | flags;
    unlock(&s->lock);
    return vacant;
}

u64 translate(struct space *s, u64 va) {
    u64 *table = s->root;
    if (va < LACUNA_IMAGE_BASE || va >= LACUNA_USER_END)
        return NEVER;
    for (int shift = 39;; shift -= 9) {
        u64 entry = table[va >> shift & 511];
        if ((entry & (PTE_P | PTE_U)) != (PTE_P | PTE_U))
            return NEVER;
        if (shift == 12 || entry & PTE_PS)
            return (entry & PTE_ADDR) | (va & ((1ull << shift) - 1));
        table = (u64 *)(entry & PTE_ADDR);
    }
}

static void read_memmap(const struct hvm_start_info *start) {
    const struct hvm_memmap_entry *e = (const void *)start->memmap_paddr;
    if (start->version < 1 || !e || !start->memmap_entries)
        panic("no memory map in start_info version %u: boot with version 1 or later",
              start->version);
    for (u32 i = 0; i < start->memmap_entries && nram < MAX_RAM; i++, e++) {
        u64 from = page_up(e->addr), to = (e->addr + e->size) & ~(PAGE - 1);
        if (from < LOW_END)
            from = LOW_END;
        if (e->type == HVM_MEMMAP_RAM && from < to)
            ram[nram++] = (struct ram){from, to};
    }
}

static void map_above_4g(u64 top) {
    for (u64 gib = 4; gib << 30 < top; gib++) {
        u64 *pd = page_alloc();
        if (gib >= LACUNA_MEMORY_END_GIB)
            panic("memory ends at %lu GiB, this kernel maps %u GiB: give less memory", top >> 30,
                  LACUNA_MEMORY_END_GIB);
        if (!pd)
            panic("no memory for the page tables of memory up to %lx: give more memory", top);
        for (u64 i = 0; i < 512; i++)
            pd[i] = (gib << 30) | i << 21 | PTE_P | PTE_W | PTE_PS | PTE_G;
        kernel_pdpt[gib] = (u64)pd | PTE_P | PTE_W;
    }
}

/* The heap: tables for all memory, and an eighth of it or 8 MiB for everything else. */
static void make_heap(u64 total, u64 top) {
    u64 rest = total / 8 < (8ull << 20) ? total / 8 : 8ull << 20;
    u64 bytes = page_up(total / 512) + (top >> 30) * PAGE + 16 * PAGE + rest;
    for (u32 i = 0; i < nram; i++) {
        u64 kernel = (u64)kernel_end;
        if (kernel < ram[i].start || kernel >= ram[i].end)
            continue;
        if (ram[i].end - kernel < bytes)
            panic("memory has %lu KiB, the kernel needs %lu: give more memory", total >> 10,
                  bytes >> 10);
        heap_next = kernel;
        heap_end = page_up(kernel + bytes);
        ram[i].start = heap_end;
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
        *arena_entry(21) = r.start | PTE_P | PTE_W | PTE_U | PTE_PS;
}

/* Half a million pages in 2 GiB: the inner loop is kept to three instructions. */
static void arena_add_pages(struct ram r) {
    u64 pte = r.start | PTE_P | PTE_W | PTE_U;
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

static void make_arena(void) {
    for (u32 i = 0; i < nram; i++)
        arena_add_blocks(blocks_in(ram[i]));
    for (u32 i = 0; i < nram; i++) {
        struct ram blocks = blocks_in(ram[i]);
        arena_add_pages((struct ram){ram[i].start, blocks.start});
        arena_add_pages((struct ram){blocks.end, ram[i].end});
    }
}

void mm_init(const struct hvm_start_info *start) {
    u64 total = 0, top = 4ull << 30;
    read_memmap(start);
    for (u32 i = 0; i < nram; i++) {
        total += ram[i].end - ram[i].start;
        if (ram[i].end > top)
            top = ram[i].end;
    }
    make_heap(total, top);
    map_above_4g(top);
    status = page_alloc();
    info = page_alloc();
    status->magic = LACUNA_STATUS_MAGIC;
    status->version = LACUNA_STATUS_VERSION;
    const char *cmdline = (const char *)start->cmdline_paddr;
    for (u32 i = 0; cmdline && cmdline[i] && i + 1 < sizeof info->cmdline; i++)
        info->cmdline[i] = cmdline[i];
    make_arena();
}
