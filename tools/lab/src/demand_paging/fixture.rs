//! VMs whose memory is missing. A VM's pages are provided once, so each run has a VM of its own.
//! Its host stays, so a later run has the frames of an earlier one, and the kernel has backed them.

use super::lists::Lists;
use super::{DemandPaging, Fill, PAGES};
use crate::experiment::{LabError, LabResult};
use crate::fixture::resident;
use lacuna::memory::{
    LinuxBacking, MemoryKind, MemorySlot, SharedFill, SharedMemory, SlotFlags, SlotId,
};
use lacuna::soft::{BootMemory, Vm, VmBuilder};
use lacuna::source::PageSource;
use lacuna::{
    Apf, Arch, Builder as _, Clock, Gpa, HostClock, MemorySlots as _, PAGE_SIZE, VmConfig, kvm,
};
use lacuna_addr::BackingRange;
use lacuna_soft::SlotSpec;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, OnceLock};

/// The guest's timer tick on kvm, in microseconds. It is long, because a tick is expensive where
/// KVM emulates the guest's kernel.
const KVM_TICK_US: u64 = 100_000;

/// Makes a VM whose pages a source provides.
type Make<V> = Box<dyn Fn(Apf, Arc<dyn PageSource>) -> LabResult<Arc<V>> + Send + Sync>;

/// Makes a VM for each run of the same guest.
pub struct Fixture<V = Vm> {
    pub make: Make<V>,
    /// Provides pages of a VM: this number, from this address on.
    pub provide: fn(&V, Gpa, usize) -> LabResult,
    /// The command line of the guests.
    pub line: String,
    /// The first page that the guest touches, once a guest has booted.
    pub arena: OnceLock<u64>,
}

impl Fixture {
    /// A host on soft with frames for one guest of `options`.
    pub fn soft(options: &DemandPaging) -> LabResult<Self> {
        let builder = VmBuilder {
            arch: options.guest.arch,
            memory_kind: options.guest.memory_kind,
            command_line: options.words(),
            ..resident(options.memory().bytes() >> 20, options.guest.vcpus)
        };
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock))?;
        let line = builder.full_command_line();
        let wanted = options.clone();
        let make = move |apf, source| {
            let config = VmConfig {
                arch: wanted.guest.arch,
                memory: wanted.memory(),
                vcpus: wanted.guest.vcpus,
                apf,
                ..VmConfig::default()
            };
            let memory = BootMemory {
                kind: wanted.guest.memory_kind,
                source: Some(source),
                backing: match wanted.fill {
                    Fill::Copy => None,
                    Fill::Continue => Some(full_file(&wanted)?),
                },
            };
            let (host, clock) = (Arc::clone(&host), Arc::clone(&clock));
            let vm = Vm::with_memory(host, clock, config, memory)?;
            if wanted.guest.slots > 1 {
                split_slot(&vm, &wanted)?;
            }
            Ok(vm)
        };
        Ok(Self {
            make: Box::new(make),
            provide: match options.fill {
                Fill::Copy => copy,
                Fill::Continue => map_from_file,
            },
            line,
            arena: OnceLock::new(),
        })
    }
}

impl Fixture<kvm::Vm> {
    /// VMs on `/dev/kvm`.
    pub fn kvm(options: &DemandPaging) -> Self {
        let memory = options.memory();
        let builder = kvm::VmBuilder {
            memory_kind: MemoryKind::Linux,
            vcpus: options.guest.vcpus,
            command_line: format!("{} tick_us={KVM_TICK_US}", options.words()),
            ..kvm::VmBuilder::new(memory, memory)
        };
        let line = builder.full_command_line();
        let make = move |apf, source| {
            let source = Some(source);
            let builder = kvm::VmBuilder {
                apf,
                source,
                ..builder.clone()
            };
            Ok(builder.build()?)
        };
        Self {
            make: Box::new(make),
            provide: copy,
            line,
            arena: OnceLock::new(),
        }
    }
}

/// Why missing memory of these `options` does not exist on this host.
pub fn unavailable(options: &DemandPaging) -> Option<LabError> {
    let vm = Fixture::soft(options).and_then(|fixture| fixture.empty_vm(options.guest.arch));
    vm.err()
}

impl Fixture {
    /// A VM without a guest.
    pub fn empty_vm(&self, arch: Arch) -> LabResult<Arc<Vm>> {
        (self.make)(Apf::Off, Arc::new(Lists::new(1, arch)))
    }
}

fn copy<V: lacuna::Vm>(vm: &V, first: Gpa, pages: usize) -> LabResult {
    let memory = vm.missing_memory().expect("it has a source");
    memory.provide(first, PAGES[..pages].as_flattened())?;
    Ok(())
}

fn map_from_file(vm: &Vm, first: Gpa, pages: usize) -> LabResult {
    let slots = vm.mmu().slots();
    let slot = slots.find(first.gfn()).expect("the guest's memory");
    // All slots lie one after the other in one region.
    let range = BackingRange::new(slot.backing_of(first.gfn()), pages as u64);
    vm.host().provide_from_file(range.expect("in the region"))?;
    Ok(())
}

/// A file that has all pages of the guest's memory.
fn full_file(options: &DemandPaging) -> LabResult<LinuxBacking> {
    let pages = options.memory();
    let memory =
        SharedMemory::new(pages, SharedFill::InFile).map_err(lacuna::memory::HostError::from)?;
    let written = memory.file().try_clone_to_owned().and_then(|file| {
        let (file, all) = (File::from(file), PAGES.as_flattened());
        let starts = (0..pages.bytes()).step_by(all.len());
        starts
            .into_iter()
            .try_for_each(|at| file.write_all_at(all, at))
    });
    written.map_err(LabError::io("write a memory file"))?;
    Ok(LinuxBacking::Shared(memory))
}

/// Replaces the slot of the boot layout by several with its memory.
fn split_slot(vm: &Vm, options: &DemandPaging) -> LabResult {
    let slots = vm.memory_slots();
    let &[MemorySlot { id, gfns, .. }] = &slots[..] else {
        let why = "a guest with more than one memory slot cannot have --slots: give less --bytes";
        return Err(LabError::Guest(why.into()));
    };
    let snapshot = vm.mmu().slots();
    let slot = snapshot.find(gfns.start()).expect("the slot");
    vm.remove_slot(id)?;
    let (unit, count) = (options.guest.unit() as u64, options.guest.slots as u64);
    let first = |slot: u64| gfns.pages() / unit * slot / count * unit;
    for index in 0..count {
        let start = gfns.start().checked_add(first(index)).expect("a page");
        let added = vm.add_slot(SlotSpec {
            id: SlotId(index as u16),
            guest: start.gpa().get(),
            backing: slot.backing_of(start),
            bytes: (first(index + 1) - first(index)) * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        });
        added.map_err(|error| LabError::Other(Box::new(error)))?;
    }
    Ok(())
}
