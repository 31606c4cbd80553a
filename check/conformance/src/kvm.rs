//! The kvm backend.

use std::collections::BTreeSet;

use lacuna_addr::{GfnRange, PageCount};
use lacuna_kvm::{
    Delivery, FirstTouch, KvmError, LatencySetting, Logging, RingSize, Vcpu, Vm, VmBuilder,
    available,
};
use lacuna_machine::Image;
use lacuna_soft::SlotId;

use crate::backend::{Backend, Lacks, Made, Request, Tracking};

/// VMs on `/dev/kvm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kvm;

/// How `tracking` is called here.
fn delivery(tracking: Tracking) -> Result<Delivery, Lacks> {
    // Where KVM emulates the guest's kernel, each store of that makes an entry.
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a size of a ring");
    match tracking {
        Tracking::Bitmap => Ok(Delivery::Bitmap),
        Tracking::Ring => Ok(Delivery::Ring(size)),
        Tracking::PageMap => Ok(Delivery::Pagemap),
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
        let builder = VmBuilder {
            memory: PageCount::from_bytes(request.memory << 20),
            resident: PageCount::from_bytes(request.resident << 20),
            vcpus: request.vcpus,
            latency: LatencySetting::default(),
            first_touch: FirstTouch::Immediate,
            apf: request.apf,
            delivery: delivery(request.tracking)?,
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
        vm.slots()
    }

    fn start_tracking(vm: &Vm) {
        for (id, _) in vm.slots() {
            vm.set_logging(id, Logging::On).expect("its own slot");
        }
    }

    fn stop_tracking(vm: &Vm) {
        for (id, _) in vm.slots() {
            vm.set_logging(id, Logging::Off).expect("its own slot");
        }
    }

    fn harvest(vm: &Vm) -> BTreeSet<(SlotId, usize)> {
        let mut dirty = BTreeSet::new();
        if matches!(vm.delivery(), Delivery::Ring(_)) {
            let note = |id, page| {
                dirty.insert((id, page));
            };
            let reaped = vm.collect_rings(note).expect("rings that are large enough");
            let reset = vm.reset_rings().expect("rings");
            assert!(reset <= reaped, "the VMM's own writes need no entry");
            return dirty;
        }
        for (id, gfns) in vm.slots() {
            let mut words = vec![0; gfns.pages().div_ceil(64) as usize];
            vm.get_dirty(id, &mut words).expect("its own slot");
            dirty.extend(crate::running::set_bits(&words).map(|page| (id, page)));
        }
        dirty
    }

    fn brought_back(vm: &Vm) -> u64 {
        vm.source_stats().fetched
    }
}
