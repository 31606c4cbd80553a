//! Pages of Linux memory that the kernel takes away are lost, and never read as zeros.

use crate::common;

use common::linux::{BLOCK, host, read};
use common::source::{TestSource, page_with};
use common::{Use, Vm};
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{Answer, Host, HostError, LinuxBacking, Resolution, SeenLosses};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A VM whose pages are all provided: page `n` contains the words `n + 1`.
fn vm(host: &Arc<Host>, pages: u64) -> Vm {
    let source = TestSource::new();
    let mut vm = common::linux::vm(host, LinuxBacking::Anonymous, pages, Some(&source));
    for page in 0..pages {
        let provided = host.provide(vm.addr(page), &page_with(page + 1).0);
        assert_eq!(provided, Ok(Answer::Taken));
        vm.model.insert(vm.addr(page).get(), page + 1);
    }
    vm
}

fn take_away(vm: &Vm, page: u64, pages: u64) {
    let range = BackingRange::new(vm.addr(page), pages).unwrap();
    vm.host.take_away(range).unwrap();
}

fn is_lost(error: &HostError) -> bool {
    matches!(error, HostError::Lost(page) if page.reason.contains("Linux has taken"))
}

/// The first copy that touches a lost page fails, and so do all others, in every way. Other pages
/// keep their content.
#[lacuna_skip::test]
fn a_copy_of_a_lost_page_fails() {
    let host = host(BLOCK);
    let mut vm = vm(&host, 20);
    let mut seen = host.seen_losses();
    take_away(&vm, 5, 3);
    assert_eq!((host.losses(), host.linux_pages()), (0, PageCount::new(20)));
    let error = read(&host, vm.addr(5)).unwrap_err();
    assert!(is_lost(&error), "{error}");
    let error = host.copy_in(vm.addr(6), &[1; 8]).unwrap_err();
    assert!(is_lost(&error), "{error}");
    assert_eq!(host.peek(vm.addr(7), &mut [0; 8]), None);
    assert_eq!(host.losses(), 3);
    for page in 5..8 {
        assert!(is_lost(&read(&host, vm.addr(page)).unwrap_err()));
        let found = host.resolve(vm.addr(page), Access::Read, Level::L4K, &mut vm.cache);
        assert!(matches!(found, Resolution::Lost(_)), "{found:?}");
        assert!(host.fetch(vm.addr(page)).is_err());
        let refused = host.provide(vm.addr(page), &[9; PAGE_SIZE]).unwrap_err();
        assert!(is_lost(&refused), "{refused}");
    }
    assert_eq!((host.losses(), host.linux_pages()), (3, PageCount::new(17)));
    let lost = host.lost_since(&mut seen, &*vm.mmu).unwrap();
    assert_eq!(lost.page, vm.addr(5));
    assert!(seen.is_all(3));
    assert!(host.lost_since(&mut seen, &*vm.mmu).is_none());
    for page in (0..5).chain(8..20) {
        assert_eq!(read(&host, vm.addr(page)), Ok(page + 1));
    }
    host.verify();
    let all = BackingRange::new(vm.addr(0), 20).unwrap();
    host.discard(all).unwrap();
    assert!(
        is_lost(&read(&host, vm.addr(6)).unwrap_err()),
        "it stays lost"
    );
    assert_eq!(read(&host, vm.addr(8)), Ok(0));
    host.verify();
    host.remove_region(vm.range).unwrap();
    host.verify();
}

/// A vCPU reads zeros by its leaf, without reading the page word. It finds out afterwards. The
/// other VM's vCPU finds that it has lost nothing. The leaf is gone.
#[lacuna_skip::test]
fn a_vcpu_finds_out() {
    let host = host(2 * BLOCK);
    let (mut vm, other) = (vm(&host, 20), self::vm(&host, 20));
    let (mut seen, mut others) = (host.seen_losses(), host.seen_losses());
    for page in 0..20 {
        vm.touch(page, Use::Read).unwrap();
    }
    let mapped = vm.mapped();
    take_away(&vm, 11, 1);
    let frame = vm.fault(11, Access::Read).unwrap();
    assert!(seen.is_all(host.losses()));
    let mut word = [1; 8];
    host.frame(frame.pfn).read(0, &mut word);
    assert_eq!(word, [0; 8]);
    assert!(!seen.is_all(host.losses()), "before the zeros are used");
    let lost = host.lost_since(&mut seen, &*vm.mmu).unwrap();
    assert_eq!(lost.page, vm.addr(11));
    assert_eq!(vm.mapped(), mapped - 1);
    assert!(host.lost_since(&mut others, &*other.mmu).is_none());
    assert!(others.is_all(host.losses()));
    assert!(matches!(vm.fault(11, Access::Read), Err(error) if is_lost(&error)));
    host.verify();
}

/// A page is lost, and its region is removed before its vCPU has looked.
#[lacuna_skip::test]
fn a_loss_outlives_its_region() {
    let host = host(BLOCK);
    let mut vm = vm(&host, 20);
    let mut seen = SeenLosses::default();
    let frame = vm.fault(3, Access::Read).unwrap();
    take_away(&vm, 3, 1);
    host.frame(frame.pfn).read(0, &mut [1; 8]);
    host.remove_region(vm.range).unwrap();
    host.verify();
    let lost = host.lost_since(&mut seen, &*vm.mmu).unwrap();
    assert_eq!(lost.page, vm.addr(3));
    // The next region at these addresses begins anew.
    let next = self::vm(&host, 20);
    assert_eq!(read(&host, next.addr(3)), Ok(4));
    assert!(seen.is_all(host.losses()));
    host.verify();
}

/// Pages are taken away while threads copy them. No copy succeeds with zeros.
#[lacuna_skip::test]
fn copies_beside_losses() {
    let host = host(BLOCK);
    for round in 0..20 {
        let vm = vm(&host, 64);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for seed in 0..3 {
                let (host, range, over) = (&host, vm.range, &over);
                scope.spawn(move || {
                    let mut turn = seed * 11;
                    while !over.load(Ordering::Acquire) {
                        let page = turn % 64;
                        let addr = range.start().checked_add_pages(page).unwrap();
                        match read(host, addr) {
                            Ok(word) => assert_eq!(word, page + 1, "round {round}"),
                            Err(error) => assert!(is_lost(&error), "{error}"),
                        }
                        let mut word = [0; 8];
                        if host.peek(addr, &mut word).is_some() {
                            assert_eq!(u64::from_le_bytes(word), page + 1);
                        }
                        turn += 1;
                    }
                });
            }
            for page in (0..64).step_by(2) {
                take_away(&vm, page, 1);
                while read(&host, vm.addr(page)).is_ok() {}
            }
            over.store(true, Ordering::Release);
        });
        assert_eq!(host.linux_pages(), PageCount::new(32));
        host.verify();
        host.remove_region(vm.range).unwrap();
    }
}

/// A page that its source has lost is also poisoned: an access past the page word does not silently
/// find zeros.
#[lacuna_skip::test]
fn a_page_without_an_answer_is_poisoned() {
    if !kernel_can_poison() {
        return lacuna_skip::skip("UFFDIO_POISON needs Linux 6.6");
    }
    let host = host(BLOCK);
    let source = TestSource::new();
    let vm = common::linux::vm(&host, LinuxBacking::Anonymous, 4, Some(&source));
    let (range, mut cache) = (vm.range, vm.cache);
    let mut resolve = |addr: BackingAddr| host.resolve(addr, Access::Read, Level::L4K, &mut cache);
    let next = range.start().checked_add_pages(1).unwrap();
    assert_eq!(host.provide(next, &[1; PAGE_SIZE]), Ok(Answer::Taken));
    let (Resolution::Missing(ticket), Resolution::Ready(after)) =
        (resolve(range.start()), resolve(next))
    else {
        panic!("one is missing, one is there");
    };
    host.start(&ticket);
    source.forget(range.start());
    assert!(matches!(
        read(&host, range.start()),
        Err(HostError::Lost(_))
    ));
    assert_eq!(host.losses(), 0);
    let before = Pfn::new(after.pfn.index() as u32 - 1);
    host.frame(before).read(0, &mut [1; 8]);
    assert_eq!(host.losses(), 1);
    assert_eq!(read(&host, next), Ok(u64::from_le_bytes([1; 8])));
    host.verify();
}

fn kernel_can_poison() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>());
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    (next(), next()) >= (6, 6)
}
