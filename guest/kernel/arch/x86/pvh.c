/* What the loader says of the machine (PVH), and the kernel's own mapping of memory. */
#include "kernel.h"
#include "pvh.h"

#define LOW_END 0x100000ull /* the loader's memory ends here */

extern u64 kernel_pdpt[];

void boot_read(const void *at, struct boot *boot) {
    const struct hvm_start_info *start = at;
    const struct hvm_memmap_entry *e = (const void *)start->memmap_paddr;
    if (start->magic != HVM_START_MAGIC)
        panic("start_info magic is %x: boot this image by PVH", start->magic);
    if (start->version < 1 || !e || !start->memmap_entries)
        panic("no memory map in start_info version %u: boot with version 1 or later",
              start->version);
    for (u32 i = 0; i < start->memmap_entries && boot->nram < MAX_RAM; i++, e++) {
        u64 from = page_up(e->addr), to = page_down(e->addr + e->size);
        if (from < LOW_END)
            from = LOW_END;
        if (e->type == HVM_MEMMAP_RAM && from < to)
            boot->ram[boot->nram++] = (struct ram){from, to};
    }
    boot->ncpus = 1;
    boot->cmdline = (const char *)start->cmdline_paddr;
}

/* boot.S has mapped the first 4 GiB. */
void map_memory(u64 top) {
    for (u64 gib = 4; gib << 30 < top; gib++) {
        u64 *pd = page_alloc();
        if (!pd)
            panic("no memory for the page tables of memory up to %lx: give more memory", top);
        for (u64 i = 0; i < 512; i++)
            pd[i] = (gib << 30) | i << 21 | PTE_P | PTE_W | PTE_PS | PTE_G;
        kernel_pdpt[gib] = (u64)pd | PTE_P | PTE_W;
    }
}
