//! A second process writes guest memory, and the VMM reports the pages. Here, the writes go to the
//! file and not through a mapping of this process, as another process's do.

use crate::run::{ENDLESS, SIZE, image};
use lacuna::device::Access;
use lacuna::dirty::DirtyError;
use lacuna::memory::{LinuxBacking, SharedFill, SharedMemory};
use lacuna::migrate::{Budget, Snapshot, save};
use lacuna::{
    Builder, Device, Ending, Gpa, GuestMemory as _, LogReader, Machine, PAGE_SIZE, PlatformDevices,
    Vm, kvm, soft,
};
use lacuna_skip::test;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// What the second process writes: a page that no vCPU writes.
const CONTENT: &[u8] = b"from the second process";

/// A device of a second process, as a vhost-user device. It writes pages until it is paused.
struct SecondProcess<V> {
    vm: Arc<V>,
    file: File,
}

impl<V: Vm> SecondProcess<V> {
    fn write(&self, page: u64) {
        let at = page * PAGE_SIZE as u64;
        self.file.write_all_at(CONTENT, at).expect("memory");
    }

    fn report(&self, page: usize) -> Result<(), DirtyError> {
        let slot = &self.vm.memory_slots()[0];
        let mut words = vec![0; SIZE.get() as usize / 64];
        words[page / 64] = 1 << (page % 64);
        self.vm.put_back_dirty(slot.id, &words)
    }
}

impl<V: Vm> Device for SecondProcess<V> {
    fn read(&self, _: Access) -> u64 {
        0
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }

    fn pause(&self) {
        self.write(900);
        match self.report(900) {
            // No copy is made, so none lacks the page: a restore pauses the device too.
            Ok(()) | Err(DirtyError::NotLogging(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn devices(outside: Arc<dyn Device>) -> PlatformDevices {
    let devices = PlatformDevices::new(|_: &str| ());
    let added = devices.add_mmio("outside", Gpa::truncate(0xd000_0000), 4, outside);
    added.expect("there is room");
    devices
}

fn go_on<T>(_: T) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn reports_writes<B: Builder>(backing: impl Fn(SharedMemory) -> B) {
    let memory = SharedMemory::new(SIZE, SharedFill::CopiedIn).expect("memory");
    let file = memory.file().try_clone_to_owned().expect("a descriptor");
    let vm = backing(memory).build().expect("a VM");
    let outside = Arc::new(SecondProcess {
        vm: Arc::clone(&vm),
        file: file.into(),
    });
    let machine = Machine::new(Arc::clone(&vm), devices(outside.clone())).expect("a machine");
    let vcpus = vm.boot(&image(ENDLESS), "").expect("it boots");
    let guest = machine.start(vcpus);

    let mut log = LogReader::begin(&*vm).expect("a log");
    let mut has = |page| {
        let mut found = false;
        let harvested = log.harvest(|_, index| found |= index == page);
        harvested.expect("a harvest");
        found
    };
    let _ = has(800);
    outside.write(800);
    assert!(!has(800), "no log has the writes of another process");
    outside.report(800).expect("it logs");
    assert!(has(800));
    drop(log);
    let refused = outside.report(800);
    assert!(matches!(refused, Err(DirtyError::NotLogging(_))));

    let name = format!("shared-{:?}", <B::Vm as Vm>::BACKEND);
    let folder = &Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(folder);
    let budget = Budget::default();
    save(&guest, folder, &budget, &mut |_| ControlFlow::Continue(())).expect("a snapshot");
    drop(guest);
    let snapshot = Snapshot::open(folder).expect("a snapshot");
    let memory = SharedMemory::new(SIZE, SharedFill::CopiedIn).expect("memory");
    let vm = backing(memory).build().expect("a VM");
    let restored = snapshot.restore(&vm, &devices(outside), &mut go_on);
    drop(restored.expect("a restore"));
    for page in [800, 900] {
        let mut content = [0; CONTENT.len()];
        let at = Gpa::truncate(page * PAGE_SIZE as u64);
        vm.read(at, &mut content).expect("memory");
        assert_eq!(content, CONTENT, "{page}");
    }
    std::fs::remove_dir_all(folder).expect("a folder");
}

#[test]
fn the_vmm_reports_the_writes_of_another_process_on_soft() {
    reports_writes(|memory| soft::VmBuilder {
        backing: Some(LinuxBacking::Shared(memory)),
        ..soft::VmBuilder::new(SIZE, SIZE)
    });
}

#[test]
fn the_vmm_reports_the_writes_of_another_process_on_kvm() {
    if let Err(reason) = kvm::available() {
        lacuna_skip::skip_test(reason);
    }
    reports_writes(|memory| kvm::VmBuilder {
        backing: Some(LinuxBacking::Shared(memory)),
        ..kvm::VmBuilder::new(SIZE, SIZE)
    });
}
