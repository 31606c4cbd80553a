//! The kvm backend.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_addr::PageCount;
use lacuna_kvm::{
    HugePages, KvmError, LatencySetting, MemoryKind, Swap, Tracker, Vm, VmBuilder, available,
};
use lacuna_machine::{Arch, Backup, Builder as _, Delivery, RingSize};

use crate::backend::{Backend, Built, Lacks, Request, Tracking};

/// VMs on `/dev/kvm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kvm {
    /// Where their pages are 2 MiB.
    pub huge: HugePages,
}

/// A ring of 4,096 entries. If KVM emulates the guest's kernel, the ring overflows.
const SMALL_RING: usize = 4096 * RingSize::ENTRY_BYTES;

/// The kvm backend's names for `tracking`.
fn mode(tracking: Tracking) -> Result<(Delivery, Tracker), Lacks> {
    let ring = |bytes| {
        let size = RingSize::from_bytes(bytes).expect("a size of a ring");
        let backup = Backup::Bitmap;
        Ok((Delivery::Ring { size, backup }, Tracker::Kvm))
    };
    match tracking {
        Tracking::Bitmap => Ok((Delivery::Bitmap, Tracker::Kvm)),
        // If KVM emulates the guest's kernel, each of its stores makes an entry.
        Tracking::Ring => ring(RingSize::BYTES_MAX),
        Tracking::SmallRing => ring(SMALL_RING),
        Tracking::PageMap => Ok((Delivery::Bitmap, Tracker::Pagemap)),
        Tracking::WriteProtectBitmap
        | Tracking::PmlBitmap
        | Tracking::WriteProtectRing
        | Tracking::PmlRing => {
            let why = "kvm: how writes are detected is the host kernel's choice";
            Err(Lacks::because(why))
        }
    }
}

impl Backend for Kvm {
    type Vm = Vm;

    fn arch(&self) -> Arch {
        Arch::X86_64
    }

    fn turn(&self) -> Option<MutexGuard<'static, ()>> {
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test leaves no state behind.
        Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn build(&self, request: &Request) -> Result<Built<Self>, Lacks> {
        available().map_err(Lacks::because)?;
        let (delivery, tracker) = mode(request.tracking)?;
        let builder = VmBuilder {
            memory: PageCount::from_bytes(request.memory << 20),
            resident: PageCount::from_bytes(request.resident << 20),
            memory_kind: MemoryKind::Budget,
            backing: request.backing.clone(),
            huge: self.huge,
            vcpus: request.vcpus,
            swap: Swap::File(std::env::temp_dir()),
            latency: LatencySetting::default(),
            apf: request.apf,
            delivery,
            tracker,
            cpu: request.cpu,
            source: request
                .origin
                .as_ref()
                .map(|origin| Arc::clone(&origin.source)),
            command_line: request.command_line.clone(),
        };
        builder.latency.set(request.latency);
        let vm = match builder.build() {
            Ok(vm) => vm,
            Err(
                why @ (KvmError::NoApf
                | KvmError::NoFeature(_)
                | KvmError::NoRing
                | KvmError::Ring { .. }
                | KvmError::Userfaultfd { .. }),
            ) => return Err(Lacks::because(why)),
            Err(wrong) => panic!("{wrong}"),
        };
        Ok(Built {
            vm,
            command_line: builder.full_command_line(),
            beside: Box::new(()),
        })
    }

    fn has_string_ports(&self) -> Result<(), Lacks> {
        Ok(())
    }
}
