use super::*;
use crate::options::{Recorder, options_of};
use lacuna::VcpuError;
use lacuna::missing::{FaultToken, TokenError};
use lacuna::{DirtyTracking as _, MissingMemory};
use rustix::thread::sched_getaffinity;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// A ring has its entries in the order of the writes.
#[test]
fn the_order_is_random_or_by_address() {
    let options: GuestOptions = options_of("--bytes 400K");
    let builder = soft::VmBuilder {
        delivery: Recorder::Ring.delivery(lacuna::dirty::Backup::None),
        detection: lacuna::dirty::Detection::WriteProtect,
        ..options.soft()
    };
    let mut sweeps = Sweeps::new(&builder, &options, Variant::default()).unwrap();
    sweeps.sweep(Sweep::POPULATE).unwrap();
    let slot = lacuna::memory::SlotId(0);
    sweeps
        .vm
        .set_logging(slot, lacuna::dirty::Logging::LAZY)
        .unwrap();
    for random in [false, true] {
        let sweep = Sweep {
            random,
            ..Sweep::POPULATE
        };
        sweeps.sweep(sweep).unwrap();
        let (rings, mut order) = (sweeps.vm.dirty_rings().unwrap(), Vec::new());
        // Walks write to page tables, in front of the accessed pages.
        let first = sweeps.area.start().get() as usize;
        let mut each = |_, page| order.extend(Some(page).filter(|page| *page >= first));
        rings.reap_rings(&mut each).unwrap();
        rings.reset_rings().unwrap();
        assert_eq!(order.is_sorted(), !random, "{order:?}");
        assert_eq!(order.into_iter().collect::<BTreeSet<_>>().len(), 100);
    }
}

/// Notes the cores of its thread, and ends its sweep at once.
struct Noting<'a>(usize, &'a Mutex<Vec<(usize, Vec<usize>)>>);

impl Vcpu for Noting<'_> {
    fn index(&self) -> usize {
        self.0
    }
    fn run(&mut self) -> Result<Exit, VcpuError> {
        let cores = sched_getaffinity(None).unwrap();
        let cores = (0..1024).filter(|&core| cores.is_set(core));
        self.1.lock().unwrap().push((self.0, cores.collect()));
        let width = lacuna::device::Width::Long;
        Ok(Exit::IoOut {
            port: 0,
            width,
            value: 0,
        })
    }
    fn complete_read(&mut self, _: u64) {}
    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        None
    }
    fn accept(&mut self, _: FaultToken) -> Result<(), TokenError> {
        unreachable!("no page is missing")
    }
}

#[test]
fn the_threads_of_vcpus_have_their_cores() {
    let noted = Mutex::default();
    // Not `available_parallelism`, which a quota of a control group lowers.
    let all = sched_getaffinity(None).unwrap().count() as usize;
    let mut vcpus: Vec<_> = [Some(Cores::allowed_at([all - 1])), None]
        .into_iter()
        .enumerate()
        .map(|(index, cores)| Sweeper::new(Noting(index, &noted), cores))
        .collect();
    run_all(&mut vcpus.iter_mut().collect::<Vec<_>>(), [0, 0]).unwrap();
    run_all(&mut [&mut vcpus[0]], [0, 0]).unwrap();
    let mut noted = noted.into_inner().unwrap();
    noted.sort();
    let counts: Vec<_> = noted
        .iter()
        .map(|(vcpu, cores)| (*vcpu, cores.len()))
        .collect();
    assert_eq!(counts, [(0, 1), (0, 1), (1, all)]);
    let pin = options_of::<GuestOptions>("--pin 0,2").pin;
    assert_eq!(pin, "0,2".parse().ok());
}
