//! The boot data of AArch64 guests: Linux's arm64 boot protocol
//! (Documentation/arch/arm64/booting.rst) with a device tree.
//!
//! ```text
//! 0x4000_0000  device tree, at most 2 MiB
//! 0x4020_0000  image, at its text offset from here
//! ```

use super::{BootError, Layout, Placement};
use crate::{Arch, GuestMemory, Image, mmio};
use lacuna_addr::{Gpa, PAGE_SIZE};
use vm_fdt::{Error, FdtWriter};

/// Where memory begins.
pub(super) const MEMORY_START: u64 = 1 << 30;
/// Images are loaded here, plus their text offset: a multiple of 2 MiB.
pub(crate) const IMAGE_BASE: u64 = MEMORY_START + (2 << 20);
const DEVICE_TREE: Gpa = Gpa::truncate(MEMORY_START);

/// The phandles of nodes that other nodes refer to.
const INTERRUPT_CONTROLLER: u32 = 1;
const CLOCK: u32 = 2;

/// The types and flags of interrupts (Linux: interrupt-controller/arm,gic-v3.yaml).
const SPI: u32 = 0;
const PPI: u32 = 1;
const LEVEL_HIGH: u32 = 4;

const PLACEMENT: Placement = Placement {
    arch: Arch::Arm64,
    boot_end: IMAGE_BASE,
};

/// The parameters of the machine's description for its guest.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// The number of vCPUs.
    pub vcpus: usize,
    /// The arguments of the kernel.
    pub command_line: &'a str,
    /// The kernel seeds its random numbers with these bytes. Without them Linux has no random
    /// numbers until it has gathered enough from interrupts. Each boot needs new bytes.
    pub rng_seed: [u8; 32],
}

/// The state in which vCPU 0 starts: EL1 with its own stack pointer, interrupts masked, stage 1
/// off, X0 = [`Boot::device_tree`], X1 to X3 zero. The other vCPUs are off. The guest starts them
/// by PSCI `CPU_ON`, with HVC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Boot {
    /// PC.
    pub entry: Gpa,
    /// X0.
    pub device_tree: Gpa,
}

impl Boot {
    /// Checks `image` against `layout`, then writes it and the device tree. If a check fails,
    /// nothing is written.
    ///
    /// # Errors
    /// The image is for another architecture, or it or the command line does not fit.
    pub fn load(
        image: &Image<'_>,
        layout: &Layout,
        machine: &Machine<'_>,
        memory: &impl GuestMemory,
    ) -> Result<Self, BootError> {
        let tree = device_tree(layout, machine);
        let tree = tree.map_err(|error| BootError::DeviceTree(error.to_string()))?;
        PLACEMENT.load(image, layout, machine.command_line, memory)?;
        memory.write(DEVICE_TREE, &tree)?;
        Ok(Self {
            entry: image.entry,
            device_tree: DEVICE_TREE,
        })
    }
}

fn device_tree(layout: &Layout, machine: &Machine<'_>) -> Result<Vec<u8>, Error> {
    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    tree.property_string("compatible", "linux,dummy-virt")?;
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 2)?;
    tree.property_u32("interrupt-parent", INTERRUPT_CONTROLLER)?;
    chosen(&mut tree, machine)?;
    memory(&mut tree, layout)?;
    processors(&mut tree, machine.vcpus)?;
    interrupts(&mut tree, machine.vcpus)?;
    devices(&mut tree)?;
    tree.end_node(root)?;
    tree.finish()
}

fn chosen(tree: &mut FdtWriter, machine: &Machine<'_>) -> Result<(), Error> {
    let node = tree.begin_node("chosen")?;
    tree.property_string("bootargs", machine.command_line)?;
    tree.property("rng-seed", &machine.rng_seed)?;
    tree.property_string("stdout-path", &at("/pl011", mmio::UART.get()))?;
    tree.end_node(node)
}

fn memory(tree: &mut FdtWriter, layout: &Layout) -> Result<(), Error> {
    for range in layout.ranges() {
        let start = range.start().gpa().get();
        let node = tree.begin_node(&at("memory", start))?;
        tree.property_string("device_type", "memory")?;
        tree.property_array_u64("reg", &[start, range.pages() * PAGE_SIZE as u64])?;
        tree.end_node(node)?;
    }
    Ok(())
}

fn processors(tree: &mut FdtWriter, vcpus: usize) -> Result<(), Error> {
    let node = tree.begin_node("psci")?;
    let forms = ["arm,psci-1.0", "arm,psci-0.2"].map(String::from);
    tree.property_string_list("compatible", forms.into())?;
    tree.property_string("method", "hvc")?;
    tree.end_node(node)?;
    let cpus = tree.begin_node("cpus")?;
    tree.property_u32("#address-cells", 1)?;
    tree.property_u32("#size-cells", 0)?;
    for affinity in (0..vcpus).map(affinity) {
        let node = tree.begin_node(&at("cpu", affinity.into()))?;
        tree.property_string("device_type", "cpu")?;
        tree.property_string("compatible", "arm,armv8")?;
        tree.property_string("enable-method", "psci")?;
        tree.property_u32("reg", affinity)?;
        tree.end_node(node)?;
    }
    tree.end_node(cpus)
}

/// The interrupt controller, and the timer of each processor.
fn interrupts(tree: &mut FdtWriter, vcpus: usize) -> Result<(), Error> {
    let node = tree.begin_node(&at("intc", mmio::DISTRIBUTOR.get()))?;
    tree.property_string("compatible", "arm,gic-v3")?;
    tree.property_u32("#interrupt-cells", 3)?;
    tree.property_null("interrupt-controller")?;
    let mut reg = vec![mmio::DISTRIBUTOR.get(), mmio::DISTRIBUTOR_BYTES];
    let regions = mmio::redistributors(vcpus);
    let regions = regions.iter().filter(|(_, bytes)| *bytes != 0);
    reg.extend(
        regions
            .clone()
            .flat_map(|(start, bytes)| [start.get(), *bytes]),
    );
    tree.property_u32("#redistributor-regions", regions.count() as u32)?;
    tree.property_array_u64("reg", &reg)?;
    tree.property_phandle(INTERRUPT_CONTROLLER)?;
    tree.end_node(node)?;
    let node = tree.begin_node("timer")?;
    tree.property_string("compatible", "arm,armv8-timer")?;
    tree.property_null("always-on")?;
    // Secure, physical, virtual, hypervisor. Only the second and the third exist here, but the
    // binding prescribes the order.
    let ppis = [13, mmio::PHYSICAL_TIMER_PPI, mmio::VIRTUAL_TIMER_PPI, 10];
    let cells: Vec<u32> = ppis.iter().flat_map(|n| [PPI, *n, LEVEL_HIGH]).collect();
    tree.property_array_u32("interrupts", &cells)?;
    tree.end_node(node)
}

fn devices(tree: &mut FdtWriter) -> Result<(), Error> {
    let node = tree.begin_node("apb-pclk")?;
    tree.property_string("compatible", "fixed-clock")?;
    tree.property_u32("#clock-cells", 0)?;
    tree.property_u32("clock-frequency", 24_000_000)?;
    tree.property_phandle(CLOCK)?;
    tree.end_node(node)?;
    let node = tree.begin_node(&at("pl011", mmio::UART.get()))?;
    let forms = ["arm,pl011", "arm,primecell"].map(String::from);
    tree.property_string_list("compatible", forms.into())?;
    tree.property_array_u64("reg", &[mmio::UART.get(), mmio::DEVICE_BYTES])?;
    tree.property_array_u32("interrupts", &[SPI, 1, LEVEL_HIGH])?;
    tree.property_array_u32("clocks", &[CLOCK, CLOCK])?;
    let clocks = ["uartclk", "apb_pclk"].map(String::from);
    tree.property_string_list("clock-names", clocks.into())?;
    tree.end_node(node)?;
    let node = tree.begin_node(&at("lacuna-host", mmio::HOST.get()))?;
    tree.property_string("compatible", "lacuna,host")?;
    tree.property_array_u64("reg", &[mmio::HOST.get(), mmio::DEVICE_BYTES])?;
    tree.end_node(node)
}

/// The name of a node with a unit address.
fn at(name: &str, address: u64) -> String {
    format!("{name}@{address:x}")
}

/// The affinity of vCPU `index`, as bits 23 to 0 of its `MPIDR_EL1`: 16 vCPUs in each Aff1, because
/// one write to `ICC_SGI1R_EL1` reaches at most 16.
pub const fn affinity(index: usize) -> u32 {
    let index = index as u32;
    index & 0xf | (index >> 4 & 0xff) << 8
}
