//! Failures, with the exact text of their messages; none of them loses data.

use crate::common;

use common::{Use, Vm, huge_host, virtual_host};
use lacuna_addr::{Access, BackingAddr, Level, PageCount};
use lacuna_host::{
    Fault, FaultyStore, Host, HostConfig, HostError, HugePages, Io, MemoryStore, Resolution,
};
use lacuna_sync::HostClock;
use std::sync::Arc;

fn config(budget: u64) -> HostConfig {
    HostConfig {
        budget: PageCount::new(budget),
        huge: HugePages::Never,
        swap: Box::new(MemoryStore::new()),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    }
}

fn refusal(config: HostConfig) -> String {
    Host::new(config).err().expect("refused").to_string()
}

#[test]
fn a_budget_that_is_too_small_names_the_minimum() {
    assert_eq!(
        refusal(config(100)),
        "memory budget too small: 100 pages for 1 vCPUs, at least 160 pages (640 KiB) are needed"
    );
}

#[test]
fn every_vcpu_needs_its_part_of_the_budget() {
    let host = Host::new(config(300)).unwrap();
    let _two = (host.per_cpu_pages().unwrap(), host.per_cpu_pages().unwrap());
    let third = host.per_cpu_pages().err().expect("refused").to_string();
    assert_eq!(
        third,
        "memory budget too small: 300 pages for 3 vCPUs, at least 352 pages (1408 KiB) are needed"
    );
}

#[test]
fn a_budget_beyond_the_address_space_is_refused() {
    assert_eq!(
        refusal(config(1 << 40)),
        "memory budget too large: 1099511627776 pages, at most 536870912 are supported"
    );
}

#[test]
fn memory_that_the_kernel_does_not_have_is_refused() {
    let refused = refusal(config(1 << 29));
    let begin = "cannot get 2199023255552 bytes of memory for the budget: ";
    assert!(refused.starts_with(begin), "{refused}");
}

#[test]
fn an_empty_region_and_unknown_addresses() {
    let (host, clock) = virtual_host(256, Box::new(MemoryStore::new()));
    let mut vm = Vm::new(&host, &clock, 16);
    let none = host
        .add_region(PageCount::new(0), vm.mmu.clone())
        .unwrap_err();
    assert_eq!(none.to_string(), "cannot add a region of 0 pages");
    for addr in [
        BackingAddr::new(0),
        vm.range.end(),
        BackingAddr::new(u64::MAX),
    ] {
        let Resolution::Lost(lost) = host.resolve(addr, Access::Read, Level::L4K, &mut vm.cache)
        else {
            panic!("{addr} is in no region and was not refused");
        };
        assert_eq!(lost.reason.as_ref(), "no region holds it");
    }
    host.remove_region(vm.range).unwrap();
    assert!(matches!(
        host.remove_region(vm.range),
        Err(HostError::NoSuchRegion(_))
    ));
    let gone = host.resolve(vm.range.start(), Access::Write, Level::L4K, &mut vm.cache);
    assert!(matches!(gone, Resolution::Lost(_)));
    host.verify();
}

/// A mapped region is removed: the manager unmaps its pages before their frames are reused.
#[test]
fn a_region_goes_away_while_it_is_mapped() {
    for huge in [HugePages::Never, HugePages::Always] {
        let (host, clock) = huge_host(4 * 512, Box::new(MemoryStore::new()), huge);
        let mut vm = Vm::new(&host, &clock, 2 * 512 + 20);
        for page in 0..vm.range.pages() {
            vm.touch(page, Use::Write(page + 1)).unwrap();
        }
        assert!(vm.mapped() > 1000);
        host.remove_region(vm.range).unwrap();
        assert_eq!(vm.mapped(), 0, "{huge:?}: their frames are free");
        assert!(vm.touch(0, Use::Write(1)).is_err());
        host.verify();
    }
}

/// A frame number of one host's pool is a different page in another host's.
#[test]
fn a_host_does_nothing_with_frames_of_another_host() {
    let device = || Box::new(FaultyStore::new(PageCount::new(4000)));
    let (host, clock) = virtual_host(256, device());
    let (other, _) = virtual_host(256, device());
    let mut vm = Vm::new(&host, &clock, 600);
    (0..600).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    let panics = |run: &mut dyn FnMut()| {
        let run = std::panic::AssertUnwindSafe(run);
        std::panic::catch_unwind(run).is_err()
    };
    let (first, mut cache) = (vm.addr(0), other.per_cpu_pages().unwrap());
    let mut foreign = || host.resolve(first, Access::Write, Level::L4K, &mut cache);
    assert!(panics(&mut || drop(foreign())), "a cache");
    let Resolution::Pending(ticket) = host.resolve(first, Access::Read, Level::L4K, &mut vm.cache)
    else {
        panic!("the first page is in swap");
    };
    assert!(panics(&mut || other.start(&ticket)), "a ticket");
    assert!(panics(&mut || drop(other.wait(&ticket))), "a ticket");
    host.wait(&ticket).unwrap();
    vm.check_all();
}

/// Writes until the device refuses. Returns its message.
fn fill(vm: &mut Vm) -> String {
    for page in 0..vm.range.pages() {
        if let Err(error) = vm.touch(page, Use::Write(page + 1)) {
            return error.to_string();
        }
    }
    panic!("the device never refused");
}

/// Every page that has a leaf, or can be brought in, has its old content.
fn nothing_lost(vm: &mut Vm) {
    let mut read = 0;
    for page in 0..vm.range.pages() {
        read += u64::from(vm.touch(page, Use::Read).is_ok());
        vm.cache.unpin_all();
        vm.host.verify();
    }
    assert!(read > 0);
}

#[test]
fn disk_full_in_the_middle() {
    let store = FaultyStore::new(PageCount::new(4000));
    store.set_fault(Some(Fault::EndsAt(100)));
    let (host, clock) = virtual_host(256, Box::new(store.clone()));
    let mut vm = Vm::new(&host, &clock, 600);
    assert_eq!(
        fill(&mut vm),
        "swap device full: faulty device: No space left on device (os error 28); \
         give it more space, or the guest a larger budget"
    );
    assert!(
        store.stored() >= 96,
        "the part that exists was used: {}",
        store.stored()
    );
    nothing_lost(&mut vm);
}

#[test]
fn every_slot_taken() {
    let (host, clock) = virtual_host(256, Box::new(FaultyStore::new(PageCount::new(64))));
    let mut vm = Vm::new(&host, &clock, 600);
    assert_eq!(
        fill(&mut vm),
        "swap device full: faulty device: every swap entry is in use; \
         give it more space, or the guest a larger budget"
    );
    nothing_lost(&mut vm);
}

#[test]
fn compressed_memory_full_of_what_does_not_compress() {
    let (host, clock) = virtual_host(256, Box::new(MemoryStore::new()));
    let (vm, other) = (Vm::new(&host, &clock, 600), Vm::new(&host, &clock, 40));
    let mut rng = fastrand::Rng::with_seed(1);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..))
        .take(600 << 12)
        .collect();
    host.copy_in(other.range.start(), &noise[..40 << 12])
        .unwrap();
    let text = host
        .copy_in(vm.range.start(), &noise)
        .unwrap_err()
        .to_string();
    let begin = "swap device full: compressed memory: compressed pages fill ";
    let end = " frames of the budget; give it more space, or the guest a larger budget";
    assert!(text.starts_with(begin) && text.ends_with(end), "{text}");
    host.verify();
    // After some room was freed, every accepted page is there.
    host.remove_region(other.range).unwrap();
    let mut back = vec![0; 150 << 12];
    host.copy_out(vm.range.start(), &mut back).unwrap();
    assert!(back == noise[..150 << 12]);
    host.verify();
}

#[test]
fn a_device_that_fails_to_write_and_recovers() {
    let store = FaultyStore::new(PageCount::new(4000));
    store.set_fault(Some(Fault::WriteAfter(0)));
    let (host, clock) = virtual_host(256, Box::new(store.clone()));
    let mut vm = Vm::new(&host, &clock, 600);
    assert_eq!(
        fill(&mut vm),
        "cannot write to swap: faulty device: Input/output error (os error 5)"
    );
    host.verify();
    store.set_fault(None);
    vm.check_all();
    host.verify();
}

#[test]
fn a_page_that_cannot_be_read_back_is_lost_and_says_so() {
    let store = FaultyStore::new(PageCount::new(4000));
    let (host, clock) = virtual_host(256, Box::new(store.clone()));
    let mut vm = Vm::new(&host, &clock, 600);
    (0..600).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    store.set_fault(Some(Fault::Read));
    let page = vm.addr(0);
    let begin = format!("page {page} is lost: cannot read it back: faulty device, swap entry ");
    let first = vm.fault(0, Access::Read).unwrap_err().to_string();
    assert!(first.starts_with(&begin), "{first}");
    assert!(
        first.ends_with(": Input/output error (os error 5)"),
        "{first}"
    );
    store.set_fault(None);
    assert_eq!(
        vm.fault(0, Access::Write).unwrap_err().to_string(),
        first,
        "for good"
    );
    vm.cache.unpin_all();
    host.verify();
    host.remove_region(vm.range).unwrap();
    host.verify();
}
