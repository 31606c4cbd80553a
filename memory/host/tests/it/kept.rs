//! Pages that a notifier cannot unmap stay resident, and reclaim takes others.

use crate::common;

use common::{Use, Vm, virtual_host};
use lacuna_addr::PageCount;
use lacuna_host::{FaultyStore, Host};

#[test]
fn a_page_that_cannot_be_unmapped_stays() {
    let budget = Host::minimum_budget(2).get();
    let (host, clock) = virtual_host(budget, Box::new(FaultyStore::new(PageCount::new(4000))));
    let mut vm = Vm::new(&host, &clock, 3 * budget);
    vm.touch(5, Use::Write(55)).unwrap();
    let page = vm.range.start().checked_add_pages(5);
    *vm.mmu.pinned.lock().unwrap() = page;
    let is_resident = |vm: &Vm| vm.host.peek(page.unwrap(), &mut [0; 8]).is_some();
    let others = |vm: &mut Vm| {
        for page in 10..vm.range.pages() {
            vm.touch(page, Use::Write(page)).unwrap();
            assert_eq!(vm.host.stats().budget, budget);
        }
    };
    for _ in 0..3 {
        others(&mut vm);
        assert!(is_resident(&vm));
        host.verify();
    }
    *vm.mmu.pinned.lock().unwrap() = None;
    others(&mut vm);
    assert!(!is_resident(&vm));
    vm.check_all();
    host.verify();
}
