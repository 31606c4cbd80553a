use super::*;
use crate::VmBuilder;
use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::{Apf, Builder as _, DirtyTracking as _, GuestMemory as _, TwoStepLog as _};

/// KVM refuses to clear a log that it does not have. The next harvest reports the VMM's writes.
#[lacuna_skip::test]
fn a_clear_that_kvm_refuses_keeps_the_writes_of_the_vmm() {
    if let Err(why) = crate::available() {
        lacuna_skip::skip_test(why);
    }
    let size = PageCount::from_bytes(16 << 20);
    let mut builder = VmBuilder::new(size, size);
    builder.apf = Apf::Off;
    let vm = builder.build().unwrap();
    let (id, mut words) = (SlotId(0), vec![0; 64]);
    vm.set_logging(id, Logging::LAZY).unwrap();
    for page in [1, 70] {
        let at = Gpa::truncate(page * PAGE_SIZE as u64);
        vm.write(at, &[1]).unwrap();
    }
    let slot = vm.slots.get(id).unwrap();
    set_logging_flag(&vm.fd, &slot, Logging::Off).unwrap();
    let refused = |result| {
        assert!(
            matches!(result, Err(DirtyError::Kernel { .. })),
            "{result:?}"
        )
    };
    refused(vm.clear_dirty(id, 0, 64, &mut [1 << 1]));
    refused(vm.clear_dirty(id, 64, 64, &mut [1 << 6]));
    refused(vm.get_dirty(id, &mut words));
    set_logging_flag(&vm.fd, &slot, Logging::LAZY).unwrap();
    vm.log().clear_set_log(&slot).unwrap();
    vm.get_dirty(id, &mut words).unwrap();
    assert_eq!((words[0], words[1]), (1 << 1, 1 << 6));
}
