//! Guests get events for missing pages while the pages are on their way.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::x86::AsyncFaults;
use lacuna_machine::{
    Apf, Ending, Exit, FaultToken, MemoryFaultFlags, PageSource, PlatformDevices, ReadyOutcome,
    SaveRestore as _, TokenError, Vcpu as _, VcpuState, Vm as _, arm64, dispatch,
};

use super::Outcome;
use super::async_faults::contracts;
use super::missing::{Words, request, source_page};
use crate::backend::{Backend, Lacks, Made, Missing, Origin, Request, Unit};
use crate::program::ram;
use crate::running::{guest, run, status, within};

/// No vCPU exits: the source gets the request, and the guest gets page-not-present meanwhile. Pages
/// are evicted too, and read back late, so this body needs a backend that evicts.
pub fn nothing_is_lost_with_a_source_and_async_faults<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let source = Words::late(Duration::from_micros(300));
        let request = Request {
            apf: Apf::On,
            latency: Duration::from_millis(1),
            origin: Some(Origin {
                source: Arc::clone(&source) as Arc<dyn PageSource>,
                missing: Missing::Waits,
            }),
            ..Request::new(16, 4, 2, "rounds=1 threads=6")
        };
        let finished = run(&backend, &request, &guest(backend.arch(), "verify"))?.passed();
        let evicted = finished.vm.stats().pages_out;
        assert!(evicted > 1000, "{evicted} pages");
        let reported = finished.status.expect("it announces its status page").apf;
        assert!(reported.not_present > 1000, "{reported:?}");
        assert_eq!(
            (reported.not_present, reported.lost),
            (reported.ready, 0),
            "{reported:?}"
        );
        Ok(())
    })
}

/// The guest's configuration of async page faults, without the events since.
#[derive(PartialEq, Eq, Debug)]
enum Contract {
    X86(AsyncFaults),
    Arm64(arm64::Offered, (arm64::Form, u64), u64),
}

/// The contract of a guest that has enabled async page faults.
fn agreed(state: &VcpuState) -> Contract {
    match state {
        VcpuState::X86(state) => {
            assert_ne!(state.apf.enable, 0, "the guest has enabled them");
            Contract::X86(state.apf)
        }
        VcpuState::Arm64(state) => {
            let arm64::AsyncFaults {
                offered,
                enabled,
                range,
                ..
            } = state.apf;
            let enabled = enabled.expect("the guest has enabled them");
            Contract::Arm64(offered, enabled, range)
        }
        other => panic!("{other:?}"),
    }
}

/// The token that the guest is about to see.
fn about_to_see(state: &VcpuState) -> u64 {
    match state {
        VcpuState::X86(state) => {
            let exception = state.events.exception.expect("a page fault");
            exception.cr2.expect("a page fault has an address")
        }
        VcpuState::Arm64(state) => match (state.abort, state.apf.untaken) {
            (Some(abort), None) => abort.address,
            (None, Some(token)) => token.into(),
            both => panic!("{both:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// With such short time slices, the guest often preempts a process between its access to a missing
/// page and the exit. Then several pages are missing at once.
const SHORT_SLICES: &str = "tick_us=300 slice_us=300";

/// A VM of one vCPU, about to run `bm` with six processes that need pages of `source`. The vCPU
/// exits for them, and the guest can take events.
fn bm<B: Backend>(backend: &B, source: &Arc<Words>, contract: &str) -> Result<Made<B>, Lacks> {
    let request = Request {
        apf: Apf::On,
        command_line: format!("faulters=6 workers=1 accesses=300 {SHORT_SLICES} {contract}"),
        ..request(source, Missing::Exits)
    };
    backend.make(&request, &guest(backend.arch(), "bm"))
}

/// The guest has ended without an error.
fn check_end(devices: &PlatformDevices) {
    let ending = devices.ending();
    assert!(matches!(ending, Some(Ending::Exited(0))), "{ending:?}");
}

/// After a restore a vCPU has nothing in flight: accepted tokens are cancelled, and a wake-all
/// makes the guest try all its accesses again. Until the end the VMM says ready for no token, and
/// the guest takes events for more pages than a vCPU may have in flight.
pub fn a_restored_vcpu_forgets_accepted_tokens<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let mut contracts = contracts(backend.arch()).iter();
        contracts.try_for_each(|contract| forgets_tokens(&backend, contract))
    })
}

fn forgets_tokens<B: Backend>(backend: &B, contract: &str) -> Outcome {
    let source = Words::late(Duration::ZERO);
    let Made { vm, mut vcpus, .. } = bm(backend, &source, contract)?;
    let vcpu = &mut vcpus[0];
    let memory = vm.missing_memory().expect("it has a source");
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    let mut cancelled = Vec::new();
    while devices.ending().is_none() {
        match vcpu.run() {
            Ok(Exit::MemoryFault {
                gpa, flags, token, ..
            }) => {
                let can_notify = flags.contains(MemoryFaultFlags::CAN_NOTIFY);
                if can_notify {
                    assert_eq!(vcpu.accept(token), Ok(()));
                    let state = vcpu.save().unwrap();
                    assert_ne!(about_to_see(&state), 0);
                    vcpu.restore(&state).unwrap();
                    assert_eq!(agreed(&vcpu.save().unwrap()), agreed(&state));
                }
                memory.provide(gpa, &[0; PAGE_SIZE]).unwrap();
                cancelled.extend(can_notify.then_some(token));
            }
            exit => _ = dispatch(vcpu, exit, &devices, &*vm),
        }
    }
    check_end(&devices);
    assert!(cancelled.len() > 100, "{} cancelled", cancelled.len());
    for token in cancelled {
        assert_eq!(memory.ready(token), Ok(ReadyOutcome::Cancelled));
        assert_eq!(memory.ready(token), Err(TokenError::Unknown));
    }
    Ok(())
}

/// One of two vCPUs is idle. It does not exit for the other one's pages.
pub fn the_vcpu_that_needs_a_page_exits<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            apf: Apf::On,
            vcpus: 2,
            command_line: "faulters=1 workers=0 accesses=400".into(),
            ..request(&Words::late(Duration::ZERO), Missing::Exits)
        };
        let Made { vm, vcpus, .. } = backend.make(&request, &guest(backend.arch(), "bm"))?;
        let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
        let exits = [const { AtomicUsize::new(0) }; 2];
        thread::scope(|scope| {
            for mut vcpu in vcpus {
                let (vm, devices, exits) = (&vm, &devices, &exits);
                scope.spawn(move || {
                    while devices.ending().is_none() {
                        let exit = vcpu.run();
                        if let Ok(Exit::MemoryFault { .. }) = exit {
                            exits[vcpu.index()].fetch_add(1, Ordering::Relaxed);
                        }
                        let _ = dispatch(&mut vcpu, exit, devices, &**vm);
                    }
                });
            }
        });
        check_end(&devices);
        let exits = exits.map(AtomicUsize::into_inner);
        assert!(exits[0] > 200 && exits[1] * 4 < exits[0], "{exits:?}");
        Ok(())
    })
}

/// A guest gets all of its pages, although it enables and disables async page faults all the time,
/// with tokens out.
pub fn a_guest_that_disables_with_tokens_out_goes_on<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let source = Words::late(Duration::from_micros(300)) as Arc<dyn PageSource>;
        let missing = Missing::Exits;
        let request = Request {
            apf: Apf::On,
            origin: Some(Origin { source, missing }),
            unit: Unit::Page,
            ..Request::new(16, 16, 2, "accesses=600 switches=40")
        };
        let finished = run(&backend, &request, &guest(backend.arch(), "apfstorm"))?.passed();
        let reported = finished.status.expect("it announces its status page").apf;
        assert!(
            reported.not_present > 50 && reported.lost == 0,
            "{reported:?}"
        );
        Ok(())
    })
}

/// A VM ends while its guest waits for a page. The token is cancelled with its vCPU.
pub fn a_vm_ends_with_tokens_out<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let mut contracts = contracts(backend.arch()).iter();
        contracts.try_for_each(|contract| ends_with_a_token(&backend, contract))
    })
}

fn ends_with_a_token<B: Backend>(backend: &B, contract: &str) -> Outcome {
    let source = Words::late(Duration::ZERO);
    let Made { vm, mut vcpus, .. } = bm(backend, &source, contract)?;
    let memory = vm.missing_memory().expect("it has a source");
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    let mut accepted = None;
    // Accept only one token: when another process needs the same page, the vCPU does not exit.
    while accepted.is_none() {
        match vcpus[0].run() {
            Ok(Exit::MemoryFault { gpa, token, .. }) => match vcpus[0].accept(token) {
                Ok(()) => accepted = Some(token),
                Err(TokenError::CannotNotify) => {
                    memory.provide(gpa, &[0; PAGE_SIZE]).unwrap();
                }
                Err(other) => panic!("{other}"),
            },
            exit => _ = dispatch(&mut vcpus[0], exit, &devices, &*vm),
        }
    }
    let token = accepted.expect("the guest gets page-not-present");
    drop(vcpus);
    assert_eq!(memory.ready(token), Ok(ReadyOutcome::Cancelled));
    assert_eq!(memory.ready(token), Err(TokenError::Unknown));
    drop(vm);
    Ok(())
}

/// A VMM says ready for accepted tokens late, and for some of them before their page is present.
/// The guest's processes still get every page, and two events for each accepted token: not present
/// and ready.
pub fn a_guest_gets_its_events<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let mut contracts = contracts(backend.arch()).iter();
        contracts.try_for_each(|contract| gets_events(&backend, contract))
    })
}

fn gets_events<B: Backend>(backend: &B, contract: &str) -> Outcome {
    let source = Words::late(Duration::ZERO);
    let Made { vm, mut vcpus, .. } = bm(backend, &source, contract)?;
    let vcpu = &mut vcpus[0];
    let memory = vm.missing_memory().expect("it has a source");
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    let (accepted, early) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (sender, tokens) = channel::<(Gpa, FaultToken)>();
    thread::scope(|scope| {
        let early = &early;
        scope.spawn(move || {
            for (count, (gpa, token)) in tokens.iter().enumerate() {
                thread::sleep(Duration::from_micros(200));
                match count % 10 {
                    9 => _ = early.fetch_add(1, Ordering::Relaxed),
                    _ => _ = memory.provide(gpa, &[0; PAGE_SIZE]).unwrap(),
                }
                assert_eq!(memory.ready(token), Ok(ReadyOutcome::Notified));
                assert_eq!(memory.ready(token), Err(TokenError::Unknown));
            }
        });
        let mut known = BTreeSet::new();
        while devices.ending().is_none() {
            match vcpu.run() {
                Ok(Exit::MemoryFault {
                    gpa, flags, token, ..
                }) => {
                    assert!(known.insert(token), "{token:?} is given twice");
                    if flags.contains(MemoryFaultFlags::CAN_NOTIFY) {
                        assert_eq!(vcpu.accept(token), Ok(()));
                        accepted.fetch_add(1, Ordering::Relaxed);
                        sender.send((gpa, token)).unwrap();
                    } else {
                        memory.provide(gpa, &[0; PAGE_SIZE]).unwrap();
                    }
                }
                exit => _ = dispatch(vcpu, exit, &devices, &*vm),
            }
        }
        drop(sender);
    });
    check_end(&devices);
    let accepted = accepted.into_inner();
    assert!(
        accepted > 100 && early.into_inner() > 5,
        "{accepted} accepted"
    );
    let status = status(&*vm, &devices).expect("it announces its status page");
    let reported = status.apf;
    assert_eq!(
        (reported.not_present, reported.lost),
        (reported.ready, 0),
        "{reported:?}"
    );
    // If a vCPU has not taken an SDEI event when its page is ready, the event is cancelled.
    let cancelled = accepted as u32 - reported.not_present;
    assert!(cancelled == 0 || contract == "apf=sdei", "{reported:?}");
    Ok(())
}

/// A VMM says ready for pages that it has not provided. They still belong to the VMM: the source
/// gets no request, and the guest's next access to each exits.
pub fn a_page_that_is_ready_and_not_provided_is_the_vmms<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let mut contracts = contracts(backend.arch()).iter();
        contracts.try_for_each(|contract| is_ready_without_pages(&backend, contract))
    })
}

fn is_ready_without_pages<B: Backend>(backend: &B, contract: &str) -> Outcome {
    let source = Words::late(Duration::ZERO);
    let Made { vm, mut vcpus, .. } = bm(backend, &source, contract)?;
    let vcpu = &mut vcpus[0];
    let memory = vm.missing_memory().expect("it has a source");
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    let (mut owed, mut again) = (BTreeSet::new(), 0);
    while devices.ending().is_none() {
        match vcpu.run() {
            Ok(Exit::MemoryFault {
                gpa, flags, token, ..
            }) => {
                let is_owed = owed.remove(&gpa);
                again += usize::from(is_owed);
                if !is_owed && flags.contains(MemoryFaultFlags::CAN_NOTIFY) {
                    assert_eq!(vcpu.accept(token), Ok(()));
                    assert_eq!(memory.ready(token), Ok(ReadyOutcome::Notified));
                    owed.insert(gpa);
                } else {
                    memory.provide(gpa, &[0; PAGE_SIZE]).unwrap();
                }
                let offset = gpa.get() - ram(backend.arch(), 0);
                assert!(!source.asked().contains(&source_page(offset)), "{gpa}");
            }
            exit => _ = dispatch(vcpu, exit, &devices, &*vm),
        }
    }
    check_end(&devices);
    assert!(
        owed.is_empty() && again > 50,
        "{again} again, then {owed:?}"
    );
    Ok(())
}

/// One thread says ready while another one accepts the token. Either call may be first, and both
/// results agree on the order. No page is provided at its first exit, so in either order the vCPU
/// exits again for each.
pub fn a_ready_beside_an_accept_has_one_outcome<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let source = Words::late(Duration::ZERO);
        let Made { vm, mut vcpus, .. } = bm(&backend, &source, "")?;
        let vcpu = &mut vcpus[0];
        let memory = vm.missing_memory().expect("it has a source");
        let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
        let (sender, tokens) = channel::<FaultToken>();
        let (answers, ready) = channel();
        let (mut owed, mut raced) = (BTreeSet::new(), 0);
        thread::scope(|scope| {
            scope.spawn(move || {
                for (count, token) in tokens.iter().enumerate() {
                    (0..count % 64 * 32).for_each(|_| std::hint::spin_loop());
                    answers.send(memory.ready(token)).unwrap();
                }
            });
            while devices.ending().is_none() {
                match vcpu.run() {
                    Ok(Exit::MemoryFault {
                        gpa, flags, token, ..
                    }) => {
                        if !owed.remove(&gpa) && flags.contains(MemoryFaultFlags::CAN_NOTIFY) {
                            sender.send(token).unwrap();
                            match (vcpu.accept(token), ready.recv().unwrap()) {
                                (Ok(()), Ok(ReadyOutcome::Notified)) => {}
                                (Err(TokenError::Ready), Ok(ReadyOutcome::Early)) => {}
                                other => panic!("{other:?}"),
                            }
                            owed.insert(gpa);
                            raced += 1;
                        } else {
                            memory.provide(gpa, &[0; PAGE_SIZE]).unwrap();
                        }
                    }
                    exit => _ = dispatch(vcpu, exit, &devices, &*vm),
                }
            }
            drop(sender);
        });
        let ending = devices.ending();
        assert!(matches!(ending, Some(Ending::Exited(0))), "{ending:?}");
        assert!(owed.is_empty() && raced > 50, "{raced}, then {owed:?}");
        Ok(())
    })
}
