//! Missing pages at the guest's start: waits, exits to the VMM, and tokens.

use std::collections::BTreeSet;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lacuna_addr::{GfnRange, Gpa, PAGE_SIZE};
use lacuna_machine::{
    Apf, Arch, Exit, FaultToken, GuestMemory as _, Kick as _, MemoryError, MemoryFaultFlags,
    PageRequest, PageSource, Provided, ReadyOutcome, SlotFlags, SourcePage, TokenError, Vcpu as _,
    Vm as _, Width,
};

use super::Outcome;
use crate::backend::{
    Backend, Lacks, Made, Missing, Origin, Request, Unit, VcpuOf, exit_on_missing,
};
use crate::program::{Code, Interrupts, Reg, assemble_user, gpa, image, ram, reported};
use crate::running::{guest, run, within};

/// The offsets of two pages that the program below accesses.
pub(super) const READ: u64 = 0x30_0000;
pub(super) const WRITTEN: u64 = 0x30_5000;

/// A source of pages that repeat a word, each after a delay.
pub(super) struct Words {
    asked: Mutex<BTreeSet<SourcePage>>,
    answers: Option<Mutex<Sender<(Instant, PageRequest)>>>,
}

/// The word of a page.
pub(super) fn word(page: SourcePage) -> u64 {
    page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(super) fn page_of(word: u64) -> [u8; PAGE_SIZE] {
    let bytes = word.to_le_bytes().repeat(PAGE_SIZE / 8);
    bytes.try_into().expect("a page")
}

/// How the pages of a source look.
#[derive(Clone, Copy)]
enum Content {
    Words,
    Zeros,
}

impl Words {
    /// Answers at once, on the requesting thread.
    pub(super) fn at_once() -> Arc<Self> {
        Arc::new(Self {
            asked: Mutex::default(),
            answers: None,
        })
    }

    /// Answers with zeros, each page `delay` after its request.
    pub(super) fn late(delay: Duration) -> Arc<Self> {
        let (sender, requests) = channel::<(Instant, PageRequest)>();
        thread::spawn(move || {
            // The delay is the same for all, so they are due in the order of the requests.
            for (asked, request) in requests {
                thread::sleep((asked + delay).saturating_duration_since(Instant::now()));
                answer(&request, Content::Zeros);
            }
        });
        Arc::new(Self {
            asked: Mutex::default(),
            answers: Some(Mutex::new(sender)),
        })
    }

    pub(super) fn asked(&self) -> BTreeSet<SourcePage> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(request: &PageRequest, content: Content) {
    let page = match content {
        Content::Words => page_of(word(request.page())),
        Content::Zeros => [0; PAGE_SIZE],
    };
    // The answer is late if the VM has ended, or the VMM has provided the page itself.
    let _ = request.provide(&page);
}

impl PageSource for Words {
    fn describe(&self) -> String {
        "words".into()
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page();
        assert!(
            self.asked.lock().unwrap().insert(page),
            "{page} asked for twice"
        );
        match &self.answers {
            None => answer(&request, Content::Words),
            Some(sender) => {
                let request = (Instant::now(), request);
                sender.lock().unwrap().send(request).unwrap();
            }
        }
    }
}

pub(super) fn request(source: &Arc<Words>, missing: Missing) -> Request {
    let source = Arc::clone(source) as Arc<dyn PageSource>;
    Request {
        origin: Some(Origin { source, missing }),
        unit: Unit::Page,
        ..Request::new(16, 16, 1, "")
    }
}

/// Reads the word at `READ`, writes it to `WRITTEN`, and puts it out, again and again.
pub(super) fn program(arch: Arch, interrupts: Interrupts) -> Code {
    assemble_user(arch, interrupts, |a| {
        a.set(Reg::A, ram(arch, READ));
        a.set(Reg::B, ram(arch, WRITTEN));
        let again = a.here();
        a.load(Width::Quad, Reg::C, Reg::A, 0);
        a.store(Width::Quad, Reg::B, 0, Reg::C);
        a.report(Reg::C);
        a.jump(again);
    })
}

/// A VM whose one vCPU is about to run [`program`], and the source of its pages.
pub(super) fn made<B: Backend>(
    backend: &B,
    missing: Missing,
    interrupts: Interrupts,
) -> Result<(Arc<Words>, Made<B>), Lacks> {
    let source = Words::at_once();
    let code = program(backend.arch(), interrupts);
    let made = backend.make(&request(&source, missing), &image(&code))?;
    Ok((source, made))
}

pub(super) fn source_page(offset: u64) -> SourcePage {
    SourcePage(offset / PAGE_SIZE as u64)
}

/// Addresses by their offset in the VM's memory.
pub(super) fn places<B: Backend>(backend: &B) -> impl Fn(u64) -> Gpa + Copy + use<B> {
    let arch = backend.arch();
    move |offset| gpa(arch, offset)
}

/// Runs until the program puts out a value.
pub(super) fn value<B: Backend>(vcpu: &mut VcpuOf<B>) -> u32 {
    loop {
        let exit = vcpu.run().expect("a vCPU that can continue");
        match reported(&exit) {
            Some(value) => return value,
            None => assert_eq!(exit, Exit::Interrupted),
        }
    }
}

pub(super) fn fault<B: Backend>(vcpu: &mut VcpuOf<B>) -> (Gpa, MemoryFaultFlags, FaultToken) {
    match vcpu.run() {
        Ok(Exit::MemoryFault {
            gpa,
            size: 4096,
            flags,
            token,
        }) => (gpa, flags, token),
        other => panic!("{other:?}"),
    }
}

fn read<B: Backend>(vm: &B::Vm, gpa: Gpa) -> u64 {
    let mut bytes = [0; 8];
    vm.read(gpa, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Without the flag a vCPU waits. The source gets one request for its page, and no other request.
pub fn the_source_is_asked_for_what_a_vcpu_needs<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (source, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Waits, Interrupts::Off)?;
        let before = source.asked();
        assert!(!before.contains(&source_page(READ)));
        assert_eq!(value::<B>(&mut vcpus[0]), word(source_page(READ)) as u32);
        assert_eq!(value::<B>(&mut vcpus[0]), word(source_page(READ)) as u32);
        let after: Vec<_> = source.asked().difference(&before).copied().collect();
        assert_eq!(after, [READ, WRITTEN].map(source_page));
        assert_eq!(read::<B>(&vm, at(WRITTEN)), word(source_page(READ)));
        assert_eq!(read::<B>(&vm, at(WRITTEN + 8)), word(source_page(WRITTEN)));
        Ok(())
    })
}

/// With the flag a vCPU exits for each missing page, and the VMM provides it. The flag can be
/// cleared while pages are missing.
pub fn a_vcpu_exits_once_for_a_missing_page<B: Backend>(backend: &B) -> Outcome {
    exits_once(backend, Interrupts::Off)
}

/// The same for an interruptible guest: there a backend may learn of the access, but not of its
/// kind.
pub fn a_vcpu_with_interrupts_exits_once<B: Backend>(backend: &B) -> Outcome {
    exits_once(backend, Interrupts::On)
}

fn exits_once<B: Backend>(backend: &B, interrupts: Interrupts) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (source, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, interrupts)?;
        let before = source.asked();
        let vcpu = &mut vcpus[0];
        let memory = vm.missing_memory().expect("it has a source");
        let (gpa, flags, _) = fault::<B>(vcpu);
        assert_eq!(gpa, at(READ));
        if interrupts == Interrupts::Off {
            assert_eq!(flags, MemoryFaultFlags::READ);
        }
        // Entered without the page, it exits again.
        let (gpa, ..) = fault::<B>(vcpu);
        assert_eq!(gpa, at(READ));
        let one = |taken, late| Ok(Provided { taken, late });
        assert_eq!(memory.provide(gpa, &page_of(77)), one(1, 0));
        assert_eq!(memory.provide(gpa, &page_of(78)), one(0, 1));
        let (gpa, flags, _) = fault::<B>(vcpu);
        assert_eq!((gpa, flags), (at(WRITTEN), MemoryFaultFlags::WRITE));
        // A batch: the page itself, its neighbours, and a present one.
        let batch = page_of(9).repeat(4);
        assert_eq!(memory.provide(at(WRITTEN - 0x1000), &batch), one(4, 0));
        assert_eq!(memory.provide(at(WRITTEN - 0x2000), &batch), one(1, 3));
        assert_eq!(value::<B>(vcpu), 77);
        assert_eq!(value::<B>(vcpu), 77);
        assert_eq!(
            (read::<B>(&vm, at(WRITTEN)), read::<B>(&vm, at(WRITTEN + 8))),
            (77, 9)
        );
        assert_eq!(source.asked(), before, "the VMM has provided all");
        let refused = memory.provide(at(READ + 8), &page_of(1));
        assert!(refused.is_err(), "{refused:?}");
        let refused = memory.provide(at(READ), &[0; 100]);
        assert!(refused.is_err(), "{refused:?}");
        let refused = memory.provide(Gpa::truncate(1 << 40), &page_of(1));
        assert!(refused.is_err(), "{refused:?}");
        exit_on_missing(&*vm, SlotFlags::empty());
        assert_eq!(value::<B>(vcpu), 77);
        Ok(())
    })
}

/// An access from outside of a vCPU waits for the source, also in a slot with exits. `populate`
/// requests a whole range.
pub fn devices_wait_where_vcpus_exit<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (source, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, Interrupts::Off)?;
        assert_eq!(read::<B>(&vm, at(READ)), word(source_page(READ)));
        let (gpa, ..) = fault::<B>(&mut vcpus[0]);
        assert_eq!(gpa, at(WRITTEN));
        let memory = vm.missing_memory().expect("it has a source");
        let range = GfnRange::new(at(WRITTEN - 0x3000).gfn(), 100).unwrap();
        memory.populate(range).unwrap();
        assert_eq!(value::<B>(&mut vcpus[0]), word(source_page(READ)) as u32);
        let asked = source.asked();
        assert!(
            (0..100)
                .all(|page| asked.contains(&SourcePage(source_page(WRITTEN - 0x3000).0 + page)))
        );
        assert_eq!(
            read::<B>(&vm, at(WRITTEN + 0x8000)),
            word(source_page(WRITTEN + 0x8000))
        );
        let beyond = GfnRange::new(at(15 << 20).gfn(), 1000).unwrap();
        assert!(memory.populate(beyond).is_err());
        Ok(())
    })
}

/// Pages that were provided, written and evicted are missing again, also for a vCPU that has them
/// in its TLB.
pub fn pages_are_missing_again<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        for resident in [16, 4] {
            let source = Words::at_once();
            let code = program(backend.arch(), Interrupts::Off);
            let request = Request {
                resident,
                ..request(&source, Missing::Exits)
            };
            let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
            let vcpu = &mut vcpus[0];
            let memory = vm.missing_memory().expect("it has a source");
            assert_eq!(memory.unit().get(), 1);
            let two = GfnRange::new(at(READ).gfn(), 6).unwrap();
            for round in 0..3 {
                needs::<B>(vcpu, at(READ));
                memory.provide(at(READ), &page_of(70 + round)).unwrap();
                needs::<B>(vcpu, at(WRITTEN));
                memory.provide(at(WRITTEN), &page_of(9)).unwrap();
                assert_eq!(value::<B>(vcpu), 70 + round as u32);
                assert_eq!(read::<B>(&vm, at(WRITTEN)), 70 + round);
                if round == 1 {
                    // More than the guest may have resident.
                    let bytes = vec![1; 6 << 20];
                    vm.write(at(4 << 20), &bytes).unwrap();
                }
                memory.make_missing(two).unwrap();
            }
            memory.make_missing(two).unwrap();
            memory.populate(two).unwrap();
            assert_eq!(value::<B>(vcpu), word(source_page(READ)) as u32);
            assert_eq!(read::<B>(&vm, at(WRITTEN + 8)), word(source_page(WRITTEN)));
            let beyond = GfnRange::new(at(15 << 20).gfn(), 1000).unwrap();
            assert!(memory.make_missing(beyond).is_err());
        }
        Ok(())
    })
}

/// Runs until the vCPU exits for the missing page at `gpa`.
fn needs<B: Backend>(vcpu: &mut VcpuOf<B>, page: Gpa) {
    loop {
        match vcpu.run().expect("a vCPU that can continue") {
            Exit::MemoryFault { gpa, .. } => return assert_eq!(gpa, page),
            // It reports what it read before the page was missing again.
            other => assert!(reported(&other).is_some() || other == Exit::Interrupted),
        }
    }
}

/// A guest without async faults takes no events. After the refused accept, the next run waits until
/// the VMM provides the page, or for a kick.
pub fn a_guest_that_takes_no_events_waits<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (source, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, Interrupts::Off)?;
        let before = source.asked();
        let vcpu = &mut vcpus[0];
        let memory = vm.missing_memory().expect("it has a source");
        let (gpa, flags, token) = fault::<B>(vcpu);
        assert!(!flags.contains(MemoryFaultFlags::CAN_NOTIFY));
        assert_eq!(vcpu.accept(token), Err(TokenError::CannotNotify));
        assert_eq!(vcpu.accept(token), Err(TokenError::Unknown));
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                vm.kick(0);
            });
            assert_eq!(vcpu.run(), Ok(Exit::Interrupted), "a kick ends the wait");
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                memory.provide(gpa, &page_of(5)).unwrap();
            });
            let (gpa, ..) = fault::<B>(vcpu);
            assert_eq!(gpa, at(WRITTEN), "the wait has ended without another exit");
        });
        // The source may get a request while the vCPU waits.
        let (gpa, _, token) = fault::<B>(vcpu);
        assert_eq!(vcpu.accept(token), Err(TokenError::CannotNotify));
        memory.fetch(gpa, None).unwrap();
        assert_eq!(value::<B>(vcpu), 5);
        let after: Vec<_> = source.asked().difference(&before).copied().collect();
        assert_eq!(after, [source_page(WRITTEN)]);
        Ok(())
    })
}

/// Each order of calls about a token has one outcome.
pub fn tokens_are_accepted_once<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let at = places(&backend);
        let (_, Made { vm, mut vcpus, .. }) = made(&backend, Missing::Exits, Interrupts::Off)?;
        let vcpu = &mut vcpus[0];
        let memory = vm.missing_memory().expect("it has a source");
        let unknown = Err(TokenError::Unknown);
        for never in [FaultToken::new(0, 1), FaultToken::new(200, 7)] {
            assert_eq!(vcpu.accept(never), unknown);
            assert_eq!(memory.ready(never), Err(TokenError::Unknown));
            let forged = memory.fetch(at(READ), Some(never));
            assert!(
                matches!(forged, Err(MemoryError::Refused { .. })),
                "{forged:?}"
            );
        }
        let (_, _, first) = fault::<B>(vcpu);
        let (_, _, second) = fault::<B>(vcpu);
        assert_ne!(first, second);
        assert_eq!(vcpu.accept(first), unknown, "its vCPU was entered since");
        assert_eq!(memory.ready(first), Err(TokenError::Unknown));
        let completed = memory.fetch(at(READ), Some(first));
        assert!(
            matches!(completed, Err(MemoryError::Refused { .. })),
            "{completed:?}"
        );
        assert_eq!(memory.ready(second), Ok(ReadyOutcome::Early));
        assert_eq!(memory.ready(second), Err(TokenError::Ready));
        assert_eq!(vcpu.accept(second), Err(TokenError::Ready));
        let (_, _, third) = fault::<B>(vcpu);
        assert_eq!(memory.ready(second), Err(TokenError::Unknown));
        memory.provide(at(READ), &page_of(1)).unwrap();
        let _ = fault::<B>(vcpu);
        assert_eq!(memory.ready(third), Err(TokenError::Unknown));
        Ok(())
    })
}

/// `verify` with every page behind exits, two vCPUs, and a late source.
pub fn nothing_is_lost_with_exits<B: Backend>(backend: &B) -> Outcome {
    with_exits(backend, Apf::Off, Missing::Exits)
}

/// The same, and the guest gets events for the pages.
pub fn nothing_is_lost_with_exits_and_tokens<B: Backend>(backend: &B) -> Outcome {
    with_exits(backend, Apf::On, Missing::Exits)
}

pub(super) fn with_exits<B: Backend>(backend: &B, apf: Apf, missing: Missing) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let source = Words::late(Duration::from_micros(300));
        let zeros = Arc::clone(&source) as Arc<dyn PageSource>;
        let request = Request {
            apf,
            origin: Some(Origin {
                source: zeros,
                missing,
            }),
            unit: match apf {
                Apf::Off => Unit::Any,
                Apf::On => Unit::Page,
            },
            ..Request::new(16, 4, 2, "rounds=1 threads=6")
        };
        let finished = run(&backend, &request, &guest(backend.arch(), "verify"))?.passed();
        assert!(
            source.asked().len() > 1000,
            "{} pages",
            source.asked().len()
        );
        let reported = finished.status.expect("it announces its status page").apf;
        match apf {
            Apf::Off => assert_eq!(reported.not_present, 0),
            Apf::On => {
                assert!(reported.not_present > 500, "{reported:?}");
                assert_eq!(
                    (reported.not_present, reported.lost),
                    (reported.ready, 0),
                    "{reported:?}"
                );
            }
        }
        Ok(())
    })
}
