//! How often a vCPU has exited to its VMM, by kind.

use crate::Exit;
use std::sync::atomic::{AtomicU64, Ordering};

/// The kind of an [`Exit`]. KVM's exit reasons have the same names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitKind {
    /// An access to a port.
    Io,
    /// An access to a device's memory.
    Mmio,
    /// An access to missing memory.
    MemoryFault,
    /// The dirty ring was full.
    DirtyRingFull,
    /// A kick.
    Interrupted,
    /// A triple fault.
    Shutdown,
    /// The guest has switched its machine off, or requested a reset.
    SystemEvent,
}

impl ExitKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Io,
        Self::Mmio,
        Self::MemoryFault,
        Self::DirtyRingFull,
        Self::Interrupted,
        Self::Shutdown,
        Self::SystemEvent,
    ];

    /// Its name in metrics and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Mmio => "mmio",
            Self::MemoryFault => "memory_fault",
            Self::DirtyRingFull => "dirty_ring_full",
            Self::Interrupted => "interrupted",
            Self::Shutdown => "shutdown",
            Self::SystemEvent => "system_event",
        }
    }

    const fn of(exit: &Exit) -> Self {
        match exit {
            Exit::IoOut { .. } | Exit::IoIn { .. } => Self::Io,
            Exit::MmioRead { .. } | Exit::MmioWrite { .. } => Self::Mmio,
            Exit::MemoryFault { .. } => Self::MemoryFault,
            Exit::DirtyRingFull => Self::DirtyRingFull,
            Exit::Interrupted => Self::Interrupted,
            Exit::Shutdown(_) => Self::Shutdown,
            Exit::PoweredOff | Exit::Reset => Self::SystemEvent,
        }
    }
}

/// The exits of a vCPU by kind, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExitCounts([u64; ExitKind::ALL.len()]);

impl ExitCounts {
    /// The exits of this kind.
    pub const fn of(&self, kind: ExitKind) -> u64 {
        self.0[kind as usize]
    }

    /// All exits.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// The counters behind an [`ExitCounts`], for backends: one value for each vCPU. The vCPU's thread
/// writes them, so they have cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ExitCounters([AtomicU64; ExitKind::ALL.len()]);

impl ExitCounters {
    /// Counts an exit. Only the thread that runs the vCPU calls this.
    pub fn count(&self, exit: &Exit) {
        let counter = &self.0[ExitKind::of(exit) as usize];
        // A load and a store suffice, because there is one writer.
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The counts so far, on any thread.
    pub fn read(&self) -> ExitCounts {
        ExitCounts(self.0.each_ref().map(|count| count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FaultToken, MemoryFaultFlags, Width};
    use lacuna_addr::Gpa;

    #[test]
    fn each_exit_is_counted_by_its_kind() {
        let (gpa, width, port) = (Gpa::truncate(0x1000), Width::Long, 0x3f8);
        let (value, size, flags) = (1, 4096, MemoryFaultFlags::READ);
        let token = FaultToken::new(0, 1);
        let exits = [
            (Exit::IoOut { port, width, value }, "io"),
            (Exit::IoIn { port, width }, "io"),
            (Exit::MmioRead { gpa, width }, "mmio"),
            (
                Exit::MmioWrite {
                    gpa,
                    width,
                    value: 1,
                },
                "mmio",
            ),
            (
                Exit::MemoryFault {
                    gpa,
                    size,
                    flags,
                    token,
                },
                "memory_fault",
            ),
            (Exit::DirtyRingFull, "dirty_ring_full"),
            (Exit::Interrupted, "interrupted"),
            (Exit::Shutdown("a fault".into()), "shutdown"),
            (Exit::PoweredOff, "system_event"),
            (Exit::Reset, "system_event"),
        ];
        let counters = ExitCounters::default();
        for (exit, name) in &exits {
            let of_name = ExitKind::ALL.into_iter().find(|kind| kind.name() == *name);
            let kind = of_name.expect("each name is a kind's");
            let before = counters.read();
            counters.count(exit);
            let counted = counters.read();
            assert_eq!(counted.of(kind), before.of(kind) + 1, "{exit:?}");
            assert_eq!(counted.total(), before.total() + 1, "{exit:?}");
        }
    }
}
