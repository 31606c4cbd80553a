//! The walk against a plain model of SDM vol 3 4.6 and 4.7, then its races, its cache and its cost.

use super::*;
use crate::state::bits::CR4_PAE;
use lacuna_cpu::testing::Ram;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64};

const VA: u64 = 0xffff_8012_3456_7abc;
/// Table pages: PML4, PDPT, PD, PT.
const TABLES: [u64; 4] = [0x11, 0x22, 0x33, 0x44];
const SHIFTS: [u32; 4] = [39, 30, 21, 12];

fn gfn(n: u64) -> Gfn {
    Gfn::new(n).unwrap()
}

fn system() -> System {
    let mut sys = System::long_mode(TABLES[0] << 12);
    sys.cr0 |= CR0_WP;
    sys.cr4 = CR4_PAE;
    sys.efer |= EFER_NXE;
    sys
}

/// Tables for `VA` with these four entries. This fills in the frames of non-leaf entries.
fn tables(entries: [u64; 4]) -> Ram {
    let mut ram = Ram::default();
    for level in 0..4 {
        let entry = match TABLES.get(level + 1) {
            Some(next) if entries[level] & LARGE == 0 => entries[level] | next << 12,
            _ => entries[level],
        };
        ram.add(gfn(TABLES[level]))
            .store_u64(offset(VA, SHIFTS[level]), entry);
    }
    ram
}

fn entry(ram: &mut Ram, level: usize) -> u64 {
    ram.add(gfn(TABLES[level]))
        .load_u64(offset(VA, SHIFTS[level]))
}

fn set_entry(ram: &mut Ram, level: usize, value: u64) {
    ram.add(gfn(TABLES[level]))
        .store_u64(offset(VA, SHIFTS[level]), value);
}

fn page_fault(result: Result<Mapping, Trap>) -> u32 {
    match result {
        Err(Trap::Exception(Exception {
            vector: 14,
            error: Some(error),
            cr2: Some(VA),
        })) => error,
        other => panic!("not a page fault: {other:?}"),
    }
}

/// Present, writable, user: the most permissive table entry.
const OPEN: u64 = PRESENT | WRITE | USER;
const LEAF: u64 = OPEN | 0x1_2345_6000;

/// One entry in words.
#[derive(Clone, Copy, Debug)]
struct Plain {
    present: bool,
    write: bool,
    user: bool,
    nx: bool,
    accessed: bool,
    dirty: bool,
    reserved: bool,
}

impl Plain {
    fn bits(self) -> u64 {
        let bit = |on: bool, mask: u64| if on { mask } else { 0 };
        bit(self.present, PRESENT)
            | bit(self.write, WRITE)
            | bit(self.user, USER)
            | bit(self.nx, NO_EXECUTE)
            | bit(self.accessed, ACCESSED)
            | bit(self.dirty, DIRTY)
            | bit(self.reserved, 1 << 50)
    }
}

fn mostly() -> impl Strategy<Value = bool> {
    prop::sample::select(vec![true, true, true, true, true, false])
}

prop_compose! {
    fn plain()(
        present in mostly(), write in mostly(), user in mostly(), not_nx in mostly(),
        accessed: bool, dirty: bool, rsvd in 0..24u8,
    ) -> Plain {
        Plain { present, write, user, nx: !not_nx, accessed, dirty, reserved: rsvd == 0 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ask {
    access: Access,
    user: User,
    wp: bool,
    smep: bool,
    nxe: bool,
}

prop_compose! {
    fn ask()(
        access in prop::sample::select(vec![Access::Read, Access::Write, Access::Fetch]),
        user in prop::sample::select(vec![User::Supervisor, User::User]),
        wp: bool, smep: bool, nxe in mostly(),
    ) -> Ask {
        Ask { access, user, wp, smep, nxe }
    }
}

/// The manual's rule: the error code, or (writable, user, exec) with D taken as set.
fn model(levels: &[Plain], ask: Ask) -> Result<(bool, bool, bool), u32> {
    let is_user = ask.user == User::User;
    let error = |p: bool, rsvd: bool| {
        u32::from(p)
            + 2 * u32::from(ask.access == Access::Write)
            + 4 * u32::from(is_user)
            + 8 * u32::from(rsvd)
            + 16 * u32::from(ask.access == Access::Fetch && (ask.nxe || ask.smep))
    };
    for level in levels {
        if !level.present {
            return Err(error(false, false));
        }
        if level.reserved || (level.nx && !ask.nxe) {
            return Err(error(true, true));
        }
    }
    let all = |f: fn(&Plain) -> bool| levels.iter().all(f);
    let user_page = all(|l| l.user);
    let mut write = all(|l| l.write);
    let mut exec = all(|l| !l.nx);
    if !is_user {
        write |= !ask.wp;
        exec &= !(user_page && ask.smep);
    }
    let allowed = match ask.access {
        Access::Read => true,
        Access::Write => write,
        Access::Fetch => exec,
    };
    if !allowed || (is_user && !user_page) {
        return Err(error(true, false));
    }
    Ok((write, user_page, exec))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Result, error code, A and D of every level, at every leaf size, with a cold and a warm
    /// cache.
    #[test]
    fn permissions_match_the_manual(levels: [Plain; 4], depth in 2..=4usize, asks: [Ask; 3]) {
        let mut bits = levels.map(Plain::bits);
        bits[depth - 1] |= if depth < 4 { LARGE } else { 0 } | 0x7f_c000_0000;
        let mut ram = tables(bits);
        let mut cache = WalkCache::default();
        let mut expected = std::array::from_fn::<u64, 4, _>(|i| entry(&mut ram, i));
        for ask in asks {
            let mut sys = system();
            sys.cr0 = if ask.wp { sys.cr0 } else { sys.cr0 & !CR0_WP };
            sys.cr4 = if ask.smep { sys.cr4 | CR4_SMEP } else { sys.cr4 };
            sys.efer = if ask.nxe { sys.efer } else { sys.efer & !EFER_NXE };
            cache.flush();
            for _ in 0..2 {
                let got = walk(&sys, &mut cache, &mut ram, VA, ask.access, ask.user);
                let want = model(&levels[..depth], ask);
                // A is set on every table entry on the way; on the leaf only if it is used.
                for level in 0..depth {
                    let look = Ask { access: Access::Read, user: User::Supervisor, ..ask };
                    if model(&levels[..=level], look).is_err() {
                        break;
                    }
                    if level < depth - 1 || want.is_ok() {
                        expected[level] |= ACCESSED;
                    }
                    if level == depth - 1 && want.is_ok() && ask.access == Access::Write {
                        expected[level] |= DIRTY;
                    }
                }
                match want {
                    Err(error) => prop_assert_eq!(page_fault(got), error),
                    Ok((write, user, exec)) => {
                        let below = (1u64 << SHIFTS[depth - 1]) - 1;
                        let frame = (0x7f_c000_0000 & !below | VA & below) >> 12;
                        let dirty = expected[depth - 1] & DIRTY != 0;
                        let writable = write && dirty;
                        let global = false;
                        let level = Level::ALL[4 - depth];
                        let want = Mapping { gfn: gfn(frame), writable, user, exec, global, level };
                        prop_assert_eq!(got, Ok(want));
                    }
                }
                let now = std::array::from_fn::<u64, 4, _>(|i| entry(&mut ram, i));
                prop_assert_eq!(now, expected);
            }
        }
    }

    /// Hostile tables: any bytes, tables as their own children, missing memory.
    #[test]
    fn any_tables_end(words in prop::collection::vec(any::<u64>(), 64), cr3: u64, vas: [u64; 8]) {
        let mut ram = Ram::default();
        for (i, word) in words.iter().enumerate() {
            // Frames 0 to 15 are tables, and most entries point among them.
            let page = ram.add(gfn(i as u64 % 16));
            for slot in 0..8 {
                let word = word.rotate_left(slot * 8);
                let frame = if word & 3 == 0 { word & FRAME } else { word >> 20 & 0xf000 };
                let entry = word & !(FRAME | RESERVED_HIGH) | frame | PRESENT;
                page.store_u64(((word >> 40) as usize % 512) & !7, entry);
            }
        }
        let mut sys = system();
        sys.cr3 = cr3 & 0xf000;
        let mut cache = WalkCache::default();
        for va in vas {
            let va = ((va << 16) as i64 >> 16) as u64 & !0x1_ffff_f000;
            let first = walk(&sys, &mut cache, &mut ram, va, Access::Write, User::Supervisor);
            if let Err(trap) = first {
                let is_fault = matches!(trap, Trap::Exception(Exception { vector: 14, .. }));
                prop_assert!(is_fault || trap == Trap::Stop(Stop::Again), "{trap:?}");
            }
        }
    }
}

impl Arbitrary for Plain {
    type Parameters = ();
    type Strategy = BoxedStrategy<Self>;
    fn arbitrary_with((): ()) -> Self::Strategy {
        plain().boxed()
    }
}

impl Arbitrary for Ask {
    type Parameters = ();
    type Strategy = BoxedStrategy<Self>;
    fn arbitrary_with((): ()) -> Self::Strategy {
        ask().boxed()
    }
}

#[test]
fn reserved_bits_fault_with_bit_3() {
    let sys = system();
    let cases: [(usize, u64, bool); 10] = [
        (0, LARGE, true),
        (0, 1 << 48, true),
        (1, 1 << 51, true),
        (3, 1 << 50, true),
        (1, LARGE | 1 << 29, true),
        (1, LARGE | 1 << 13, true),
        (1, LARGE | 1 << 12, false),
        (2, LARGE | 1 << 20, true),
        (2, LARGE | 1 << 12, false),
        (3, 1 << 62 | 1 << 52 | LARGE | 7 << 9, false),
    ];
    for (level, bits, reserved) in cases {
        let mut entries = [OPEN; 4];
        entries[level] |= bits;
        let mut ram = tables(entries);
        let got = walk(
            &sys,
            &mut WalkCache::default(),
            &mut ram,
            VA,
            Access::Read,
            User::User,
        );
        if reserved {
            assert_eq!(page_fault(got), 1 | 4 | 8, "level {level} bits {bits:#x}");
        } else {
            assert!(got.is_ok(), "level {level} bits {bits:#x}");
        }
    }
}

#[test]
fn a_table_without_memory_is_a_reserved_fault_and_a_swapped_one_a_stop() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    set_entry(&mut ram, 2, OPEN | 0x7777_0000);
    let mut cache = WalkCache::default();
    let got = walk(&sys, &mut cache, &mut ram, VA, Access::Write, User::User);
    assert_eq!(page_fault(got), 1 | 2 | 4 | 8);
    set_entry(&mut ram, 2, OPEN | TABLES[3] << 12);
    for (level, table) in TABLES.into_iter().enumerate() {
        ram.swapped.insert(gfn(table));
        for _ in 0..2 {
            let got = walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User);
            assert_eq!(got, Err(Trap::Stop(Stop::Wait)), "level {level}");
        }
        ram.swapped.clear();
        cache.flush();
    }
    assert!(walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User).is_ok());
    ram.swapped.insert(gfn(TABLES[3]));
    let before = ram.lookups;
    let got = walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User);
    assert_eq!(got, Err(Trap::Stop(Stop::Wait)));
    assert_eq!(
        ram.lookups - before,
        1,
        "the cached path reports the stop itself"
    );
}

#[test]
fn non_canonical_is_gp() {
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    for va in [1 << 47, 0xffff_7fff_ffff_ffff, VA ^ 1 << 63] {
        let mut cache = WalkCache::default();
        let sys = system();
        // The cache's tag lacks the upper bits, so the cache must not answer for such addresses.
        walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User).unwrap();
        let got = walk(&sys, &mut cache, &mut ram, va, Access::Read, User::User);
        assert_eq!(got, Err(Exception::GP0.into()), "{va:#x}");
    }
}

#[test]
fn the_cache_reads_one_entry_and_forgets_when_told() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    let mut cache = WalkCache::default();
    let lookups = |cache: &mut WalkCache, ram: &mut Ram| {
        let before = ram.lookups;
        walk(&sys, cache, ram, VA, Access::Read, User::User).unwrap();
        ram.lookups - before
    };
    assert_eq!(lookups(&mut cache, &mut ram), 4);
    assert_eq!(lookups(&mut cache, &mut ram), 1);
    cache.flush();
    assert_eq!(lookups(&mut cache, &mut ram), 4);
}

/// A PDE with added rights needs no INVLPG: a walk that would fault reads the PDE again. Rights
/// removed from a PDE may still be used until the flush.
#[test]
fn a_fault_is_never_due_to_the_cache() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, PRESENT | USER, LEAF]);
    let mut cache = WalkCache::default();
    walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User).unwrap();
    set_entry(&mut ram, 2, OPEN | TABLES[3] << 12);
    let write = walk(&sys, &mut cache, &mut ram, VA, Access::Write, User::User);
    assert!(write.is_ok_and(|m| m.writable));
    set_entry(&mut ram, 2, 0);
    cache.flush();
    let read = walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User);
    assert_eq!(page_fault(read), 4);
}

#[test]
fn setting_bits_in_a_code_page_is_reported_once() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    ram.track_code(gfn(TABLES[3])).unwrap();
    let mut cache = WalkCache::default();
    walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User).unwrap();
    assert_eq!(ram.code_written, [gfn(TABLES[3])]);
    assert!(cache.take_wrote_code());
    assert!(!cache.take_wrote_code());
    walk(&sys, &mut cache, &mut ram, VA, Access::Read, User::User).unwrap();
    assert_eq!(ram.code_written.len(), 1, "nothing was set the second time");
}

/// The update of an entry fails if the entry has changed since its load; the entry stays.
#[test]
fn a_stale_update_is_a_race() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    let page = ram.add(gfn(TABLES[3]));
    let loaded = entry(&mut ram, 3) ^ NO_EXECUTE;
    let other = LEAF & !WRITE;
    set_entry(&mut ram, 3, other);
    let mut cache = WalkCache::default();
    let (access, user) = (Access::Write, User::User);
    let mut walker = Walker {
        sys: &sys,
        cache: &mut cache,
        bus: &mut ram,
        va: VA,
        access,
        user,
    };
    let update = walker.update(page, gfn(TABLES[3]), 12, loaded, ACCESSED | DIRTY);
    assert!(matches!(update, Err(Miss::Raced)));
    assert_eq!(entry(&mut ram, 3), other);
}

/// Another processor clears and sets the write permission all the time, as a kernel does for
/// copy-on-write. An entry without W must never gain D.
#[test]
fn d_is_never_set_on_an_entry_without_w() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    let at = offset(VA, 12);
    let stop = AtomicBool::new(false);
    // `HostPage` must not cross threads; the atomic behind it may.
    let page = ram.add(gfn(TABLES[3]));
    let word: &AtomicU64 = page.word(at);
    let bad = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut bad = 0u32;
            while !stop.load(Ordering::Relaxed) {
                word.store(LEAF & !WRITE, Ordering::Release);
                std::hint::spin_loop();
                bad += u32::from(word.swap(LEAF, Ordering::AcqRel) & DIRTY != 0);
            }
            bad
        });
        let mut cache = WalkCache::default();
        let (mut granted, mut refused) = (0, 0);
        while granted < 1000 || refused < 1000 {
            match walk(&sys, &mut cache, &mut ram, VA, Access::Write, User::User) {
                Ok(mapping) => {
                    assert!(mapping.writable);
                    granted += 1;
                }
                Err(Trap::Stop(Stop::Again)) => std::thread::yield_now(),
                fault => {
                    assert_eq!(page_fault(fault), 1 | 2 | 4);
                    refused += 1;
                }
            }
            if (granted + refused) % 64 == 0 {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    assert_eq!(bad, 0);
}

/// 2 MiB to 2 GiB of 4 KiB pages, walked at random with a warm cache: checks that a walk reads one
/// entry, and prints its cost (`cargo test --release walk_cost -- --nocapture`).
#[test]
fn walk_cost() {
    let sys = system();
    let mut ram = tables([OPEN, OPEN, OPEN, LEAF]);
    let base = VA & !0xffff_ffff;
    let (pdpt, first_pd, first_pt) = (gfn(TABLES[1]), 0x100, 0x200);
    for gib in 0..2 {
        pdpt_entry(&mut ram, pdpt, base, gib, first_pd);
    }
    for block in 0..1024u64 {
        let pd = ram.add(gfn(first_pd + block / 512));
        pd.store_u64(block as usize % 512 * 8, OPEN | (first_pt + block) << 12);
        let pt = ram.add(gfn(first_pt + block));
        for page in 0..512 {
            pt.store_u64(
                page * 8,
                OPEN | ACCESSED | DIRTY | (block << 9 | page as u64) << 12,
            );
        }
    }
    for mib in [2u64, 64, 512, 2048] {
        let mut cache = WalkCache::default();
        let mut run = |rounds: u32, ram: &mut Ram| {
            let mut random = 1u64;
            let start = std::time::Instant::now();
            for _ in 0..rounds {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let va = base + ((random >> 20) & ((mib << 20) - 1));
                let mapping = walk(&sys, &mut cache, ram, va, Access::Write, User::User);
                assert_eq!(mapping.unwrap().gfn.get(), (va - base) >> 12);
            }
            start.elapsed().as_nanos() as f64 / f64::from(rounds)
        };
        run(50_000, &mut ram);
        let before = ram.lookups;
        let ns = run(200_000, &mut ram);
        println!("walk, random over {mib:4} MiB, warm cache: {ns:.1} ns");
        assert_eq!(ram.lookups - before, 200_000);
    }
}

fn pdpt_entry(ram: &mut Ram, pdpt: Gfn, base: u64, gib: u64, first_pd: u64) {
    ram.add(pdpt).store_u64(
        offset(base + (gib << 30), 30),
        OPEN | (first_pd + gib) << 12,
    );
}

#[test]
fn a_leaf_is_global_if_its_bit_and_cr4_say_so() {
    for (bit, pge, wanted) in [
        (0, CR4_PGE, false),
        (GLOBAL, 0, false),
        (GLOBAL, CR4_PGE, true),
    ] {
        // G in the levels above has no effect.
        let upper = PRESENT | WRITE | (1 << 8);
        let mut ram = tables([upper, upper, upper, PRESENT | bit | 0x55_5000]);
        let mut sys = system();
        sys.cr4 |= pge;
        let (mut cache, user) = (WalkCache::default(), User::Supervisor);
        for _ in 0..2 {
            let got = walk(&sys, &mut cache, &mut ram, VA, Access::Read, user);
            assert_eq!(got.map(|mapping| mapping.global), Ok(wanted));
        }
    }
}
