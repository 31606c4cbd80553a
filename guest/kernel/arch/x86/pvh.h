/* Boot information of the PVH protocol (xen/include/public/arch-x86/hvm/start_info.h). */
#ifndef PVH_H
#define PVH_H

#include "x86.h"

#define HVM_START_MAGIC 0x336ec578
#define HVM_MEMMAP_RAM 1

struct hvm_memmap_entry {
    u64 addr, size;
    u32 type, reserved;
};

struct hvm_start_info {
    u32 magic, version, flags, nr_modules;
    u64 modlist_paddr, cmdline_paddr, rsdp_paddr;
    /* version 1 */
    u64 memmap_paddr;
    u32 memmap_entries, reserved;
};

#endif
