use super::*;
use crate::builder::VmBuilder;
use lacuna_addr::{Gfn, PageCount};
use lacuna_machine::{MemorySlots as _, PageSource, SlotFlags, Vcpu as _};
use lacuna_source::Zeros;

/// Untouched pages of the guest's memory.
const FIRST: u32 = 5;
const SECOND: u32 = 7;

/// A VM whose only vCPU exits for missing pages. `None` if this host cannot run the backend; the
/// skip is recorded then.
fn vm() -> Option<(Arc<Vm>, Vcpu)> {
    if let Err(why) = crate::available() {
        lacuna_skip::skip(why);
        return None;
    }
    let memory = PageCount::from_bytes(16 << 20);
    let builder = VmBuilder {
        source: Some(Arc::new(Zeros) as Arc<dyn PageSource>),
        ..VmBuilder::new(memory, memory)
    };
    let vm = lacuna_machine::Builder::build(&builder).expect("a VM with a source");
    for slot in vm.memory_slots() {
        let exits = SlotFlags::EXIT_ON_MISSING;
        vm.set_slot_flags(slot.id, exits)
            .expect("a slot of this VM");
    }
    let mut vcpus = lacuna_machine::Vm::bare_vcpus(&vm).expect("its first vCPUs");
    let vcpu = vcpus.remove(0);
    Some((vm, vcpu))
}

/// Acts as a reader of faults when a worker of KVM waits for `page`.
fn worker_waits_for(vm: &Vm, page: u32) {
    let provider = vm.provider().expect("the VM has a source");
    assert!(provider.hold(page));
    vm.kicks.report_for_any(MissingPage {
        page,
        access: Access::Write,
        comes: Comes::FromVmm,
        search: None,
    });
}

/// The vCPU's next exit for a missing page. The guest executes nothing.
fn next_exit(vm: &Vm, vcpu: &mut Vcpu) -> Option<(Gpa, FaultToken)> {
    // The run takes this request if no page is missing.
    vm.kicks.request(0);
    match vcpu.run().expect("it runs") {
        Exit::MemoryFault { gpa, token, .. } => Some((gpa, token)),
        Exit::Interrupted => None,
        other => panic!("{other:?}"),
    }
}

/// Two workers of KVM wait, each for its own page. The second page is noted while the VMM has the
/// exit for the first. The VMM may report the first ready without the page, and runs the vCPU.
/// Neither page is forgotten: KVM does not report them again.
#[lacuna_skip::test]
fn a_page_noted_meanwhile_replaces_no_exit() {
    for says_ready in [false, true] {
        let Some((vm, mut vcpu)) = vm() else {
            return;
        };
        worker_waits_for(&vm, FIRST);
        let (first, token) = next_exit(&vm, &mut vcpu).expect("a page is missing");
        worker_waits_for(&vm, SECOND);
        if says_ready {
            assert_eq!(vm.ready(token), Ok(ReadyOutcome::Early));
            assert_eq!(vcpu.accept(token), Err(TokenError::Ready));
        }
        let mut exits = Vec::new();
        while let Some((gpa, _)) = next_exit(&vm, &mut vcpu) {
            let provided = vm.provide(gpa, &[0; PAGE_SIZE]).expect("memory of this VM");
            assert_eq!(provided.taken, 1, "{gpa} exits after it was provided");
            exits.push(gpa);
        }
        exits.sort_unstable();
        let all = [FIRST, SECOND].map(|page| Gfn::new(page.into()).expect("a page").gpa());
        assert_eq!((first, &*exits), (all[0], &all[..]));
    }
}
