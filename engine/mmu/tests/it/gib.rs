//! A slot over one huge page of 1 GiB of the machine, mapped, logged and discarded.

use lacuna_addr::{Access, Gfn, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Host, HostConfig, HugePages, Io, LinuxBacking, MemoryStore, MmuNotifier, SharedMemory,
    linux_room,
};
use lacuna_mmu::{Detection, HugeLeaves, Initially, Logging, Mmu, Outcome, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_sync::{HostClock, Qsbr};
use std::sync::Arc;

const GIB: u64 = Level::L1G.pages();
const SLOT: SlotId = SlotId(0);

/// The level of the leaf that maps page `page` of the slot after a write.
fn write(mmu: &Mmu, vcpu: &mut VcpuMmu, page: u64) -> Level {
    let gfn = Gfn::new(GIB + page).unwrap();
    let outcome = mmu.fault(vcpu, gfn, Access::Write);
    vcpu.retired();
    let Outcome::Mapped(page) = outcome else {
        panic!("gfn {gfn}")
    };
    page.level
}

#[lacuna_skip::test]
fn a_huge_page_of_the_machine_is_one_leaf_until_its_pages_are_logged() {
    let _reserved = lacuna_skip::HugePages::reserve_1g(1);
    let pages = PageCount::new(GIB);
    let config = HostConfig {
        budget: Host::minimum_budget(1),
        huge: HugePages::Never,
        swap: Box::new(MemoryStore::new()),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    };
    let host = Host::with_linux_memory(config, linux_room(Level::L1G, [pages])).unwrap();
    let mmu: Arc<Mmu> = Mmu::new(Arc::clone(&host), Arc::new(Qsbr::new(1)), 4096).unwrap();
    let memory = LinuxBacking::Shared(SharedMemory::huge(pages, Level::L1G).unwrap());
    let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
    let backing = host.add_linux_region_in(memory, None, pages, notifier);
    let backing = backing.unwrap();
    let spec = SlotSpec {
        id: SLOT,
        guest: GIB * PAGE_SIZE as u64,
        backing: backing.start(),
        bytes: pages.bytes(),
        flags: SlotFlags::empty(),
    };
    mmu.add_slot(spec).unwrap();
    let mut vcpu = mmu.vcpu_mmu().unwrap();
    let is_mapped_by = |leaves: [u64; 3]| {
        mmu.verify();
        assert_eq!(mmu.counts().leaves, leaves);
    };
    assert_eq!(write(&mmu, &mut vcpu, 700), Level::L1G);
    is_mapped_by([0, 0, 1]);
    assert_eq!(host.linux_pages(), pages);

    for detection in [Detection::Pml, Detection::WriteProtect] {
        mmu.set_detection(detection);
        let on = Logging::On {
            initially: Initially::Clean,
            huge: HugeLeaves::Lazy,
        };
        mmu.set_logging(SLOT, on).unwrap();
        assert_eq!(write(&mmu, &mut vcpu, 5 * 512 + 3), Level::L4K);
        is_mapped_by([512, 511, 0]);
        let mut words = vec![0; (GIB / 64) as usize];
        mmu.get_dirty(SLOT, &mut words).unwrap();
        let dirty: u32 = words.iter().map(|word| word.count_ones()).sum();
        assert_eq!((dirty, words[40]), (1, 1 << 3));
        mmu.set_logging(SLOT, Logging::Off).unwrap();
        is_mapped_by([0, 0, 1]);
    }

    // Leaves are 4 KiB while huge ones are disallowed, and one again afterwards.
    let few = lacuna_addr::GfnRange::new(Gfn::new(GIB + 600).unwrap(), 1).unwrap();
    mmu.disallow_huge(few).unwrap();
    is_mapped_by([512, 511, 0]);
    mmu.allow_huge(few);
    is_mapped_by([0, 0, 1]);

    host.copy_in(backing.start(), &[7; 8]).unwrap();
    host.discard(backing).unwrap();
    is_mapped_by([0; 3]);
    let mut word = [1; 8];
    host.copy_out(backing.start(), &mut word).unwrap();
    assert_eq!(word, [0; 8]);
    assert_eq!(write(&mmu, &mut vcpu, 0), Level::L1G);
    host.verify();
    mmu.delete_slot(SLOT).unwrap();
    is_mapped_by([0; 3]);
    host.remove_region(backing).unwrap();
}
