//! Regions of Linux memory that begin as copies of a file.

use crate::common;

use common::Use;
use common::linux::{BLOCK, add, file, host, private, read, vm};
use common::source::TestSource;
use lacuna_addr::{BackingRange, PAGE_SIZE};
use lacuna_host::PrivateFile;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

const PAGES: u64 = 64;

/// Two regions have one file, and each its own writes. What is discarded is zeros, once and again.
#[test]
fn regions_share_a_file() {
    let (host, file) = (host(2 * BLOCK), file(PAGES + 3));
    let mut vms = [0; 2].map(|_| vm(&host, private(&file, 3), PAGES, None));
    for vm in &mut vms {
        for page in 0..PAGES {
            vm.model.insert(vm.addr(page).get(), page + 3);
        }
    }
    vms[0].check_all();
    vms[0].touch(7, Use::Write(99)).unwrap();
    host.copy_in(vms[0].addr(8), &88u64.to_le_bytes()).unwrap();
    assert_eq!(read(&host, vms[0].addr(8)), Ok(88));
    assert_eq!(read(&host, vms[1].addr(8)), Ok(11));
    vms[1].check_all();
    for _ in 0..2 {
        let some = BackingRange::new(vms[0].addr(5), 10).unwrap();
        host.discard(some).unwrap();
        for page in 0..20 {
            let expected = if (5..15).contains(&page) { 0 } else { page + 3 };
            assert_eq!(read(&host, vms[0].addr(page)), Ok(expected));
        }
        vms[0].model.remove(&vms[0].addr(9).get());
        vms[0].touch(9, Use::Write(4)).unwrap();
    }
    vms[1].check_all();
    let mut word = [0; 8];
    file.read_exact_at(&mut word, 10 * PAGE_SIZE as u64)
        .unwrap();
    assert_eq!(u64::from_le_bytes(word), 10, "the file is unchanged");
    host.verify();
    for vm in vms {
        host.remove_region(vm.range).unwrap();
    }
    host.verify();
}

/// A page behind the end of a file that became shorter is lost, and so never zeros.
#[lacuna_skip::test]
fn a_shortened_file_loses_pages() {
    let (host, file) = (host(BLOCK), file(PAGES));
    let vm = vm(&host, private(&file, 0), PAGES, None);
    assert_eq!(read(&host, vm.addr(5)), Ok(5));
    file.set_len(10 * PAGE_SIZE as u64).unwrap();
    let lost = read(&host, vm.addr(40)).unwrap_err().to_string();
    assert!(lost.contains("became shorter"), "{lost}");
    assert_eq!(read(&host, vm.addr(5)), Ok(5));
    assert_eq!(host.losses(), 1);
    host.verify();
}

#[test]
fn what_cannot_be_a_private_file() {
    let host = host(BLOCK);
    let refusal = |made: Result<_, lacuna_host::HostError>| made.map(drop).unwrap_err().to_string();
    let short = refusal(add(&host, private(&file(PAGES), 1), PAGES, None));
    assert!(short.contains("has 64 pages"), "{short}");
    let sourced = add(
        &host,
        private(&file(PAGES), 0),
        PAGES,
        Some(&TestSource::new()),
    );
    let sourced = refusal(sourced);
    assert!(sourced.contains("leave the page source out"), "{sourced}");
    let named = tempfile::NamedTempFile::new().unwrap();
    let writer = File::options().write(true).open(named.path()).unwrap();
    let folder = File::open("/").unwrap();
    for (file, expected) in [(writer, "for reads"), (folder, "no regular file")] {
        let refused = PrivateFile::of_file(file.into(), 0).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    // The refused calls have taken no addresses.
    drop(vm(&host, private(&file(BLOCK), 0), BLOCK, None));
    host.verify();
}
