/*
 * What the loader says of the machine: a device tree (Devicetree Specification 0.4, chapter 5).
 * Node by node: the properties of a node precede its children, so a node is complete when its first
 * child begins or it ends. Addresses are taken as they are, without `ranges`.
 */
#include "kernel.h"
#include "lacuna/format.h"

#define FDT_MAGIC 0xd00dfeed
#define BEGIN_NODE 1
#define END_NODE 2
#define PROPERTY 3
#define NOP 4
#define END 9

#define MAX_DEPTH 16
#define GIB_SHIFT 30

struct property {
    const u8 *at; /* NULL: not there */
    u32 bytes;
};

struct node {
    const char *name;
    struct property compatible, reg, type, interrupts, method, arguments;
    bool known; /* it has been looked at */
};

struct machine machine;
static char cmdline[sizeof ((struct lacuna_info *)0)->cmdline];
static u64 processors[LACUNA_MAX_CPUS];
static u32 nprocessors;

extern u64 linear_l1[];

static u32 be32(const u8 *p) { return (u32)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]; }

/* Reads so many cells and goes past them. More than two hold no address of this machine. */
static u64 take_cells(struct property *p, u32 cells) {
    u64 v = 0;
    for (; cells && p->bytes >= 4; cells--, p->at += 4, p->bytes -= 4)
        v = v << 32 | be32(p->at);
    return v;
}

static bool is_text(const u8 *text, u32 bytes, const char *wanted) {
    u32 n = 0;
    for (; n < bytes && wanted[n] && text[n] == (u8)wanted[n]; n++)
        ;
    return n < bytes && !wanted[n] && !text[n];
}

/* Whether one of the strings of a property is this one. */
static bool has_text(struct property p, const char *wanted) {
    while (p.bytes) {
        if (is_text(p.at, p.bytes, wanted))
            return true;
        while (p.bytes && *p.at)
            p.at++, p.bytes--;
        if (p.bytes)
            p.at++, p.bytes--;
    }
    return false;
}

/* The kernel's entries for memory; devices get another type. boot.S has made two of them. */
static void map_kernel(u64 from, u64 to, u64 type) {
    for (u64 gib = from >> GIB_SHIFT; gib << GIB_SHIFT < to && gib < 512; gib++) {
        if (!linear_l1[gib])
            linear_l1[gib] = gib << GIB_SHIFT | type | PTE_VALID | PTE_AF | PTE_UXN;
    }
    tables_changed();
}

u64 map_device(u64 pa, u64 bytes) {
    if (pa + bytes > 512ull << GIB_SHIFT)
        return 0;
    map_kernel(pa, pa + bytes, PTE_DEVICE | PTE_PXN);
    return (u64)from_phys(pa);
}

static void add_memory(struct boot *boot, struct property reg, const u32 *cells) {
    while (reg.bytes >= (cells[0] + cells[1]) * 4 && reg.bytes && boot->nram < MAX_RAM) {
        u64 at = take_cells(&reg, cells[0]), bytes = take_cells(&reg, cells[1]);
        struct ram ram = {page_up(at), page_down(at + bytes)};
        if (ram.start >= ram.end)
            continue;
        map_kernel(ram.start, ram.end, PTE_INNER_SHAREABLE);
        boot->ram[boot->nram++] = ram;
    }
}

static void add_controller(struct property reg, const u32 *cells) {
    u64 at = take_cells(&reg, cells[0]), bytes = take_cells(&reg, cells[1]);
    machine.distributor = map_device(at, bytes);
    while (reg.bytes && machine.nredistributors < 4) {
        at = take_cells(&reg, cells[0]);
        bytes = take_cells(&reg, cells[1]);
        u64 start = map_device(at, bytes);
        machine.redistributors[machine.nredistributors].start = start;
        machine.redistributors[machine.nredistributors++].end = start + bytes;
    }
}

static u64 only_device(struct property reg, const u32 *cells) {
    u64 at = take_cells(&reg, cells[0]);
    return map_device(at, take_cells(&reg, cells[1]));
}

/* The third of the timer's interrupts is the virtual one: type (1: private), number, flags. */
static u32 virtual_timer(struct property interrupts) {
    take_cells(&interrupts, 2);
    take_cells(&interrupts, 2);
    take_cells(&interrupts, 2);
    u64 type = take_cells(&interrupts, 1), number = take_cells(&interrupts, 1);
    return type == 1 && number < 16 ? 16 + (u32)number : 0;
}

static void copy_cmdline(struct property p) {
    for (u32 i = 0; i < p.bytes && i + 1 < sizeof cmdline; i++)
        cmdline[i] = (char)p.at[i];
    machine.cmdline = cmdline;
}

/* cells: of addresses and sizes in this node's `reg`. */
static void look(struct boot *boot, struct node *n, const u32 *cells) {
    if (n->known || !n->name)
        return;
    n->known = true;
    if (has_text(n->type, "memory"))
        add_memory(boot, n->reg, cells);
    else if (has_text(n->type, "cpu") && nprocessors < LACUNA_MAX_CPUS)
        processors[nprocessors++] = take_cells(&n->reg, cells[0]);
    else if (has_text(n->compatible, "arm,gic-v3"))
        add_controller(n->reg, cells);
    else if (has_text(n->compatible, "arm,pl011") && !machine.uart)
        machine.uart = only_device(n->reg, cells);
    else if (has_text(n->compatible, "lacuna,host"))
        machine.host = only_device(n->reg, cells);
    else if (has_text(n->compatible, "arm,armv8-timer"))
        machine.timer_interrupt = virtual_timer(n->interrupts);
    else if (has_text(n->compatible, "arm,psci-0.2") || has_text(n->compatible, "arm,psci-1.0"))
        machine.by_smc = has_text(n->method, "smc");
    else if (is_text((const u8 *)n->name, 7, "chosen") && n->arguments.at)
        copy_cmdline(n->arguments);
}

static void keep_property(struct node *n, const char *name, struct property p, u32 *below) {
    static const char names[][16] = {"compatible", "reg", "device_type", "interrupts", "method",
                                     "bootargs"};
    struct property *places[] = {&n->compatible, &n->reg,    &n->type,
                                 &n->interrupts, &n->method, &n->arguments};
    for (u32 i = 0; i < 6; i++) {
        if (is_text((const u8 *)name, sizeof names[i], names[i]))
            *places[i] = p;
    }
    if (is_text((const u8 *)name, 15, "#address-cells"))
        below[0] = be32(p.at);
    if (is_text((const u8 *)name, 12, "#size-cells"))
        below[1] = be32(p.at);
}

static u32 words(const char *text) {
    u32 n = 0;
    while (text[n])
        n++;
    return n / 4 + 1;
}

static void read_tree(const u8 *fdt, struct boot *boot) {
    const u8 *p = fdt + be32(fdt + 8), *names = fdt + be32(fdt + 12), *end = fdt + be32(fdt + 4);
    struct node node = {0};
    u32 cells[MAX_DEPTH][2], depth = 0; /* of the `reg` of nodes at that depth */
    cells[0][0] = 2;
    cells[0][1] = 1;
    while (p < end) {
        u32 token = be32(p);
        p += 4;
        if (token == BEGIN_NODE) {
            if (depth)
                look(boot, &node, cells[depth - 1]);
            if (++depth == MAX_DEPTH)
                return;
            cells[depth][0] = 2;
            cells[depth][1] = 1;
            node = (struct node){.name = (const char *)p};
            p += 4 * words((const char *)p);
        } else if (token == END_NODE) {
            look(boot, &node, cells[depth - 1]);
            if (!depth-- || !depth)
                return;
        } else if (token == PROPERTY) {
            struct property value = {p + 8, be32(p)};
            keep_property(&node, (const char *)names + be32(p + 4), value, cells[depth]);
            p += 8 + ((value.bytes + 3) & ~3u);
        } else if (token != NOP) {
            return;
        }
    }
}

/* Puts the running processor first; the others keep their order. */
static void order_processors(struct boot *boot) {
    u64 self = read_sysreg(mpidr_el1) & 0xff00ffffff;
    boot->ncpus = 0;
    machine.ids[boot->ncpus++] = self;
    for (u32 i = 0; i < nprocessors && boot->ncpus < LACUNA_MAX_CPUS; i++) {
        if (processors[i] != self)
            machine.ids[boot->ncpus++] = processors[i];
    }
}

/* Entries of the arena begin without the access flag, and clean, if hardware updates them: so does
 * x86-64. TCR_EL1 allows that in any case (boot.S). */
static void choose_arena_entries(void) {
    const char *how = machine.cmdline ? lacuna_find_param(machine.cmdline, "hafdbs") : NULL;
    u64 has = read_sysreg(id_aa64mmfr1_el1) & 15;
    if (!has || (how && how[0] == '0'))
        return;
    arena_entry_bits &= ~PTE_AF;
    if (has > 1)
        arena_entry_bits |= PTE_DBM | PTE_READ_ONLY;
}

void boot_read(const void *start, struct boot *boot) {
    if (be32(start) != FDT_MAGIC)
        panic("no device tree at %p: boot this image by the arm64 Linux protocol", start);
    read_tree(start, boot);
    boot->cmdline = machine.cmdline;
    choose_arena_entries();
    order_processors(boot);
    if (!boot->nram)
        panic("the device tree has no memory");
    if (!machine.distributor || !machine.nredistributors)
        panic("the device tree has no GICv3: with QEMU, give -M virt,gic-version=3");
    if (!machine.timer_interrupt)
        panic("the device tree has no virtual timer with a private interrupt");
}
