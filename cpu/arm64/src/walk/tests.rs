//! The walk against a plain model of Arm ARM D8.3 and D8.4, then a table of its faults: address
//! ranges, output sizes, reserved descriptors, missing tables. Also its cache and its cost.

use super::*;
use lacuna_cpu::testing::Ram;
use proptest::prelude::*;

const VA: u64 = 0x1234_5678_9abc;
/// Table pages of levels 0 to 3.
const TABLES: [u64; 4] = [0x11, 0x22, 0x33, 0x44];
const SHIFTS: [u32; 4] = [39, 30, 21, 12];
/// TG1 = 4 KiB, IPS = 48 bits.
const GRANULE: u64 = 2 << 30 | 5 << 32;
const OUTPUT: u64 = 0x7f_c000_0000;
const TABLE_ENTRY: u64 = VALID | TABLE;

fn gfn(n: u64) -> Gfn {
    Gfn::new(n).unwrap()
}

fn system() -> System {
    System {
        sctlr: sctlr::RES1 | sctlr::M,
        tcr: GRANULE | 16 | 16 << 16,
        ttbr0: TABLES[0] << 12,
        ttbr1: TABLES[0] << 12,
        ..System::default()
    }
}

fn place(level: usize) -> usize {
    (VA >> SHIFTS[level] & 511) as usize * 8
}

/// Tables for `VA` with these four descriptors. This fills in the frames of table descriptors.
fn tables(entries: [u64; 4]) -> Ram {
    let mut ram = Ram::default();
    for level in 0..4 {
        let entry = match TABLES.get(level + 1) {
            Some(next) if entries[level] & TABLE != 0 => entries[level] | next << 12,
            _ => entries[level],
        };
        ram.add(gfn(TABLES[level])).store_u64(place(level), entry);
    }
    ram
}

fn entry(ram: &mut Ram, level: usize) -> u64 {
    ram.add(gfn(TABLES[level])).load_u64(place(level))
}

fn request(va: u64, access: Access, user: Privilege) -> Request {
    Request {
        va,
        access,
        user,
        purpose: Purpose::Access,
    }
}

fn read(sys: &System, ram: &mut Ram, va: u64) -> Result<Found, Trap> {
    let request = request(va, Access::Read, Privilege::Supervisor);
    walk(sys, &mut WalkCache::default(), ram, request)
}

/// The fault status code of an abort at `va`.
fn code(result: Result<Found, Trap>, va: u64) -> u32 {
    match result {
        Err(Trap::Exception(Exception {
            class: 0x20 | 0x24,
            iss,
            far: Some(far),
        })) if far == va => iss & 0x3f,
        other => panic!("no abort: {other:?}"),
    }
}

/// One descriptor in words.
#[derive(Clone, Copy, Debug)]
struct Plain {
    valid: bool,
    // In a table.
    no_user: bool,
    no_write: bool,
    no_user_fetch: bool,
    no_kernel_fetch: bool,
    // In a leaf.
    user: bool,
    read_only: bool,
    accessed: bool,
    dirty_modifier: bool,
    uxn: bool,
    pxn: bool,
    not_global: bool,
}

impl Plain {
    fn table(self) -> u64 {
        let bit = |on: bool, mask: u64| if on { mask } else { 0 };
        bit(self.valid, VALID)
            | TABLE
            | bit(self.no_user, 1 << 61)
            | bit(self.no_write, 1 << 62)
            | bit(self.no_user_fetch, 1 << 60)
            | bit(self.no_kernel_fetch, 1 << 59)
    }

    fn leaf(self, level: usize) -> u64 {
        let bit = |on: bool, mask: u64| if on { mask } else { 0 };
        bit(self.valid, VALID)
            | bit(level == 3, TABLE)
            | bit(self.user, 1 << 6)
            | bit(self.read_only, 1 << 7)
            | bit(self.accessed, 1 << 10)
            | bit(self.not_global, 1 << 11)
            | bit(self.dirty_modifier, 1 << 51)
            | bit(self.pxn, 1 << 53)
            | bit(self.uxn, 1 << 54)
            | OUTPUT
    }
}

fn seldom() -> impl Strategy<Value = bool> {
    prop::sample::select(vec![false, false, false, false, false, true])
}

prop_compose! {
    fn plain()(
        invalid in seldom(), limits in prop::array::uniform4(seldom()), user: bool,
        read_only: bool, not_accessed in seldom(), dirty_modifier: bool, xn: [bool; 2],
        not_global: bool,
    ) -> Plain {
        Plain {
            valid: !invalid,
            no_user: limits[0],
            no_write: limits[1],
            no_user_fetch: limits[2],
            no_kernel_fetch: limits[3],
            user,
            read_only,
            accessed: !not_accessed,
            dirty_modifier,
            uxn: xn[0],
            pxn: xn[1],
            not_global,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ask {
    access: Access,
    user: Privilege,
    purpose: Purpose,
    pan: bool,
    wxn: bool,
    ha: bool,
    hd: bool,
}

prop_compose! {
    fn ask()(
        access in prop::sample::select(vec![Access::Read, Access::Write, Access::Fetch]),
        user in prop::sample::select(vec![Privilege::Supervisor, Privilege::User]),
        probe in seldom(), pan: bool, wxn: bool, ha: bool, hd: bool,
    ) -> Ask {
        let purpose = if probe { Purpose::Probe } else { Purpose::Access };
        Ask { access, user, purpose, pan, wxn, ha, hd }
    }
}

/// A translation by the manual: the rights, and whether the leaf is marked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Want {
    readable: bool,
    writable: bool,
    exec: bool,
    makes_dirty: bool,
}

/// D8.4, in the manual's order: translation faults level by level, the access flag, permissions.
/// The last of `levels` is the leaf. `Err` is the status code.
fn model(levels: &[Plain], ask: Ask) -> Result<Want, u32> {
    let last = levels.len() as u32 - 1;
    for (level, plain) in (0..).zip(levels) {
        if !plain.valid {
            return Err(0x04 + level);
        }
    }
    let (leaf, tables) = levels.split_last().unwrap();
    if !leaf.accessed && !ask.ha {
        return Err(0x08 + last);
    }
    let any = |f: fn(&Plain) -> bool| tables.iter().any(f);
    let clean = ask.ha && ask.hd && leaf.dirty_modifier && leaf.read_only;
    let user_page = leaf.user && !any(|t| t.no_user);
    let write_page = (!leaf.read_only || clean) && !any(|t| t.no_write);
    let user_xn = leaf.uxn || any(|t| t.no_user_fetch) || user_page && write_page && ask.wxn;
    let kernel_xn =
        leaf.pxn || any(|t| t.no_kernel_fetch) || write_page && ask.wxn || user_page && write_page;
    let (readable, may_write, exec) = match ask.user {
        Privilege::User => (user_page, user_page && write_page, !user_xn),
        Privilege::Supervisor => {
            let never = user_page && ask.pan && ask.purpose == Purpose::Access;
            (!never, write_page && !never, !kernel_xn)
        }
    };
    let allowed = match ask.access {
        Access::Read => readable,
        Access::Write => may_write,
        Access::Fetch => exec,
    };
    if !allowed {
        return Err(0x0c + last);
    }
    let makes_dirty = clean && ask.access == Access::Write && ask.purpose == Purpose::Access;
    Ok(Want {
        readable,
        writable: may_write && (!clean || makes_dirty),
        exec,
        makes_dirty,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Result, fault status, access flag and dirty state, at every size of leaf, with a cold and a
    /// warm cache, several requests one after the other.
    #[test]
    fn permissions_match_the_manual(
        levels in prop::array::uniform4(plain()),
        depth in 2..=4usize,
        asks in prop::array::uniform3(ask()),
    ) {
        let mut levels = levels;
        let mut bits = levels.map(Plain::table);
        bits[depth - 1] = levels[depth - 1].leaf(depth - 1);
        let mut ram = tables(bits);
        let mut cache = WalkCache::default();
        let mut leaf = entry(&mut ram, depth - 1);
        for ask in asks {
            let mut sys = system();
            sys.pan = ask.pan;
            sys.sctlr |= if ask.wxn { sctlr::WXN } else { 0 };
            sys.tcr |= if ask.ha { tcr::HA } else { 0 } | if ask.hd { tcr::HD } else { 0 };
            cache.flush();
            for _ in 0..2 {
                let want = model(&levels[..depth], ask);
                let request = Request {
                    va: VA,
                    access: ask.access,
                    user: ask.user,
                    purpose: ask.purpose,
                };
                let got = walk(&sys, &mut cache, &mut ram, request);
                match want {
                    Err(status) => prop_assert_eq!(code(got, VA), status),
                    Ok(want) => {
                        let found = got.unwrap();
                        let below = (1u64 << SHIFTS[depth - 1]) - 1;
                        let frame = (OUTPUT & !below | VA & below) >> 12;
                        prop_assert_eq!(found.mapping.gfn, gfn(frame));
                        prop_assert_eq!(found.readable, want.readable);
                        prop_assert_eq!(found.mapping.writable, want.writable);
                        prop_assert_eq!(found.mapping.exec, want.exec);
                        prop_assert_eq!(found.mapping.global, !levels[depth - 1].not_global);
                        let sizes = [Level::L1G, Level::L2M, Level::L4K];
                        prop_assert_eq!(found.mapping.level, sizes[depth - 2]);
                        levels[depth - 1].accessed = true;
                        leaf |= AF;
                        if want.makes_dirty {
                            levels[depth - 1].read_only = false;
                            leaf &= !AP_READ_ONLY;
                        }
                    }
                }
                prop_assert_eq!(entry(&mut ram, depth - 1), leaf);
                for level in 0..depth - 1 {
                    let unchanged = bits[level] | TABLES[level + 1] << 12;
                    prop_assert_eq!(entry(&mut ram, level), unchanged, "a table has no flags");
                }
            }
        }
    }
}

/// A chain of tables: every descriptor of level 3 maps a page, and every other one leads on.
fn any_address() -> Ram {
    let mut ram = Ram::default();
    for (level, table) in TABLES.into_iter().enumerate() {
        let entry = match TABLES.get(level + 1) {
            Some(next) => TABLE_ENTRY | next << 12,
            None => TABLE_ENTRY | AF | OUTPUT,
        };
        let page = ram.add(gfn(table));
        (0..512).for_each(|index| page.store_u64(index * 8, entry));
    }
    ram
}

/// D8.2, tables D8-14 to D8-16: the range and the first level for each TnSZ, of both halves.
#[test]
fn ranges_and_first_levels() {
    let mut ram = any_address();
    for tsz in 0..64 {
        let (first, levels) = match tsz {
            16..=24 => (0, 4),
            25..=33 => (1, 3),
            34..=39 => (2, 2),
            _ => (0, 0),
        };
        let root = TABLES[first] << 12;
        let sys = System {
            tcr: GRANULE | tsz | tsz << 16,
            ttbr0: root,
            ttbr1: root,
            ..system()
        };
        if levels == 0 {
            assert_eq!(code(read(&sys, &mut ram, 0), 0), 0x04, "TnSZ {tsz}");
            assert_eq!(
                code(read(&sys, &mut ram, u64::MAX), u64::MAX),
                0x04,
                "TnSZ {tsz}"
            );
            continue;
        }
        let end = 1_u64 << (64 - tsz);
        for va in [0, end - 1, end.wrapping_neg(), u64::MAX, end / 2, end / 3] {
            ram.lookups = 0;
            read(&sys, &mut ram, va).unwrap_or_else(|e| panic!("TnSZ {tsz}, {va:#x}: {e:?}"));
            assert_eq!(ram.lookups, levels, "TnSZ {tsz}");
        }
        for va in [end, end.wrapping_neg() - 1, 1 << 55, 1 << 63, !(1 << 63)] {
            assert_eq!(
                code(read(&sys, &mut ram, va), va),
                0x04,
                "TnSZ {tsz}, {va:#x}"
            );
        }
    }
}

/// D17.2.144: a first table with few entries is aligned to its own size, and begins inside a page.
#[test]
fn a_small_first_table() {
    let mut ram = any_address();
    // 25 bits of address: 16 descriptors of level 2, 128 bytes.
    let page = ram.add(gfn(0x55));
    page.store_u64(0x180 + 5 * 8, TABLE_ENTRY | TABLES[3] << 12);
    for ttbr0 in [0x5_5180, 0x5_51fe, 0xabcd << 48 | 0x5_5181] {
        let sys = System {
            tcr: GRANULE | 39 | 16 << 16,
            ttbr0,
            ..system()
        };
        read(&sys, &mut ram, 5 << 21).unwrap();
        assert_eq!(
            code(read(&sys, &mut ram, 6 << 21), 6 << 21),
            0x06,
            "{ttbr0:#x}"
        );
    }
}

/// D17.2.131: EPD0 and EPD1.
#[test]
fn a_disabled_half_faults_at_level_0() {
    let mut ram = any_address();
    let (low, high) = (VA, VA | 0xffff << 48);
    for (bit, faults, translates) in [(tcr::EPD0, low, high), (tcr::EPD1, high, low)] {
        let mut sys = system();
        sys.tcr |= bit;
        assert_eq!(code(read(&sys, &mut ram, faults), faults), 0x04);
        read(&sys, &mut ram, translates).unwrap();
    }
}

/// D8.9.1: with TBI, bits 63 to 56 do not count, and FAR has them all the same.
#[test]
fn tags() {
    let mut ram = any_address();
    let (low, high) = (VA | 0xa5 << 56, VA | 0xa5 << 56 | 0xff_u64 << 48);
    for (bits, low_works, high_works) in [
        (0, false, false),
        (tcr::TBI0, true, false),
        (tcr::TBI1, false, true),
        (tcr::TBI0 | tcr::TBI1, true, true),
    ] {
        let mut sys = system();
        sys.tcr |= bits;
        for (va, works) in [(low, low_works), (high, high_works)] {
            match works {
                true => assert!(read(&sys, &mut ram, va).unwrap().tagged),
                false => assert_eq!(code(read(&sys, &mut ram, va), va), 0x04, "{bits:#x}"),
            }
        }
    }
    assert!(!read(&system(), &mut ram, VA).unwrap().tagged);
}

/// D8.3.1.1: an output address above IPS is an address size fault at the level of its descriptor. A
/// table inside that range has no memory here, and the next level fails.
#[test]
fn output_addresses() {
    for (ips, bits) in [
        (0, 32),
        (1, 36),
        (2, 40),
        (3, 42),
        (4, 44),
        (5, 48),
        (6, 48),
        (7, 48),
    ] {
        let mut sys = system();
        sys.tcr = 16 | 16 << 16 | ips << 32;
        for (level, bit) in (0..4).flat_map(|level| (31..48).map(move |bit| (level, bit))) {
            let mut ram = any_address();
            let entry = TABLE_ENTRY | AF | 1 << bit;
            let walked = TABLE_ENTRY | AF;
            ram.add(gfn(TABLES[3])).store_u64(place(3), walked);
            ram.add(gfn(TABLES[level])).store_u64(place(level), entry);
            let result = read(&sys, &mut ram, VA);
            if bit >= bits {
                assert_eq!(code(result, VA), level as u32, "IPS {ips}, bit {bit}");
            } else if level < 3 {
                assert_eq!(
                    code(result, VA),
                    0x15 + level as u32,
                    "IPS {ips}, bit {bit}"
                );
            } else {
                assert_eq!(result.unwrap().mapping.gfn, gfn(1 << (bit - 12)));
            }
        }
        sys.ttbr0 = 1 << 47;
        let expected = if bits < 48 { 0x00 } else { 0x14 };
        assert_eq!(
            code(read(&sys, &mut any_address(), VA), VA),
            expected,
            "TTBR, IPS {ips}"
        );
    }
}

/// D8.3.1: reserved encodings are invalid: a block at level 0, a block at level 3.
#[test]
fn reserved_descriptors() {
    for (level, entry) in [
        (0, VALID | AF),
        (3, VALID | AF),
        (0, TABLE | AF),
        (1, TABLE | AF),
        (2, 0),
        (3, !VALID),
    ] {
        let mut ram = any_address();
        ram.add(gfn(TABLES[level])).store_u64(place(level), entry);
        assert_eq!(code(read(&system(), &mut ram, VA), VA), 0x04 + level as u32);
    }
    // Reserved bits and hints change nothing: contiguous, software bits, NS, nT.
    let mut ram = any_address();
    let noise = 1 << 52 | 0xf << 55 | 1 << 5 | 1 << 63;
    ram.add(gfn(TABLES[3]))
        .store_u64(place(3), TABLE_ENTRY | AF | OUTPUT | noise);
    read(&system(), &mut ram, VA).unwrap();
    let mut ram = tables([TABLE_ENTRY, VALID | AF | OUTPUT | 0x3fff_f000, 0, 0]);
    let found = read(&system(), &mut ram, VA).unwrap();
    assert_eq!(
        found.mapping.gfn.gpa().get(),
        OUTPUT | VA & 0x3fff_f000,
        "of a block too"
    );
}

/// D8.16.1: a table without memory is an external abort on the walk. A swapped-out table stops the
/// walk.
#[test]
fn missing_tables() {
    for level in 0..4 {
        let mut ram = any_address();
        ram.swapped.insert(gfn(TABLES[level]));
        assert_eq!(read(&system(), &mut ram, VA), Err(Trap::Stop(Stop::Wait)));
        ram.swapped.clear();
        if level > 0 {
            let above = TABLE_ENTRY | 0x99 << 12;
            ram.add(gfn(TABLES[level - 1]))
                .store_u64(place(level - 1), above);
        }
        let mut sys = system();
        if level == 0 {
            sys.ttbr0 = 0x99 << 12;
        }
        assert_eq!(code(read(&sys, &mut ram, VA), VA), 0x14 + level as u32);
    }
}

/// D17.2.37: class and WnR of the aborts.
#[test]
fn the_syndrome_names_the_access() {
    let mut ram = Ram::default();
    for (access, class, write) in [
        (Access::Read, 0x24, 0),
        (Access::Write, 0x24, 1),
        (Access::Fetch, 0x20, 0),
    ] {
        let request = request(VA, access, Privilege::User);
        let result = walk(&system(), &mut WalkCache::default(), &mut ram, request);
        let Err(Trap::Exception(exception)) = result else {
            panic!("{result:?}")
        };
        assert_eq!((exception.class, exception.iss), (class, 0x14 | write << 6));
    }
}

/// D8.2.10: without stage 1 an address is a physical address, of at most 48 bits.
#[test]
fn stage_1_off() {
    let mut sys = system();
    sys.sctlr &= !sctlr::M;
    let mut ram = Ram::default();
    let found = read(&sys, &mut ram, VA).unwrap();
    assert_eq!(found.mapping.gfn, gfn(VA >> 12));
    assert!(found.readable && found.mapping.writable && found.mapping.exec);
    assert_eq!(code(read(&sys, &mut ram, 1 << 48), 1 << 48), 0x00);
    assert_eq!(code(read(&sys, &mut ram, VA | 1 << 56), VA | 1 << 56), 0x00);
    sys.tcr |= tcr::TBI0;
    assert!(read(&sys, &mut ram, VA | 1 << 56).unwrap().tagged);
}

#[test]
fn a_warm_walk_reads_one_descriptor() {
    let (mut ram, sys) = (any_address(), system());
    let mut cache = WalkCache::default();
    let mut lookups = |ram: &mut Ram, va| {
        ram.lookups = 0;
        let request = request(va, Access::Read, Privilege::Supervisor);
        let _ = walk(&sys, &mut cache, ram, request);
        ram.lookups
    };
    assert_eq!(lookups(&mut ram, VA), 4);
    assert_eq!(lookups(&mut ram, VA ^ 0x5000), 1, "the same table");
    let high = VA | 0xffff << 48;
    assert_eq!(
        lookups(&mut ram, high),
        4,
        "the same bits in the other half"
    );
    assert_eq!(lookups(&mut ram, VA), 4, "which took the place");
    ram.add(gfn(TABLES[3])).store_u64(place(3), 0);
    assert_eq!(
        lookups(&mut ram, VA),
        5,
        "before a fault the tables themselves are read"
    );
}
