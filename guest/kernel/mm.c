/*
 * Physical memory.
 *
 *   0        1 MiB       kernel_end        heap end                     top of memory
 *   | loader | the kernel | heap: page_alloc | arena ...  (more RAM: arena too) |
 *
 * Whatever lies below 1 MiB is the loader's (start info, command line, its page tables) and is
 * never touched except for the SIPI trampoline. The heap serves the kernel, page tables and the
 * private pages of processes; everything else is the arena. Arena pages are never read or written
 * by the kernel: their first touch belongs to the workload. Their page tables are ordinary heap
 * pages shared by all address spaces, so that the host may take them away like anything else.
 */
#include "kernel.h"
#include "pvh.h"

#define MAX_RAM 32
#define LOW_END 0x100000ull

struct ram {
    u64 start, end;
};

extern u8 kernel_end[];
extern u64 kernel_pml4[], kernel_pdpt[];

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
    if (page) {
        void *to = page;
        u64 words = PAGE / 8;
        asm volatile("rep stosq" : "+D"(to), "+c"(words) : "a"(0) : "memory");
    }
    return page;
}

void page_free(void *page) {
    struct free_page *p = page;
    lock(&heap_lock);
    p->next = heap_free;
    heap_free = p;
    unlock(&heap_lock);
}

/* The table that entry points to, made if absent. */
static u64 *table_below(u64 *entry) {
    if (!(*entry & PTE_P)) {
        void *table = page_alloc();
        if (!table)
            return NULL;
        *entry = (u64)table | PTE_P | PTE_W | PTE_U | PTE_OWNED;
    }
    return (u64 *)(*entry & PTE_ADDR);
}

/* The last-level table for an address, made if absent. */
static u64 *leaf_table(u64 *table, u64 va) {
    for (int shift = 39; shift > 12 && table; shift -= 9)
        table = table_below(&table[va >> shift & 511]);
    return table;
}

bool map_page(struct space *s, u64 va, u64 pa, u64 flags) {
    lock(&s->lock);
    u64 *table = leaf_table(s->pml4, va);
    bool vacant = table && !(table[va >> 12 & 511] & PTE_P);
    if (vacant)
        table[va >> 12 & 511] = pa | flags;
    unlock(&s->lock);
    return vacant;
}

u64 translate(struct space *s, u64 va) {
    u64 *table = s->pml4;
    if (va < LACUNA_IMAGE_BASE || va >= LACUNA_USER_END)
        return NEVER;
    for (int shift = 39;; shift -= 9) {
        u64 entry = table[va >> shift & 511];
        if ((entry & (PTE_P | PTE_U)) != (PTE_P | PTE_U))
            return NEVER;
        if (shift == 12)
            return (entry & PTE_ADDR) | (va & (PAGE - 1));
        table = (u64 *)(entry & PTE_ADDR);
    }
}

static void read_memmap(const struct hvm_start_info *start) {
    const struct hvm_memmap_entry *e = (const void *)start->memmap_paddr;
    if (start->version < 1 || !e || !start->memmap_entries)
        panic("the loader gave no memory map (start_info version %u)", start->version);
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
        if (gib >= 512 || !pd)
            panic("cannot map memory up to %lx", top);
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
            panic("too little memory: %lu KiB, the kernel wants %lu", total >> 10, bytes >> 10);
        heap_next = kernel;
        heap_end = page_up(kernel + bytes);
        ram[i].start = heap_end;
        return;
    }
    panic("the kernel is not in memory that the memory map lists");
}

/* Half a million pages in 2 GiB: the inner loop is three instructions on purpose. */
static void make_arena(void) {
    u64 *table = NULL, index = 512, pages = 0;
    for (u32 i = 0; i < nram; i++) {
        u64 pte = ram[i].start | PTE_P | PTE_W | PTE_U;
        for (u64 left = (ram[i].end - ram[i].start) / PAGE; left;) {
            if (index == 512) {
                table = leaf_table(kernel_pml4, LACUNA_ARENA_BASE + pages * PAGE);
                if (!table)
                    panic("no memory for the arena's page tables");
                index = 0;
            }
            u64 run = left < 512 - index ? left : 512 - index;
            for (u64 *p = table + index, *end = p + run; p != end; p++, pte += PAGE)
                *p = pte;
            index += run;
            left -= run;
            pages += run;
        }
    }
    info->arena_bytes = pages * PAGE;
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
