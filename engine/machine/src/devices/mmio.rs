//! The addresses of the devices of AArch64 guests. Below 0x0a00_0000 they are as on QEMU's `virt`
//! machine, whose second region of redistributors is above memory.
//!
//! ```text
//! 0x0800_0000  GICv3 distributor, 64 KiB
//! 0x080a_0000  GICv3 redistributors, 128 KiB for each of vCPUs 0 to 122
//! 0x0900_0000  PL011, one page
//! 0x090f_0000  the host's device, one page
//! 0x3e00_0000  GICv3 redistributors of vCPUs 123 and up
//! 0x4000_0000  memory
//! ```

use lacuna_addr::Gpa;

/// The distributor of the interrupt controller.
pub const DISTRIBUTOR: Gpa = Gpa::truncate(0x0800_0000);
/// The size of the distributor's page, in bytes.
pub const DISTRIBUTOR_BYTES: u64 = 0x1_0000;
/// The redistributors of the interrupt controller, one after the other.
pub const REDISTRIBUTORS: Gpa = Gpa::truncate(0x080a_0000);
/// The redistributors that have no room below [`UART`].
pub const REDISTRIBUTORS_2: Gpa = Gpa::truncate(0x3e00_0000);
/// The size of one redistributor, in bytes.
pub const REDISTRIBUTOR_BYTES: u64 = 0x2_0000;
/// The PPI of the virtual timer: its INTID minus 16.
pub const VIRTUAL_TIMER_PPI: u32 = 11;
/// The PPI of the physical timer: its INTID minus 16.
pub const PHYSICAL_TIMER_PPI: u32 = 14;
/// The serial line: a PL011.
pub const UART: Gpa = Gpa::truncate(0x0900_0000);
/// The host's own device: the exit code and the status page.
pub const HOST: Gpa = Gpa::truncate(0x090f_0000);
/// The size of each of these two devices, in bytes.
pub const DEVICE_BYTES: u64 = 0x1000;
/// Offset of the host's register for the exit code. A 32-bit write ends the run.
pub const HOST_EXIT: u64 = 0;
/// Offset of the host's register for the status page. A 32-bit write announces its frame number.
pub const HOST_STATUS: u64 = 4;

/// The regions of redistributors of a machine with `vcpus` vCPUs, as start and bytes. The second
/// may be empty.
pub const fn redistributors(vcpus: usize) -> [(Gpa, u64); 2] {
    let (all, room) = (
        vcpus as u64 * REDISTRIBUTOR_BYTES,
        UART.get() - REDISTRIBUTORS.get(),
    );
    let first = room - room % REDISTRIBUTOR_BYTES;
    match all <= first {
        true => [(REDISTRIBUTORS, all), (REDISTRIBUTORS_2, 0)],
        false => [(REDISTRIBUTORS, first), (REDISTRIBUTORS_2, all - first)],
    }
}
