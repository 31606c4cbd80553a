//! The kvm backend.

use std::collections::BTreeSet;

use lacuna_addr::{GfnRange, PageCount};
use lacuna_kvm::{
    Backup, CpuModel, Delivery, FirstTouch, KvmError, LatencySetting, Logging, RingSize, Tracker,
    Vcpu, Vm, VmBuilder, available,
};
use lacuna_machine::{Image, MemorySlots as _, harvest, set_logging_everywhere};
use lacuna_soft::SlotId;

use crate::backend::{Backend, Lacks, Made, Request, Tracking};

/// VMs on `/dev/kvm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kvm;

/// How `tracking` is called here.
fn mode(tracking: Tracking) -> Result<(Delivery, Tracker), Lacks> {
    // Where KVM emulates the guest's kernel, each store of that makes an entry.
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a size of a ring");
    match tracking {
        Tracking::Bitmap => Ok((Delivery::Bitmap, Tracker::Kvm)),
        Tracking::Ring => {
            let backup = Backup::Bitmap;
            Ok((Delivery::Ring { size, backup }, Tracker::Kvm))
        }
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
    type Vcpu = Vcpu;

    fn make(&self, request: &Request, image: &Image<'_>) -> Result<Made<Self>, Lacks> {
        available().map_err(Lacks::because)?;
        let (delivery, tracker) = mode(request.tracking)?;
        let builder = VmBuilder {
            memory: PageCount::from_bytes(request.memory << 20),
            resident: PageCount::from_bytes(request.resident << 20),
            vcpus: request.vcpus,
            latency: LatencySetting::default(),
            first_touch: FirstTouch::Immediate,
            apf: request.apf,
            delivery,
            tracker,
            cpu: CpuModel::default(),
            command_line: request.command_line.clone(),
        };
        builder.latency.set(request.latency);
        let vm = match builder.vm() {
            Ok(vm) => vm,
            Err(
                why @ (KvmError::NoApf
                | KvmError::NoRing
                | KvmError::Ring { .. }
                | KvmError::Userfaultfd { .. }),
            ) => return Err(Lacks::because(why)),
            Err(wrong) => panic!("{wrong}"),
        };
        let vcpus = vm
            .boot(image, &builder.full_command_line())
            .expect("room for the image");
        Ok(Made {
            vm,
            vcpus,
            beside: Box::new(()),
        })
    }

    fn has_string_ports(&self) -> Result<(), Lacks> {
        Ok(())
    }

    fn slots(vm: &Vm) -> Vec<(SlotId, GfnRange)> {
        let slots = vm.memory_slots().into_iter();
        slots.map(|slot| (slot.id, slot.gfns)).collect()
    }

    fn start_tracking(vm: &Vm) {
        set_logging_everywhere(vm, Logging::LAZY).expect("its own slots");
    }

    fn stop_tracking(vm: &Vm) {
        set_logging_everywhere(vm, Logging::Off).expect("its own slots");
    }

    fn harvest(vm: &Vm) -> BTreeSet<(SlotId, usize)> {
        let mut dirty = BTreeSet::new();
        let note = |id, page| {
            dirty.insert((id, page));
        };
        harvest(vm, note).expect("rings that are large enough");
        dirty
    }

    fn brought_back(vm: &Vm) -> u64 {
        vm.source_stats().fetched
    }
}
