//! Pages that a VM's own source, or its VMM, provides. Threads of the tests act as vCPUs. They are
//! in user space, where a signal does not end a fault, as in KVM's own accesses.

use super::*;
use crate::memory::copy_out;
use crate::slots::SlotSpec;
use lacuna_addr::{Access, Gfn, Gpa, PAGE_SIZE, PageCount};
use lacuna_apf::{
    Abi, Deliver, Guest, NotDelivered, NotPresent, Prefault, Queue, Token, TokenFormat,
};
use lacuna_machine::{Answer, PageSource, Provided, TokenError};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_source::{PageRequest, SourcePage};
use lacuna_swap::Swap;
use lacuna_sync::{LatencySetting, Mutex, Nanos, lock_order};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::mpsc::{Receiver, Sender, channel};

const PAGES: u64 = 4096;
const SLOT: SlotId = SlotId(0);

/// Keeps its requests.
struct Keeps(Sender<PageRequest>);

impl PageSource for Keeps {
    fn describe(&self) -> String {
        "keeps".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = self.0.send(request);
    }
}

struct Bench {
    source: Source,
    memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    kicks: Arc<VcpuKicks>,
}

/// `None` if this host has no userfaultfd; the skip is recorded then.
fn bench(flags: SlotFlags) -> Option<(Bench, Receiver<PageRequest>)> {
    let (sender, requests) = channel();
    Some((bench_from(flags, Arc::new(Keeps(sender)))?, requests))
}

fn bench_from(flags: SlotFlags, from: Arc<dyn PageSource>) -> Option<Bench> {
    let uffd = match Source::open(Tracker::Kvm) {
        Ok(uffd) => uffd,
        Err((what, errno)) => {
            lacuna_skip::skip(format!("userfaultfd: {what}: {errno}"));
            return None;
        }
    };
    let memory = Arc::new(Memory::new(PageCount::new(PAGES)).unwrap());
    let kicks = Arc::new(VcpuKicks::new(1));
    let slots = Arc::new(SlotTable::new());
    let spec = SlotSpec {
        id: SLOT,
        guest: 0,
        backing: memory.guest.range().start(),
        bytes: PAGES * PAGE_SIZE as u64,
        flags,
    };
    slots.insert(spec, None).unwrap();
    let config = SourceConfig {
        resident: PageCount::new(Pages::BUDGET_MIN as u64),
        swap: Swap::Memory,
        latency: LatencySetting::default(),
        first_touch: FirstTouch::Immediate,
        from: Some(from),
    };
    let source = Source::start(
        uffd,
        Arc::clone(&memory),
        &slots,
        config,
        Swap::Memory.open(PageCount::new(PAGES)).unwrap(),
        Arc::clone(&kicks),
    );
    Some(Bench {
        source: source.unwrap(),
        memory,
        slots,
        kicks,
    })
}

impl Bench {
    fn provision(&self) -> &Provision {
        &self.source.provider().unwrap().provision
    }

    fn read(&self, page: Page) -> u64 {
        let mut word = [0; 8];
        // SAFETY: 1. the page is in the guest's mapping.
        unsafe { copy_out(self.memory.guest.page(page), &mut word) };
        u64::from_ne_bytes(word)
    }

    /// Reads as vCPU 0 does, while it is in the guest.
    fn read_in_guest(&self, page: Page) -> u64 {
        let immediate_exit = AtomicU8::new(0);
        let at = NonNull::new(immediate_exit.as_ptr()).unwrap();
        // SAFETY: 1. the byte outlives the entry.
        let _entry = unsafe { self.kicks.enter(0, at) };
        self.read(page)
    }

    fn wait_for(&self, page: Page, state: PageState) {
        while self.provision().state(page) != state {
            thread::yield_now();
        }
    }
}

fn content(word: u64) -> [u8; PAGE_SIZE] {
    let bytes = word.to_ne_bytes().repeat(PAGE_SIZE / 8);
    bytes.try_into().unwrap()
}

/// Linux has a page that the source has not provided: the page keeps its content, and waits end.
#[test]
fn a_page_that_is_there_keeps_its_content() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    let uffd = bench.source.uffd.upgrade().unwrap();
    uffd.copy(&content(3), bench.memory.guest.page(7)).unwrap();
    let filled = bench.provision().fill(6, &[content(4); 3]);
    assert_eq!(filled, Ok(Provided { taken: 2, late: 1 }));
    assert_eq!([6, 7, 8].map(|page| bench.read(page)), [4, 3, 4]);
    assert_eq!(bench.provision().state(7), PageState::Provided);
    assert!(requests.try_recv().is_err());
}

/// If several threads provide one page, one succeeds.
#[test]
fn each_page_is_provided_once() {
    let Some((bench, _requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    let fill = |word: u64| {
        let each = |page| {
            bench
                .provision()
                .fill(page, &[content(word)])
                .unwrap()
                .taken
        };
        (0..PAGES as Page).map(each).sum::<u64>()
    };
    let taken = thread::scope(|scope| {
        let threads = [1, 2, 3].map(|word| scope.spawn(move || fill(word)));
        threads
            .map(|thread| thread.join().unwrap())
            .iter()
            .sum::<u64>()
    });
    assert_eq!(taken, PAGES);
    assert!((0..PAGES as Page).all(|page| (1..=3).contains(&bench.read(page))));
}

/// An evicted page is brought back with its content, without a request to the source.
#[test]
fn provided_pages_are_evicted_and_come_back() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    for page in 0..PAGES as Page {
        let filled = bench.provision().fill(page, &[content(u64::from(page))]);
        assert_eq!(filled, Ok(Provided { taken: 1, late: 0 }));
    }
    // The thread learns of the pages after they are in place.
    while bench.source.stats().evicted <= PAGES / 2 {
        thread::yield_now();
    }
    for page in 0..PAGES as Page {
        assert_eq!(bench.read(page), u64::from(page));
        let late = bench.provision().fill(page, &[content(0)]);
        assert_eq!(late, Ok(Provided { taken: 0, late: 1 }));
    }
    assert_eq!(bench.source.stats().first_touches, PAGES);
    assert!(requests.try_recv().is_err());
}

/// An access that no signal ends causes no exit: the source gets a request for its page.
#[test]
fn an_access_that_cannot_leave_waits_for_the_source() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING) else {
        return;
    };
    thread::scope(|scope| {
        let reads = scope.spawn(|| bench.read_in_guest(5));
        let asked = requests.recv().unwrap();
        assert_eq!(asked.page(), SourcePage(5));
        assert_eq!(bench.kicks.take_missing(0), None);
        assert_eq!(asked.provide(&content(9)), Answer::Taken);
        assert_eq!(reads.join().unwrap(), 9);
    });
}

/// A vCPU that sleeps on a page without an exit gets it from the source when the flag is cleared.
#[test]
fn a_held_page_is_asked_for_when_the_flag_is_cleared() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING) else {
        return;
    };
    bench.kicks.set_waits(0, Some(5));
    thread::scope(|scope| {
        let reads = scope.spawn(|| bench.read_in_guest(5));
        bench.wait_for(5, PageState::Held);
        assert!(requests.try_recv().is_err());
        bench.slots.set_own_flags(SLOT, SlotFlags::empty()).unwrap();
        bench.source.slots_changed();
        let asked = requests.recv().unwrap();
        assert_eq!(asked.provide(&content(9)), Answer::Taken);
        assert_eq!(reads.join().unwrap(), 9);
    });
}

/// A VMM may provide a page for which a vCPU sleeps, and the source's answer is late then.
#[test]
fn an_answer_after_the_vmms_page_is_late() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    thread::scope(|scope| {
        let reads = scope.spawn(|| bench.read(5));
        let asked = requests.recv().unwrap();
        let filled = bench.provision().fill(5, &[content(2)]);
        assert_eq!(filled, Ok(Provided { taken: 1, late: 0 }));
        assert_eq!(asked.provide(&content(9)), Answer::Late);
        assert_eq!(asked.fail("late"), Answer::Late);
        assert_eq!(reads.join().unwrap(), 2);
    });
    assert_eq!(bench.source.failure(), None);
}

/// The end of a VM wakes waiting threads, and lets later touches continue.
#[test]
fn the_end_of_a_vm_waits_for_no_source() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    let asked = thread::scope(|scope| {
        let reads = scope.spawn(|| bench.read(5));
        let asked = requests.recv().unwrap();
        bench.source.close();
        assert_eq!(reads.join().unwrap(), 0);
        assert_eq!(bench.read(6), 0);
        asked
    });
    drop(bench);
    assert_eq!(asked.provide(&content(9)), Answer::Late);
}

/// If the source drops a request, the page is lost, and the run ends.
#[test]
fn a_dropped_request_ends_the_run() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    thread::scope(|scope| {
        scope.spawn(|| bench.read(5));
        drop(requests.recv().unwrap());
    });
    let failure = bench.source.failure().unwrap();
    assert_eq!(failure.lost, Gpa::new(5 * PAGE_SIZE as u64));
    assert!(
        failure.cause.contains("keeps cannot provide it"),
        "{failure:?}"
    );
    assert!(bench.kicks.is_stopping());
}

/// A page source may end the VM during a request: the requesting thread does not wait for itself.
#[test]
fn a_source_may_end_the_vm_while_it_is_asked() {
    #[derive(Default)]
    struct Ends {
        vm: Mutex<Option<Source>, lock_order::KvmReadyLater>,
        is_ready: AtomicBool,
        has_ended: AtomicBool,
    }
    impl PageSource for Ends {
        fn describe(&self) -> String {
            "ends".into()
        }

        fn fetch(&self, _: PageRequest) {
            while !self.is_ready.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let vm = self.vm.lock().unwrap().take();
            drop(vm);
            self.has_ended.store(true, Ordering::SeqCst);
        }
    }
    let ends = Arc::new(Ends::default());
    let Some(bench) = bench_from(SlotFlags::empty(), Arc::clone(&ends) as Arc<dyn PageSource>)
    else {
        return;
    };
    let Bench { source, memory, .. } = bench;
    *ends.vm.lock().unwrap() = Some(source);
    ends.is_ready.store(true, Ordering::SeqCst);
    // The thread waits until the descriptor is closed.
    let mut word = [0; 8];
    // SAFETY: 1. the page is in the guest's mapping.
    unsafe { copy_out(memory.guest.page(5), &mut word) };
    assert_eq!(word, [0; 8]);
    assert!(ends.has_ended.load(Ordering::SeqCst));
}

/// A page source ends the VM during a request. Threads that wait for pages do not wait for the
/// requesting thread, which waits for them because it drops the VM last.
#[test]
fn a_source_ends_the_vm_before_threads_that_wait_for_pages() {
    #[derive(Default)]
    struct Ends {
        vm: Mutex<Option<Arc<Source>>, lock_order::KvmReadyLater>,
        kept: Mutex<Vec<PageRequest>, lock_order::KvmReadyLater>,
        has_ended: AtomicBool,
    }
    impl PageSource for Ends {
        fn describe(&self) -> String {
            "ends".into()
        }

        fn fetch(&self, request: PageRequest) {
            if request.page() == SourcePage(6) {
                self.vm.lock().unwrap().take().unwrap().close();
                // The close of KVM's descriptor waits for KVM's workers in the same way.
                while !self.has_ended.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            }
            self.kept.lock().unwrap().push(request);
        }
    }
    let ends = Arc::new(Ends::default());
    let Some(bench) = bench_from(SlotFlags::empty(), Arc::clone(&ends) as Arc<dyn PageSource>)
    else {
        return;
    };
    let Bench { source, memory, .. } = bench;
    let source = Arc::new(source);
    *ends.vm.lock().unwrap() = Some(Arc::clone(&source));
    let read = |page| {
        let mut word = [0; 8];
        // SAFETY: 1. the page is in the guest's mapping.
        unsafe { copy_out(memory.guest.page(page), &mut word) };
        word
    };
    thread::scope(|scope| {
        let waits = scope.spawn(|| read(5));
        while ends.kept.lock().unwrap().is_empty() {
            thread::yield_now();
        }
        let last = scope.spawn(|| read(6));
        assert_eq!([waits, last].map(|read| read.join().unwrap()), [[0; 8]; 2]);
        ends.has_ended.store(true, Ordering::SeqCst);
    });
}

/// A lost page does not count as late: the VMM gets the reason.
#[test]
fn a_lost_page_is_not_provided_late() {
    let Some((bench, requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    bench.source.provider().unwrap().ask(5);
    let _ = requests.recv().unwrap().fail("no such disk");
    let refused = bench.provision().fill(4, &[content(2); 3]).unwrap_err();
    assert!(refused.contains("no such disk"), "{refused}");
}

/// A page keeps one entry for each uncompleted token, however often it is fetched.
#[test]
fn tokens_that_wait_for_a_page_are_bounded() {
    let Some((bench, _requests)) = bench(SlotFlags::EXIT_ON_MISSING) else {
        return;
    };
    let provision = bench.provision();
    let mut token = provision.tokens.exit(0);
    for _ in 0..100 {
        provision.ready_when_arrived(5, token);
        provision.ready_when_arrived(5, token);
        token = provision.tokens.exit(0);
    }
    provision.ready_when_arrived(5, token);
    assert_eq!(provision.waiting_for(5), 1);
    provision.fill(5, &[content(1)]).unwrap();
    assert_eq!(provision.waiting_for(5), 0);
    assert_eq!(provision.tokens.ready(token), Err(TokenError::Ready));
}

/// A guest that can always take events, with nothing but a queue.
struct Always;

impl Guest for Always {
    fn is_interruptible(&self) -> bool {
        true
    }

    fn prefault(&mut self, _: Gfn, _: Access) -> Prefault {
        Prefault::NotMapped
    }

    fn resume(&mut self) {}
}

impl Abi for Always {
    fn tokens(&self) -> TokenFormat {
        TokenFormat {
            vcpu_bits: 4,
            id_bits: 8,
        }
    }

    fn is_enabled(&self) -> bool {
        true
    }

    fn shared_page(&self) -> Option<Gfn> {
        None
    }

    fn reset(&mut self) {}
}

impl Deliver<Self> for Always {
    fn takes_not_present(&mut self, _: &mut Self) -> bool {
        true
    }

    fn not_present(&mut self, _: Token, _: &mut Self) -> Result<(), NotDelivered> {
        Ok(())
    }

    fn takes_ready(&mut self, _: &mut Self) -> bool {
        true
    }

    fn ready(&mut self, _: Token, _: &mut Self) -> Result<(), NotDelivered> {
        Ok(())
    }
}

/// A page arrives and is evicted before page-not-present is delivered. No thread brings the page
/// back, so page-ready is delivered at once.
#[test]
fn a_page_that_has_come_and_gone_is_ready() {
    let Some((bench, _requests)) = bench(SlotFlags::empty()) else {
        return;
    };
    let provision = bench.provision();
    let page = 5;
    let (before, hva) = (provision.arrivals(page), bench.memory.guest.page(page));
    for page in [page].into_iter().chain(100..PAGES as Page) {
        provision.fill(page, &[content(1)]).unwrap();
    }
    while crate::memory::is_mapped(hva, PAGE_SIZE) {
        thread::yield_now();
    }
    let mut queue = Queue::new(0, Always, || ());
    let mut not_present = |page: Page| {
        let gfn = Gfn::new(page.into()).unwrap();
        match queue.not_present(gfn, Access::Read, Nanos(0), &mut Always) {
            NotPresent::Injected(completion) => completion,
            _ => panic!("it can be delivered"),
        }
    };
    let [gone, missing] = [page, 6].map(&mut not_present);
    // The completion of a page that has not arrived waits for it.
    provision.complete_later(6, provision.arrivals(6), missing);
    assert!(!queue.has_arrivals());
    provision.complete_later(page, before, gone);
    assert!(queue.has_arrivals());
    assert_eq!(queue.poll(Nanos(0), &mut Always), 1);
    provision.fill(6, &[content(1)]).unwrap();
    assert_eq!(queue.poll(Nanos(0), &mut Always), 1);
}
