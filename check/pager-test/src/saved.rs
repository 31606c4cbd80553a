//! The VM that the suite saves: its slots, and the content of each page.

use crate::frame::{COMPLETE_PAUSED, CONFIG, MEMORY_FD, START, STATE};
use crate::image::content;
use crate::verdict::Stop;
use lacuna_addr::PAGE_SIZE;
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages of one content are this far from those of another content.
const CONTENT: u64 = 1 << 40;

/// A slot of guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) number: u32,
    /// Its guest-physical address.
    pub(crate) gpa: u64,
    pub(crate) pages: u64,
    /// The memfd that backs it: slots of one zone share one.
    file: usize,
    /// The byte of the memfd that it begins at.
    pub(crate) offset: u64,
}

/// The slots. Their numbers have gaps, two of them share a memfd, between them are addresses
/// without memory, and the last one is a hole as a whole.
pub(crate) const SLOTS: [Slot; 4] = [
    slot(0, 0, 544, 0, 0),
    slot(1, 1 << 32, 32, 1, 0),
    slot(5, (1 << 32) + 64 * PAGE, 32, 1, 32 * PAGE),
    slot(7, 2 << 32, 16, 2, 0),
];

const fn slot(number: u32, gpa: u64, pages: u64, file: usize, offset: u64) -> Slot {
    Slot {
        number,
        gpa,
        pages,
        file,
        offset,
    }
}

impl Slot {
    pub(crate) fn bytes(&self) -> u64 {
        self.pages * PAGE
    }

    /// The guest-physical addresses of its pages.
    pub(crate) fn addresses(&self) -> impl DoubleEndedIterator<Item = u64> + use<> {
        let gpa = self.gpa;
        (0..self.pages).map(move |index| gpa + index * PAGE)
    }

    /// Whether its page `index` is a hole in the memfd: a part of a large hole, or alone.
    fn is_hole(&self, index: u64) -> bool {
        self.file == 2 || index % 4 == 3 || (24..self.pages - 8).contains(&index)
    }
}

/// The slot that has this guest-physical address, and the byte of its memfd.
pub(crate) fn place(gpa: u64) -> (&'static Slot, u64) {
    let mut slots = SLOTS.iter();
    let slot = slots.find(|slot| (slot.gpa..slot.gpa + slot.bytes()).contains(&gpa));
    let slot = slot.expect("an address of the VM's memory");
    (slot, slot.offset + gpa - slot.gpa)
}

/// What a VM of one content has at a guest-physical address: its bytes, and zeros in a hole.
pub(crate) fn page(number: u64, gpa: u64) -> [u8; PAGE_SIZE] {
    let (slot, _) = place(gpa);
    match slot.is_hole((gpa - slot.gpa) / PAGE) {
        true => [0; PAGE_SIZE],
        false => content(gpa / PAGE + number * CONTENT),
    }
}

/// Says what a page has, for a report.
pub(crate) fn describe(found: &[u8; PAGE_SIZE]) -> String {
    let number = u64::from_le_bytes(found[..8].try_into().expect("8 bytes"));
    if found == &[0; PAGE_SIZE] {
        return "zeros".into();
    }
    if found != &content(number) {
        return format!("other bytes: the first 8 are {number:#x}");
    }
    let vm = if number < CONTENT {
        ""
    } else {
        " of another VM"
    };
    format!("the page of address {:#x}{vm}", number % CONTENT * PAGE)
}

/// One request of the sending VMM.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) kind: u16,
    pub(crate) middle: [u8; 6],
    /// The announced length, if it is not the payload's.
    pub(crate) length: Option<u64>,
    pub(crate) payload: Vec<u8>,
    pub(crate) files: Vec<File>,
}

impl Step {
    pub(crate) fn new(kind: u16, payload: impl Into<Vec<u8>>) -> Self {
        Self {
            kind,
            middle: [0; 6],
            length: None,
            payload: payload.into(),
            files: Vec::new(),
        }
    }
}

/// A VM with its memory.
#[derive(Debug)]
pub(crate) struct SavedVm {
    /// The number of its content. VMs of two numbers differ in each page that is no hole.
    pub(crate) number: u64,
    files: [File; 3],
}

impl SavedVm {
    /// Makes the memory of a VM.
    pub(crate) fn new(number: u64) -> Result<Self, Stop> {
        Self::make(number).map_err(Stop::host("make a memfd"))
    }

    fn make(number: u64) -> io::Result<Self> {
        let file = || memfd_create("pager-test", MemfdFlags::CLOEXEC).map(File::from);
        let files = [file()?, file()?, file()?];
        for slot in &SLOTS {
            let file = &files[slot.file];
            file.set_len(slot.offset + slot.bytes())?;
            for (index, gpa) in (0..).zip(slot.addresses()) {
                if !slot.is_hole(index) {
                    file.write_all_at(&page(number, gpa), slot.offset + index * PAGE)?;
                }
            }
        }
        Ok(Self { number, files })
    }

    /// Writes other bytes to each page, as a VMM's exit may do.
    pub(crate) fn overwrite(&self) -> io::Result<()> {
        SLOTS.iter().try_for_each(|slot| {
            let bytes = vec![0xee; slot.bytes() as usize];
            self.files[slot.file].write_all_at(&bytes, slot.offset)
        })
    }

    /// Its configuration, as Cloud Hypervisor's `VmMigrationConfig`.
    pub(crate) fn config(&self) -> Value {
        let mapping = |slot: &Slot| {
            json!({"slot": slot.number, "gpa": slot.gpa, "size": slot.bytes(), "zone_id": "mem0",
                   "virtio_mem": false, "file_offset": slot.offset})
        };
        let range = |slot: &Slot| json!({"gpa": slot.gpa, "length": slot.bytes()});
        let bytes: u64 = SLOTS.iter().map(Slot::bytes).sum();
        json!({
            "vm_config": {
                "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
                "memory": {"size": bytes, "shared": true},
                "payload": {"kernel": format!("/vm-{}", self.number)},
            },
            "common_cpuid": [],
            "memory_manager_data": {
                "memory_ranges": {"data": SLOTS.iter().map(range).collect::<Vec<_>>()},
                "guest_ram_mappings": SLOTS.iter().map(mapping).collect::<Vec<_>>(),
                "start_of_device_area": 3_u64 << 32, "boot_ram": bytes, "current_ram": bytes,
                "arch_mem_regions": [], "hotplug_slots": [], "next_memory_slot": 8,
                "selected_slot": 0, "next_hotplug_slot": 0,
            },
            "memory_mode": "Precopy",
        })
    }

    /// Its state: longer than a socket's buffer.
    pub(crate) fn state(&self) -> Vec<u8> {
        let text = format!("vm-{}.", self.number).repeat(50_000);
        let state = json!({"snapshots": {}, "snapshot_data": {"state": text}});
        state.to_string().into_bytes()
    }

    /// The request that sends slot `index` of [`SLOTS`].
    pub(crate) fn memory_fd(&self, index: usize) -> Result<Step, Stop> {
        let slot = &SLOTS[index];
        let file = self.files[slot.file].try_clone();
        Ok(Step {
            files: vec![file.map_err(Stop::host("duplicate a descriptor"))?],
            ..Step::new(MEMORY_FD, slot.number.to_le_bytes())
        })
    }

    /// The requests of a whole session: Start, one MemoryFd for each slot, Config, State,
    /// CompletePaused.
    pub(crate) fn steps(&self) -> Result<Vec<Step>, Stop> {
        let mut steps = vec![Step::new(START, [])];
        for index in 0..SLOTS.len() {
            steps.push(self.memory_fd(index)?);
        }
        steps.push(Step::new(CONFIG, self.config().to_string()));
        steps.push(Step::new(STATE, self.state()));
        steps.push(Step::new(COMPLETE_PAUSED, []));
        Ok(steps)
    }
}
