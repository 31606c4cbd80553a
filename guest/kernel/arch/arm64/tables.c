/* Memory and address spaces: what takes more than an instruction. */
#include "kernel.h"

extern u64 kernel_root[];

u64 arena_entry_bits = PTE_USER_PAGE;

/* By DC ZVA, where it is allowed. */
void zero_page(void *page) {
    u64 zva = read_sysreg(dczid_el0), step = 4ull << (zva & 15);
    u64 at = (u64)page, end = at + PAGE;
    if (!(zva & 16) && step <= PAGE) {
        for (; at < end; at += step)
            asm volatile("dc zva, %0" : : "r"(at) : "memory");
        return;
    }
    for (; at < end; at += 16)
        asm volatile("stp xzr, xzr, [%0]" : : "r"(at) : "memory");
}

/* While the entries with a tag are flushed, the processor has the kernel's tables: it could fetch
 * new ones by the old tables. */
void load_tables(u64 value) {
    u64 tag = value >> TAG_SHIFT;
    if (!(value & TABLES_KEEP)) {
        write_sysreg(ttbr0_el1, to_phys(kernel_root));
        isb();
        asm volatile("tlbi aside1, %0" : : "r"(tag << TAG_SHIFT) : "memory");
        asm volatile("dsb nsh" : : : "memory");
    }
    write_sysreg(ttbr0_el1, value & ~TABLES_KEEP);
    isb();
}
