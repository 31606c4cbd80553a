//! Missing pages while something else happens: other vCPUs, changes of the slot's flag, kicks, and
//! the end of the VM.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_machine::{
    Answer, Apf, Exit, FailureKind, GuestMemory as _, Kick as _, MemoryError, PageRequest,
    PageSource, Provided, SaveRestore as _, SlotFlags, TokenError, Vcpu as _, VcpuError, Vm as _,
};

use super::Outcome;
use super::missing::{
    READ, WRITTEN, Words, fault, made, page_of, places, program, request, source_page, value, word,
};
use crate::backend::{
    Backend, Lacks, Made, Missing, Origin, Request, Unit, VcpuOf, exit_on_missing,
};
use crate::program::{Interrupts, Reg, assemble, async_faults_at, image, ram};
use crate::running::within;

/// A source that answers at once until it is silenced. From then on it only keeps its requests.
struct Silent {
    is_silent: AtomicBool,
    kept: Mutex<Sender<PageRequest>>,
}

impl Silent {
    fn new() -> (Arc<Self>, Receiver<PageRequest>) {
        let (sender, requests) = channel();
        let source = Self {
            is_silent: AtomicBool::new(false),
            kept: Mutex::new(sender),
        };
        (Arc::new(source), requests)
    }

    fn silence(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }
}

impl PageSource for Silent {
    fn describe(&self) -> String {
        "silent".into()
    }

    fn fetch(&self, request: PageRequest) {
        if self.is_silent.load(Ordering::SeqCst) {
            // An error: the body has ended, and needs no page.
            let _ = self.kept.lock().unwrap().send(request);
        } else {
            let _ = request.provide(&page_of(word(request.page())));
        }
    }
}

fn silent_request(source: &Arc<Silent>, missing: Missing) -> Request {
    let source = Arc::clone(source) as Arc<dyn PageSource>;
    Request {
        origin: Some(Origin { source, missing }),
        unit: Unit::Page,
        ..Request::new(16, 16, 1, "")
    }
}

/// A VM whose one vCPU is about to run [`program`], and the requests to its source, which is silent
/// from here on.
fn silenced<B: Backend>(
    backend: &B,
    interrupts: Interrupts,
) -> Result<(Receiver<PageRequest>, Made<B>), Lacks> {
    let (source, requests) = Silent::new();
    let code = program(backend.arch(), interrupts);
    let request = silent_request(&source, Missing::Waits);
    let made = backend.make(&request, &image(&code))?;
    source.silence();
    Ok((requests, made))
}

/// Exits for the page at `READ`. The guest cannot take its event, so the next run waits.
fn wait_for_read<B: Backend>(read: Gpa, vcpu: &mut VcpuOf<B>) {
    let (gpa, _, token) = fault::<B>(vcpu);
    assert_eq!(gpa, read);
    assert_eq!(vcpu.accept(token), Err(TokenError::CannotNotify));
}

/// Each of two vCPUs exits for the page that both need, and one fill ends the waits of both.
pub fn two_vcpus_need_one_page<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let source = Words::at_once();
        let code = program(backend.arch(), Interrupts::Off);
        let two = Request {
            vcpus: 2,
            ..request(&source, Missing::Exits)
        };
        let Made { vm, mut vcpus, .. } = backend.make(&two, &image(&code))?;
        let memory = vm.missing_memory().expect("it has a source");
        let before = source.asked();
        let wait = |vcpu| wait_for_read::<B>(at(READ), vcpu);
        vcpus.iter_mut().for_each(wait);
        let provide = |gpa| memory.provide(at(gpa), &page_of(6)).unwrap();
        let new = Provided { taken: 1, late: 0 };
        let late = Provided { taken: 0, late: 1 };
        thread::scope(|scope| {
            let needs = |vcpu| scope.spawn(move || fault::<B>(vcpu).0);
            let threads: Vec<_> = vcpus.iter_mut().map(needs).collect();
            thread::sleep(Duration::from_millis(20));
            assert_eq!(provide(READ), new);
            for thread in threads {
                assert_eq!(thread.join().unwrap(), at(WRITTEN));
            }
        });
        assert_eq!(provide(WRITTEN), new);
        assert_eq!(provide(WRITTEN), late);
        for vcpu in &mut vcpus {
            assert_eq!(value::<B>(vcpu), 6);
        }
        assert_eq!(source.asked(), before, "the VMM has provided all");
        Ok(())
    })
}

/// When the flag is cleared, a vCPU that waits for its VMM requests the page from the source.
pub fn the_flag_is_cleared_while_a_vcpu_waits<B: Backend>(backend: &B) -> Outcome {
    for interrupts in [Interrupts::Off, Interrupts::On] {
        let backend = backend.clone();
        within(move || {
            let at = places(&backend);
            let (source, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, interrupts)?;
            let before = source.asked();
            let vcpu = &mut vcpus[0];
            wait_for_read::<B>(at(READ), vcpu);
            let read = source_page(READ);
            thread::scope(|scope| {
                let runs = scope.spawn(|| value::<B>(vcpu));
                thread::sleep(Duration::from_millis(20));
                exit_on_missing(&*vm, SlotFlags::empty());
                // A vCPU that sleeps on the page itself looks at the flag when it is entered again.
                vm.kick(0);
                assert_eq!(runs.join().unwrap(), word(read) as u32);
            });
            let after: Vec<_> = source.asked().difference(&before).copied().collect();
            assert_eq!(after, [read, source_page(WRITTEN)]);
            Ok(())
        })?;
    }
    Ok(())
}

/// The flag is set while a vCPU waits for the source: the vCPU continues with the source's answer,
/// and exits for the next page.
pub fn the_flag_is_set_while_a_vcpu_waits<B: Backend>(backend: &B) -> Outcome {
    for interrupts in [Interrupts::Off, Interrupts::On] {
        let backend = backend.clone();
        within(move || {
            let at = places(&backend);
            let (requests, Made { vm, mut vcpus, .. }) = silenced(&backend, interrupts)?;
            let vcpu = &mut vcpus[0];
            thread::scope(|scope| {
                let runs = scope.spawn(|| fault::<B>(vcpu).0);
                let asked = requests.recv().unwrap();
                assert_eq!(asked.page(), source_page(READ));
                exit_on_missing(&*vm, SlotFlags::EXIT_ON_MISSING);
                assert_eq!(asked.provide(&page_of(8)), Answer::Taken);
                assert_eq!(runs.join().unwrap(), at(WRITTEN));
            });
            let memory = vm.missing_memory().expect("it has a source");
            memory.provide(at(WRITTEN), &page_of(1)).unwrap();
            assert_eq!(value::<B>(vcpu), 8);
            Ok(())
        })?;
    }
    Ok(())
}

/// A kick ends the run of a vCPU whose source never answers, and the VM can be dropped. An answer
/// after that is late.
pub fn a_silent_source_delays_no_end<B: Backend>(backend: &B) -> Outcome {
    for interrupts in [Interrupts::Off, Interrupts::On] {
        let backend = backend.clone();
        within(move || {
            let (requests, made) = silenced(&backend, interrupts)?;
            let Made {
                vm,
                mut vcpus,
                beside,
            } = made;
            let asked = thread::scope(|scope| {
                let runs = scope.spawn(|| vcpus[0].run());
                let asked = requests.recv().unwrap();
                vm.kick(0);
                assert_eq!(runs.join().unwrap(), Ok(Exit::Interrupted));
                asked
            });
            drop((vcpus, vm, beside));
            assert_eq!(asked.provide(&page_of(1)), Answer::Late);
            Ok(())
        })?;
    }
    Ok(())
}

/// A page lost by the source ends the vCPUs' runs. No vCPU reads other content.
pub fn a_lost_page_is_reported<B: Backend>(backend: &B) -> Outcome {
    for interrupts in [Interrupts::Off, Interrupts::On] {
        let backend = backend.clone();
        within(move || {
            let at = places(&backend);
            let (requests, Made { vm, mut vcpus, .. }) = silenced(&backend, interrupts)?;
            let run = thread::scope(|scope| {
                let runs = scope.spawn(|| vcpus[0].run());
                let asked = requests.recv().unwrap();
                // A loss does not become a panic through its text.
                let words = "the peer is gone: the page source has panicked, and the panic's own \
                             message says where";
                assert_eq!(asked.fail(words), Answer::Taken);
                assert_eq!(asked.provide(&page_of(1)), Answer::Late);
                runs.join().unwrap()
            });
            let lost = |run: Result<Exit, VcpuError>| match run {
                Err(VcpuError::PageLost { gpa, cause, .. }) => {
                    assert_eq!(gpa, at(READ));
                    assert!(cause.contains("the peer is gone"), "{cause}");
                }
                other => panic!("{other:?}"),
            };
            lost(run);
            lost(vcpus[0].run());
            let read = vm.read(at(READ), &mut [0; 8]);
            assert!(matches!(read, Err(MemoryError::Backing { .. })), "{read:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// Panics at a request for [`READ`].
struct Panics;

impl PageSource for Panics {
    fn describe(&self) -> String {
        "panics".into()
    }

    fn fetch(&self, request: PageRequest) {
        assert_ne!(request.page(), source_page(READ), "the test's own panic");
        let _ = request.provide(&[0; PAGE_SIZE]);
    }
}

/// A panic of the source is an error of the VMM. It ends the run as such, and no page counts as
/// lost.
pub fn a_panic_of_the_source_ends_the_run<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let code = program(backend.arch(), Interrupts::Off);
        let source: Arc<dyn PageSource> = Arc::new(Panics);
        let missing = Missing::Waits;
        let request = Request {
            origin: Some(Origin { source, missing }),
            unit: Unit::Page,
            ..Request::new(16, 16, 1, "")
        };
        let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
        for _ in 0..2 {
            match vcpus[0].run() {
                Err(VcpuError::SourcePanicked { gpa, cause, .. }) => {
                    assert_eq!(gpa, at(READ));
                    assert!(cause.contains("panics"), "the source's name: {cause}");
                }
                other => panic!("{other:?}"),
            }
        }
        let read = vm.read(at(READ), &mut [0; 8]);
        let Err(MemoryError::Backing { kind, .. }) = read else {
            panic!("{read:?}");
        };
        assert_eq!(kind, FailureKind::Panicked);
        Ok(())
    })
}

/// An exit belongs to the state in which the vCPU made it.
pub fn a_restored_vcpu_has_no_exit<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (_, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, Interrupts::Off)?;
        let memory = vm.missing_memory().expect("it has a source");
        let vcpu = &mut vcpus[0];
        let (_, _, token) = fault::<B>(vcpu);
        let state = vcpu.save().unwrap();
        vcpu.restore(&state).unwrap();
        assert_eq!(vcpu.accept(token), Err(TokenError::Unknown));
        assert_eq!(memory.ready(token), Err(TokenError::Unknown));
        wait_for_read::<B>(at(READ), vcpu);
        vcpu.restore(&state).unwrap();
        let (gpa, _, later) = fault::<B>(vcpu);
        assert_eq!(gpa, at(READ), "it waits no longer");
        assert_ne!(token, later);
        memory.provide(gpa, &page_of(3)).unwrap();
        assert_eq!(fault::<B>(vcpu).0, at(WRITTEN));
        Ok(())
    })
}

/// A guest enables async page faults in a page that its source does not provide. A kick ends the
/// vCPU's run. When the page has arrived, the vCPU completes the instruction.
pub fn a_kick_ends_the_wait_for_the_area_of_async_faults<B: Backend>(backend: &B) -> Outcome {
    const TOLD: u64 = 77;
    for missing in [Missing::Waits, Missing::Exits] {
        let backend = backend.clone();
        within(move || {
            let (source, requests) = Silent::new();
            let arch = backend.arch();
            let code = assemble(arch, |a| {
                a.enable_async_faults(async_faults_at(arch, ram(arch, READ)));
                a.set(Reg::A, TOLD);
                a.report(Reg::A);
                a.halt();
            });
            let request = Request {
                apf: Apf::On,
                ..silent_request(&source, missing)
            };
            let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
            source.silence();
            let vcpu = &mut vcpus[0];
            thread::scope(|scope| {
                let runs = scope.spawn(|| vcpu.run());
                let asked = requests.recv().unwrap();
                assert_eq!(asked.page(), source_page(READ));
                vm.kick(0);
                assert_eq!(runs.join().unwrap(), Ok(Exit::Interrupted));
                assert_eq!(asked.provide(&[0; PAGE_SIZE]), Answer::Taken);
            });
            assert_eq!(value::<B>(vcpu), TOLD as u32);
            Ok(())
        })?;
    }
    Ok(())
}
