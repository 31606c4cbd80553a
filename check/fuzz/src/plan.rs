//! The configuration that a seed draws before anything runs: the host, the number of VMs, and the
//! VMs' common settings.

use crate::arm64::BOOT_DATA;
use crate::monitor::BALLAST;
use crate::place::{EXTRAS, PER_CPU};
use crate::runtime::{ApicMode, Manners};
use fastrand::Rng;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_machine::Arch;
use lacuna_soft::{
    Apf, Backup, CpuModel, Delivery, Host, HugePages, LatencySetting, RingSize, Swap, VmBuilder,
};
use lacuna_sync::Clock;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How a seed's VMs run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// All vCPUs on one thread, under a virtual clock, from this seed.
    Seeded(u64),
    /// Each vCPU on its own thread, in real time.
    Threads,
}

/// The drawn configuration. Events at run time are drawn later.
#[derive(Debug)]
pub struct Plan {
    /// The host, and the common settings of its VMs.
    pub builder: VmBuilder,
    /// Number of VMs on the host.
    pub vms: usize,
    /// Where dirty pages are recorded: bitmap or dirty rings.
    pub delivery: Delivery,
    /// How the guests' runtime behaves.
    pub manners: Manners,
}

/// The folder of the swap file: a tmpfs if there is one, because a disk would cost time.
fn swap_folder() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    match shared.is_dir() {
        true => shared,
        false => std::env::temp_dir(),
    }
}

/// 2 MiB, in pages.
const BLOCK: u64 = 512;

fn arch(rng: &mut Rng) -> Arch {
    match rng.u8(..3) {
        0 => Arch::Arm64,
        _ => Arch::X86_64,
    }
}

/// Pages of the main memory of each VM.
fn memory(rng: &mut Rng, arch: Arch) -> u64 {
    let memory = match rng.bool() {
        true => BLOCK * rng.u64(1..=5),
        false => rng.u64(300..1800),
    };
    match arch {
        Arch::Arm64 => memory + BOOT_DATA / PAGE_SIZE as u64,
        _ => memory,
    }
}

impl Plan {
    /// Creates the host that all VMs share. Its swap has room for every page: main memory, later
    /// slots, and ballast.
    pub fn host(&self, clock: Arc<dyn Clock>) -> Arc<Host> {
        let extras = EXTRAS * 3 * BLOCK;
        let all = self.vms as u64 * (self.builder.memory.get() + extras + BALLAST) + BALLAST;
        let builder = VmBuilder {
            memory: PageCount::new(all),
            ..self.builder.clone()
        };
        builder.host(clock).expect("a host")
    }

    /// Draws a plan for VMs with `vcpus` vCPUs each.
    pub fn draw(rng: &mut Rng, mode: Mode, vcpus: usize) -> Self {
        let vms = 1 + usize::from(rng.u8(..3) == 0);
        // The per-vCPU pages end below `place::VECTORS`.
        debug_assert!(PER_CPU + ((vcpus as u64) << 12) < 0x3_0000);
        let arch = arch(rng);
        let memory = memory(rng, arch);
        let least = Host::minimum_budget(vcpus * vms + 1).get();
        let in_memory = rng.u8(..3) == 0;
        let budget = match rng.u8(..4) {
            // Compressed swap lies inside the budget. So the budget must have room for
            // incompressible pages, which random writes make.
            _ if in_memory => least + 1500 + rng.u64(..2000),
            0 => least,
            1 => least + rng.u64(..256),
            _ => least + rng.u64(256..3500),
        };
        let huge = [HugePages::Never, HugePages::Madvise, HugePages::Always][rng.usize(..3)];
        let budget = match huge {
            HugePages::Never => budget,
            // The host allocates a block only while many frames are free. Half of these draws have
            // room for blocks everywhere, the other half seldom has.
            _ if rng.bool() => budget + BLOCK * rng.u64(..8),
            _ => budget + vms as u64 * (memory + 3 * BLOCK) + 4 * BLOCK,
        };
        let size = RingSize::from_bytes(RingSize::BYTES_MIN).expect("the least is allowed");
        let ring = |backup| Delivery::Ring { size, backup };
        let pick = rng.usize(..4);
        let delivery = [
            Delivery::Bitmap,
            Delivery::Bitmap,
            ring(Backup::None),
            ring(Backup::Bitmap),
        ][pick];
        let builder = VmBuilder {
            arch,
            memory: PageCount::new(memory),
            resident: PageCount::new(budget),
            vcpus,
            huge,
            swap: match in_memory {
                true => Swap::Memory,
                false => Swap::File(swap_folder()),
            },
            latency: LatencySetting::new(Duration::from_micros(rng.u64(..3) * 50)),
            apf: match rng.u8(..4) {
                0 => Apf::Off,
                _ => Apf::On,
            },
            cpu: CpuModel::Host,
            seed: match mode {
                Mode::Seeded(seed) => Some(seed),
                Mode::Threads => None,
            },
            command_line: String::new(),
            ..VmBuilder::new(PageCount::new(memory), PageCount::new(budget))
        };
        Self {
            builder,
            vms,
            delivery,
            manners: Manners {
                hostile: rng.u8(..4) == 0,
                apic: match rng.bool() {
                    true => ApicMode::X2Apic,
                    false => ApicMode::XApic,
                },
            },
        }
    }
}
