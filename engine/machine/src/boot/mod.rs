//! Loads an image: writes it to guest memory, and determines the state in which a vCPU starts.
//!
//! This file has the parts common to all architectures: the layout of guest memory, the checks of
//! an image against it, and the writes of segments. `x86` and `arm64` have the boot data and the
//! state at entry.

pub mod arm64;
pub mod x86;

use crate::{Arch, ErrorKind, GuestMemory, Image, MemoryError};
use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};

/// Why a guest cannot be started with this memory and image.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum BootError {
    /// A segment lies where there is no memory.
    #[error(
        "segment {index} at {gpa} ({size:#x} bytes) lies outside the guest's memory; \
         the guest needs at least {needed}M of memory"
    )]
    SegmentOutside {
        /// Segment index.
        index: usize,
        /// Where it starts.
        gpa: Gpa,
        /// How long it is.
        size: u64,
        /// The memory size that would hold it, in MiB.
        needed: u64,
    },
    /// A segment begins below the end of the boot data.
    #[error(
        "segment {index} at {gpa} lies below {first:#x}, where the boot data is; \
         link the image higher"
    )]
    SegmentTooLow {
        /// Segment index.
        index: usize,
        /// Where it starts.
        gpa: Gpa,
        /// The first address behind the boot data.
        first: u64,
    },
    /// The command line is too long.
    #[error("the guest's command line has {0} bytes; at most 4095 fit")]
    CommandLine(usize),
    /// The guest's memory is too small or too large.
    #[error("guest memory of {0} bytes: give at least 1M and at most 64T, in whole pages")]
    BadSize(u64),
    /// The image is for another processor.
    #[error("the image is for {image}, and this VM's processors are {vm}: give an image for {vm}")]
    WrongArch {
        /// The image's architecture.
        image: Arch,
        /// The VM's architecture.
        vm: Arch,
    },
    /// The device tree cannot be made.
    #[error(
        "cannot describe the machine to the guest: {0}; the guest's command line must not have a \
         zero byte"
    )]
    DeviceTree(String),
    /// The host has no random numbers for the guest.
    #[error("cannot get random numbers for the guest from the host's kernel: {0}")]
    Random(String),
    /// The image could not be written to the guest's memory.
    #[error("cannot load the image: {0}")]
    Memory(#[from] MemoryError),
}

impl BootError {
    /// Whether the request or the host is the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::SegmentOutside { .. }
            | Self::SegmentTooLow { .. }
            | Self::CommandLine(_)
            | Self::BadSize(_)
            | Self::WrongArch { .. }
            | Self::DeviceTree(_) => ErrorKind::Request,
            Self::Random(_) => ErrorKind::Host,
            Self::Memory(error) => error.kind(),
        }
    }
}

/// Where the guest's memory lies.
///
/// An x86-64 guest has memory from 0 to 3 GiB. The rest continues at 4 GiB. From 0xc000_0000 to
/// 0xffff_ffff there is no memory, so a VMM can put devices there, except over the local APIC at
/// 0xfee0_0000.
///
/// An AArch64 guest has memory from 1 GiB on, as on QEMU's `virt` machine. The devices of every
/// guest are below ([`mmio`](crate::mmio)). A VMM can put its own at 0x0a00_0000 to 0x3dff_ffff.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    ranges: Vec<GfnRange>,
}

impl Layout {
    /// `size` of memory for an x86 guest.
    ///
    /// # Errors
    /// [`BootError::BadSize`].
    pub fn new(size: PageCount) -> Result<Self, BootError> {
        Self::of(Arch::X86_64, size)
    }

    /// `size` of memory where guests for `arch` expect it.
    ///
    /// # Errors
    /// [`BootError::BadSize`].
    pub fn of(arch: Arch, size: PageCount) -> Result<Self, BootError> {
        let bytes = size.bytes();
        if !(1 << 20..=64 << 40).contains(&bytes) {
            return Err(BootError::BadSize(bytes));
        }
        let page = PAGE_SIZE as u64;
        let range = |start: u64, bytes: u64| GfnRange::new(Gfn::new(start / page)?, bytes / page);
        let ranges = match arch {
            Arch::X86_64 => [
                range(0, bytes.min(x86::LOW_END)),
                range(x86::HIGH_START, bytes.saturating_sub(x86::LOW_END)),
            ],
            Arch::Arm64 => [range(arm64::MEMORY_START, bytes), None],
        };
        let ranges = ranges.into_iter().flatten().collect();
        Ok(Self { ranges })
    }

    /// The guest frames with memory, in ascending order: one range for each memory slot.
    pub fn ranges(&self) -> &[GfnRange] {
        &self.ranges
    }

    /// The first address with memory.
    fn start(&self) -> u64 {
        let first = self.ranges.first();
        first.map_or(0, |range| range.start().gpa().get())
    }

    fn holds(&self, gpa: Gpa, size: u64) -> bool {
        let page = PAGE_SIZE as u64;
        let last = gpa.get().checked_add(size);
        self.ranges.iter().any(|r| {
            let (start, end) = (r.start().gpa().get(), r.end_raw() * page);
            start <= gpa.get() && last.is_some_and(|last| last <= end)
        })
    }
}

/// The values that differ between architectures in [`Placement::load`].
struct Placement {
    arch: Arch,
    /// The end of the boot data. Every segment of an image begins here or above.
    boot_end: u64,
}

impl Placement {
    /// Checks everything, then writes the segments.
    fn load(
        &self,
        image: &Image<'_>,
        layout: &Layout,
        command_line: &str,
        memory: &impl GuestMemory,
    ) -> Result<(), BootError> {
        if image.arch != self.arch {
            return Err(BootError::WrongArch {
                image: image.arch,
                vm: self.arch,
            });
        }
        for (index, s) in image.segments.iter().enumerate() {
            let gpa = s.gpa;
            if gpa.get() < self.boot_end {
                let first = self.boot_end;
                return Err(BootError::SegmentTooLow { index, gpa, first });
            }
            let size = s.extent();
            if !layout.holds(gpa, size) {
                let needed = (image.end() - layout.start()).div_ceil(1 << 20);
                return Err(BootError::SegmentOutside {
                    index,
                    gpa,
                    size,
                    needed,
                });
            }
        }
        if command_line.len() >= PAGE_SIZE {
            return Err(BootError::CommandLine(command_line.len()));
        }
        // Only the bytes from the file are written. The rest of a segment must be zeros, as guest
        // memory is at first.
        for s in &image.segments {
            memory.write(s.gpa, s.bytes)?;
        }
        Ok(())
    }
}
