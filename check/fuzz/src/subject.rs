//! A VM under test: its guest, its slots, and the memory around them that must not change.
//!
//! ```text
//! region of a slot      | guard page | the slot's backing ... | guard page |
//! ```
//! Every page of data begins with words with the VM's own key, and every guard page with words with
//! the host's key. A key in a wrong place has leaked.

use crate::arm64;
use crate::place::*;
use crate::plan::Plan;
use crate::program::{Author, Labels};
use crate::runtime::{self, Piece};
use crate::tally::Tally;
use crate::values;
use fastrand::Rng;
use lacuna_addr::{BackingAddr, BackingRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{
    Arch, BootError, GuestMemory as _, Image, Kick, MemoryError, MemorySlots as _, PlatformDevices,
    Segment, Vm as _,
};
use lacuna_soft::{Host, SlotFlags, SlotId, SlotSpec, SoftError, Vcpu, Vm, VmConfig};
use lacuna_sync::Clock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const PAGE: u64 = PAGE_SIZE as u64;
/// 2 MiB, in pages.
const BLOCK: u64 = 512;
/// The upper 48 bits of a VM's or the host's words.
const KEYS: [u64; 3] = [0xa11c_e5ec_0001, 0xb0b5_5ec2_0002, 0xca4a_21e5_0003];
/// The host's own key.
const HOST: usize = 2;

/// A guest's address of any kind, for `subject`'s architecture.
pub fn address(rng: &mut Rng, subject: &Subject) -> u64 {
    match subject.arch {
        Arch::Arm64 => arm64::sequence::address(rng, subject.memory),
        _ => values::address(rng, subject.memory),
    }
}

fn word(owner: usize, low: u64) -> u64 {
    KEYS[owner] << 16 | low & 0xffff
}

fn page(owner: usize, index: u64) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    for at in bytes.chunks_exact_mut(8) {
        at.copy_from_slice(&word(owner, index).to_le_bytes());
    }
    bytes
}

/// Panics if `value`, which `owner` sees, belongs to another VM or to the host.
pub fn assert_own(owner: usize, value: u64, place: &dyn std::fmt::Display) {
    let key = value >> 16;
    let others = (0..KEYS.len()).filter(|other| *other != owner);
    for other in others {
        assert!(
            key != KEYS[other],
            "LEAK: {place} of VM {owner} holds {value:#x}, which belongs to {other}"
        );
    }
}

/// The backing of a slot besides the main memory.
pub struct Extra {
    /// The number of the slot.
    pub id: SlotId,
    region: BackingRange,
    /// Pages before the slot's backing.
    before: u64,
    /// The most pages of the slot.
    pub pages: u64,
}

impl Extra {
    /// The slot at `guest` with this many pages.
    pub fn spec(&self, guest: u64, pages: u64, flags: SlotFlags) -> SlotSpec {
        SlotSpec {
            id: self.id,
            guest,
            backing: at(self.region, self.before),
            bytes: pages * PAGE,
            flags,
        }
    }

    /// The guest-physical address of its first place.
    pub fn home(&self) -> u64 {
        EXTRA + u64::from(self.id.0 - FIRST_EXTRA) * EXTRA_STEP
    }

    fn guards(&self) -> impl Iterator<Item = u64> {
        let behind = self.before + self.pages..self.region.pages();
        (0..self.before).chain(behind)
    }
}

/// The page `index` of a region.
fn at(region: BackingRange, index: u64) -> BackingAddr {
    let page = region.start().checked_add_pages(index);
    page.expect("inside of a region")
}

/// Name of the first slot besides the main memory.
pub const FIRST_EXTRA: u16 = 10;

/// A kick without effect: no write to a port ends the run.
struct Deaf;

impl Kick for Deaf {
    fn kick(&self, _: usize) {}

    fn kick_all(&self) {}
}

/// One VM.
pub struct Subject {
    /// The number of the VM on its host.
    pub owner: usize,
    /// The VM.
    pub vm: Arc<Vm>,
    /// The architecture of its guest.
    pub arch: Arch,
    /// The beginning of the memory map of [`place`](crate::place).
    pub base: u64,
    /// Bytes of its main memory from there on.
    pub memory: u64,
    /// Its other slots.
    pub extras: Vec<Extra>,
    /// The slot of its main memory.
    pub main: SlotSpec,
    devices: PlatformDevices,
    console: Arc<AtomicU64>,
    pieces: Vec<Piece>,
    labels: Mutex<Labels>,
}

impl Subject {
    /// A VM by `plan`, before the first instruction of its vCPUs.
    pub fn new(
        plan: &Plan,
        owner: usize,
        host: &Arc<Host>,
        clock: Arc<dyn Clock>,
        rng: &mut Rng,
    ) -> (Self, Vec<Vcpu>) {
        let builder = &plan.builder;
        let arch = builder.arch;
        let config = VmConfig {
            arch,
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf: builder.apf,
            ..VmConfig::default()
        };
        let vm = Vm::new(Arc::clone(host), clock, config).expect("a VM");
        vm.set_delivery(plan.delivery).expect("before its vCPUs");
        let console = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&console);
        let devices = PlatformDevices::of(arch, move |line: &str| {
            counted.fetch_add(line.len() as u64, Ordering::Relaxed);
        });
        let (start, base) = match arch {
            Arch::Arm64 => (arm64::START, arm64::BASE),
            _ => (0, 0),
        };
        let bytes = builder.memory.bytes();
        let memory = bytes - (base - start);
        let vcpus = builder.vcpus as u64;
        let slots = vm.mmu().slots();
        let backing = slots.get(SlotId(0)).expect("its main memory").backing;
        let mut subject = Self {
            owner,
            arch,
            base,
            memory,
            extras: Vec::new(),
            main: SlotSpec {
                id: SlotId(0),
                guest: start,
                backing: backing.start(),
                bytes,
                flags: SlotFlags::empty(),
            },
            devices,
            console,
            pieces: match arch {
                Arch::Arm64 => arm64::pieces(vcpus, plan.manners),
                _ => runtime::pieces(memory, vcpus, plan.manners),
            },
            labels: Mutex::default(),
            vm,
        };
        subject.fill(rng);
        subject.add_extras(rng);
        let sequences: Vec<Piece> = (0..SEQUENCE_COUNT)
            .flat_map(|index| subject.sequence(index, rng))
            .collect();
        let vcpus = subject.boot(&sequences);
        (subject, vcpus)
    }

    fn boot(&self, sequences: &[Piece]) -> Vec<Vcpu> {
        let segment = |(gpa, bytes): &'_ &Piece| -> (Gpa, u64) {
            (Gpa::new(*gpa).expect("low"), bytes.len() as u64)
        };
        let pieces = self.pieces.iter().chain(sequences);
        let segments = pieces
            .map(|piece| {
                let (gpa, size) = segment(&piece);
                Segment {
                    gpa,
                    bytes: &piece.1,
                    size,
                }
            })
            .collect();
        let image = Image {
            arch: self.arch,
            segments,
            entry: self.entry(),
        };
        self.vm.boot(&image, "").expect("the guest fits")
    }

    fn entry(&self) -> Gpa {
        Gpa::truncate(self.base + RUNTIME)
    }

    /// Fills data pages with words with the VM's key. In each block it fills no page, some, or all.
    fn fill(&self, rng: &mut Rng) {
        let mut share = 2;
        for index in DATA / PAGE..self.memory / PAGE {
            if index % BLOCK == 0 {
                share = rng.u8(..5);
            }
            if rng.u8(..4) < share {
                let at = self.base + index * PAGE;
                let written = self.write(at, &page(self.owner, index));
                written.expect("nothing logs yet");
            }
        }
    }

    fn add_extras(&mut self, rng: &mut Rng) {
        for index in 0..rng.u16(..=EXTRAS as u16) {
            let (before, pages) = (rng.u64(1..4), rng.u64(1..400));
            // Aligned for huge leaves, or not.
            let (before, pages) = match rng.bool() {
                true => (512, 512 * rng.u64(1..=2)),
                false => (before, pages),
            };
            let host = self.vm.host();
            let notifier = self.vm.mmu().notifier();
            let region = host.add_region(PageCount::new(before + pages + 1), notifier);
            let extra = Extra {
                id: SlotId(FIRST_EXTRA + index),
                region: region.expect("room for a region"),
                before,
                pages,
            };
            for guard in extra.guards() {
                let written = host.copy_in(at(extra.region, guard), &page(HOST, guard));
                written.expect("a guard page");
            }
            let spec = extra.spec(extra.home(), pages, SlotFlags::empty());
            self.vm.add_slot(spec).expect("room for a slot");
            self.extras.push(extra);
        }
    }

    fn labels(&self) -> MutexGuard<'_, Labels> {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sequence(&self, index: u64, rng: &mut Rng) -> [Piece; 2] {
        let (memory, labels) = (self.memory, &mut *self.labels());
        let sequence = match self.arch {
            Arch::Arm64 => arm64::sequence::Author {
                rng,
                memory,
                labels,
            }
            .sequence(index),
            _ => Author {
                rng,
                memory,
                labels,
            }
            .sequence(index),
        };
        [
            (self.base + SEQUENCES + index * SEQUENCE_SIZE, sequence.code),
            (self.base + STATES + index * STATE_SIZE, sequence.state),
        ]
    }

    /// Writes `bytes` as a VMM does.
    ///
    /// # Errors
    /// There is no slot, or the slot's log cannot record the write.
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.vm.write(Gpa::truncate(gpa), bytes)
    }

    /// Puts another program into sequence `index`.
    ///
    /// # Errors
    /// As [`Subject::write`].
    pub fn rewrite_sequence(&self, index: u64, rng: &mut Rng) -> Result<(), MemoryError> {
        let [(at, code), (state_at, mut state)] = self.sequence(index, rng);
        self.write(at, &code)?;
        // Some sequences are also written to another slot, and executed from there.
        let elsewhere = rng.u8(..8) == 0;
        if elsewhere && let Some(extra) = self.extras.get(index as usize % EXTRAS as usize) {
            let rip = extra.home() + index % extra.pages * PAGE;
            // The slot may have been removed or moved, or its log may refuse the write.
            if self.write(rip, &code).is_ok() {
                state[..8].copy_from_slice(&rip.to_le_bytes());
            }
        }
        self.write(state_at, &state)
    }

    /// Restores the runtime after the guest has destroyed it.
    ///
    /// # Errors
    /// As [`Subject::write`].
    pub fn reload(&self, rng: &mut Rng) -> Result<(), MemoryError> {
        let boot = Image {
            arch: self.arch,
            segments: Vec::new(),
            entry: self.entry(),
        };
        match self.vm.reload(&boot, "") {
            Ok(()) => {}
            Err(SoftError::Boot(BootError::Memory(error))) => return Err(error),
            Err(error) => panic!("the guest fits: {error}"),
        }
        for (gpa, bytes) in &self.pieces {
            self.write(*gpa, bytes)?;
        }
        // The vCPUs begin in other sequences than last time, with new code.
        for vcpu in 0..self.vm.config().vcpus as u64 {
            let next = rng.u64(..SEQUENCE_COUNT);
            self.write(self.base + PER_CPU + vcpu * PAGE, &next.to_le_bytes())?;
        }
        for _ in 0..4 {
            self.rewrite_sequence(rng.u64(..SEQUENCE_COUNT), rng)?;
        }
        Ok(())
    }

    /// A port write. The exit port has no special effect.
    pub fn write_port(&self, port: u16, width: lacuna_machine::Width, value: u32) {
        self.devices.write(port, width, value, 0, &Deaf);
    }

    /// A port read.
    pub fn read_port(&self, port: u16, width: lacuna_machine::Width) -> u64 {
        self.devices.read(port, width, 0, &Deaf)
    }

    /// A write to an address without memory. The register for the exit code has no special effect.
    pub fn write_device(&self, gpa: Gpa, width: lacuna_machine::Width, value: u64) {
        self.devices.mmio_write(gpa, width, value, 0, &Deaf);
    }

    /// Panics if the registers of `vcpu` hold data of another VM or of the host.
    pub fn assert_own_registers(owner: usize, vcpu: &Vcpu) {
        vcpu.note_registers(|value| assert_own(owner, value, &"a register"));
    }

    /// Panics if a page beside a slot's backing has changed.
    pub fn assert_guards(&self) {
        let mut bytes = [0; PAGE_SIZE];
        for extra in &self.extras {
            for guard in extra.guards() {
                let read = self.vm.host().copy_out(at(extra.region, guard), &mut bytes);
                read.expect("a guard page can be read");
                assert!(
                    bytes == page(HOST, guard),
                    "host memory beside {} was changed: page {guard} of its region",
                    extra.id
                );
            }
        }
    }

    /// Adds the guest's counters.
    pub fn count(&self, tally: &mut Tally) {
        let mut bytes = [0; 2 * PAGE_SIZE];
        let counters = Gpa::truncate(self.base + VECTORS);
        if self.vm.read(counters, &mut bytes).is_err() {
            return;
        }
        // If a guest has overwritten its counters, they are not counted.
        let limit: u64 = self.vm.retired().iter().sum();
        let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8"));
        let sound = |at| Some(word(at)).filter(|count| *count <= limit).unwrap_or(0);
        let group = "exceptions and interrupts";
        match self.arch {
            Arch::Arm64 => (0..17).for_each(|vector| {
                let name = format!("arm64 vector {:#05x}", vector * 0x80);
                tally.add(group, name, sound(vector));
            }),
            _ => (0..256).for_each(|vector| {
                if vector < 22 || sound(vector) > 0 {
                    tally.add(group, format!("{vector:#04x}"), sound(vector));
                }
            }),
        }
        for (number, name) in self.labels().names().iter().enumerate() {
            tally.add("acts", name, sound(512 + number));
        }
        tally.add("guest", "sequences begun", sound(256));
        tally.add(
            "guest",
            "console bytes",
            self.console.load(Ordering::Relaxed),
        );
    }

    /// Adds the host's counters.
    pub fn count_host(host: &Host, tally: &mut Tally) {
        let stats = host.stats();
        let counts = [
            ("swapped in", stats.swapped_in),
            ("swapped out", stats.swapped_out),
            ("clean dropped", stats.clean_dropped),
            ("zero dropped", stats.zero_dropped),
            ("rescued", stats.faults_rescued),
            ("direct reclaims", stats.direct_reclaims),
            ("huge faults", stats.huge_faults),
            ("huge fallbacks", stats.huge_fallbacks),
            ("splits", stats.splits),
            ("collapses", stats.collapses),
            ("collapse failures", stats.collapse_failures),
        ];
        for (name, count) in counts {
            tally.add("host", name, count);
        }
    }

    /// Removes the regions of its slots. The VM itself owns the region of the main memory.
    pub fn dismantle(self) {
        for extra in &self.extras {
            let _ = self.vm.remove_slot(extra.id);
            let removed = self.vm.host().remove_region(extra.region);
            removed.expect("no other code has it");
        }
    }
}
