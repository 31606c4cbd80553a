//! The block device.

use crate::driver::{Driver, MEMORY, VERSION_1, WRITE, access, vm};
use lacuna_machine::{Device, Width};
use lacuna_virtio::Block;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use virtio_bindings::virtio_blk::*;

const HEADER: u64 = 0x30_0000;
const STATUS: u64 = 0x30_1000;
const DATA: u64 = 0x40_0000;
const SECTORS: u64 = 8192;

/// A file whose sector n has bytes n.
fn file() -> File {
    let mut file = tempfile::tempfile().expect("a file");
    for sector in 0..SECTORS {
        file.write_all(&[sector as u8; 512]).expect("room");
    }
    file
}

fn same(file: &File) -> File {
    file.try_clone().expect("a descriptor")
}

fn content(file: &File, sector: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    file.read_exact_at(&mut bytes, sector * 512)
        .expect("the file");
    bytes
}

/// A request with these data buffers. Returns its status and the written bytes.
fn request(driver: &Driver<Block>, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u32, u32) {
    let mut header = Vec::from(u64::from(kind).to_le_bytes());
    header.extend(sector.to_le_bytes());
    driver.put(HEADER, &header);
    driver.put(STATUS, &[0xff]);
    let chain = [&[(HEADER, 16, 0)], data, &[(STATUS, 1, WRITE)]].concat();
    let written = driver.request(0, &chain);
    (driver.take(STATUS, 1)[0].into(), written)
}

#[test]
fn the_driver_sees_the_size() {
    let driver = Driver::ready(Block::new(file()).expect("its size"));
    assert_eq!(driver.device.read(access(0x100, Width::Quad)), SECTORS);
    assert_eq!(driver.device.read(access(0x104, Width::Long)), 0);
    assert_eq!(driver.device.read(access(0x101, Width::Byte)), SECTORS >> 8);
    // The end of the space, and behind it.
    assert_eq!(driver.device.read(access(0x138, Width::Quad)), 1);
    assert_eq!(driver.device.read(access(0x200, Width::Quad)), 0);
    driver.device.write(access(0x100, Width::Quad), 0);
    assert_eq!(driver.device.read(access(0x100, Width::Quad)), SECTORS);
}

#[test]
fn sectors_are_read_and_written() {
    let file = file();
    let driver = Driver::ready(Block::new(same(&file)).expect("its size"));
    // Buffers need not be whole sectors.
    let data = [(DATA, 100, WRITE), (DATA + 0x1000, 924, WRITE)];
    assert_eq!(request(&driver, VIRTIO_BLK_T_IN, 7, &data), (0, 1025));
    assert_eq!(driver.take(DATA, 101), [vec![7; 100], vec![0]].concat());
    assert_eq!(
        driver.take(DATA + 0x1000, 924),
        [vec![7; 412], vec![8; 512]].concat()
    );
    driver.put(DATA, &[0xaa; 1024]);
    let data = [(DATA, 512, 0), (DATA + 512, 512, 0)];
    assert_eq!(request(&driver, VIRTIO_BLK_T_OUT, 20, &data), (0, 1));
    let around = [[19; 512], [0xaa; 512], [0xaa; 512], [22; 512]].concat();
    assert_eq!(content(&file, 19, 2048), around);
    assert_eq!(request(&driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    // Many steps.
    let data = [(DATA, 1 << 20, WRITE)];
    assert_eq!(
        request(&driver, VIRTIO_BLK_T_IN, 1, &data),
        (0, (1 << 20) + 1)
    );
    assert_eq!(driver.take(DATA, 1 << 20), content(&file, 1, 1 << 20));
}

#[test]
fn a_file_without_a_sector_is_no_disk() {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(511).expect("room");
    let refused = Block::new(same(&file)).expect_err("too small");
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    file.set_len(512).expect("room");
    Block::new(file).expect("a sector");
}

/// Nothing but the device's own mark shows a flush of the host's file.
#[test]
fn a_pause_flushes_what_was_written() {
    let driver = Driver::ready(Block::new(file()).expect("its size"));
    let is_dirty = |expected: bool| {
        let block = format!("{:?}", driver.device.device());
        assert!(block.contains(&format!("is_dirty: {expected}")), "{block}");
    };
    let write = || request(&driver, VIRTIO_BLK_T_OUT, 20, &[(DATA, 512, 0)]);
    is_dirty(false);
    assert_eq!(write(), (0, 1));
    is_dirty(true);
    assert_eq!(request(&driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    is_dirty(false);
    assert_eq!(write(), (0, 1));
    driver.device.pause();
    is_dirty(false);
}

/// The flush of a pause has failed: the state says so, and the driver learns it by its next flush.
#[test]
fn a_flush_that_failed_at_a_pause_is_reported_once() {
    let driver = Driver::ready(Block::new(file()).expect("its size"));
    driver.device.pause();
    let mut state = driver.device.state();
    assert!(state.own.is_empty());
    state.own = vec![1];
    driver.device.set_state(&state).expect("a good state");
    assert_eq!(driver.device.state(), state);
    driver.device.resume();
    let flush = || request(&driver, VIRTIO_BLK_T_FLUSH, 0, &[]).0;
    assert_eq!([flush(), flush()], [VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK]);
    state.own = vec![2];
    driver.device.set_state(&state).expect_err("no such state");
}

#[test]
fn the_disk_has_a_serial_number() {
    let block = Block::new(file()).expect("its size").with_serial("disk 1");
    let driver = Driver::ready(block);
    let data = [(DATA, 20, WRITE)];
    assert_eq!(request(&driver, VIRTIO_BLK_T_GET_ID, 0, &data), (0, 21));
    assert_eq!(driver.take(DATA, 8), *b"disk 1\0\0");
    assert_eq!(
        request(&driver, VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 4, WRITE)]),
        (0, 5)
    );
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let file = file();
    let driver = Driver::ready(Block::new(same(&file)).expect("its size"));
    let before = file.metadata().expect("the file").blocks();
    let range = |sector: u64, count: u32, flags: u32| {
        let mut raw = Vec::from(sector.to_le_bytes());
        raw.extend(count.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        driver.put(DATA, &raw);
    };
    let data = [(DATA, 16, 0)];
    let zeroes = VIRTIO_BLK_T_WRITE_ZEROES;
    for (kind, sector, flags) in [(VIRTIO_BLK_T_DISCARD, 64, 0), (zeroes, 1024, 1)] {
        range(sector, 64, flags);
        assert_eq!(request(&driver, kind, 0, &data), (0, 1));
        assert_eq!(content(&file, sector, 64 * 512), [0; 64 * 512]);
        assert_eq!(content(&file, sector + 64, 512), [(sector + 64) as u8; 512]);
        range(sector, 64, 2);
        let unsupported = (VIRTIO_BLK_S_UNSUPP, 1);
        assert_eq!(request(&driver, kind, 0, &data), unsupported);
        range(SECTORS - 1, 2, 0);
        assert_eq!(request(&driver, kind, 0, &data), (VIRTIO_BLK_S_IOERR, 1));
        range(0, u32::MAX, 0);
        assert_eq!(request(&driver, kind, 0, &data), (VIRTIO_BLK_S_IOERR, 1));
        let (half, many) = ([(DATA, 8, 0)], [(DATA, 16 * 33, 0)]);
        assert_eq!(request(&driver, kind, 0, &half), (VIRTIO_BLK_S_IOERR, 1));
        assert_eq!(request(&driver, kind, 0, &many), (VIRTIO_BLK_S_IOERR, 1));
    }
    assert!(file.metadata().expect("the file").blocks() < before);
    range(2048, 64, 0);
    // Not each file system zeroes a range without a hole.
    match request(&driver, zeroes, 0, &data) {
        (VIRTIO_BLK_S_OK, 1) => assert_eq!(content(&file, 2048, 64 * 512), [0; 64 * 512]),
        refused => assert_eq!(refused, (VIRTIO_BLK_S_UNSUPP, 1)),
    }
    range(2048, 64, 1);
    let unsupported = request(&driver, VIRTIO_BLK_T_DISCARD, 0, &data);
    assert_eq!(unsupported, (VIRTIO_BLK_S_UNSUPP, 1));
    assert_eq!(content(&file, 0, 512), [0; 512]);
    assert_eq!(content(&file, SECTORS - 1, 512), [255; 512]);
}

#[test]
fn a_read_only_disk_is_not_written() {
    let file = file();
    let driver = Driver::ready(Block::read_only(same(&file)).expect("its size"));
    assert_ne!(driver.offered() & 1 << VIRTIO_BLK_F_RO, 0);
    driver.put(DATA, &[0xaa; 512]);
    for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD] {
        let data = [(DATA, 512, 0)];
        assert_eq!(request(&driver, kind, 5, &data), (VIRTIO_BLK_S_IOERR, 1));
    }
    assert_eq!(content(&file, 5, 512), [5; 512]);
    let data = [(DATA, 512, WRITE)];
    assert_eq!(request(&driver, VIRTIO_BLK_T_IN, 5, &data), (0, 513));
}

/// A failing request has an answer, and the next one succeeds.
#[test]
fn errors_reach_the_guest() {
    let file = file();
    let driver = Driver::ready(Block::new(same(&file)).expect("its size"));
    let (into, from) = ([(DATA, 1024, WRITE)], [(DATA, 1024, 0)]);
    for sector in [SECTORS - 1, SECTORS, 1 << 55, u64::MAX] {
        for (kind, data) in [(VIRTIO_BLK_T_IN, &into), (VIRTIO_BLK_T_OUT, &from)] {
            assert_eq!(
                request(&driver, kind, sector, data),
                (VIRTIO_BLK_S_IOERR, 1)
            );
        }
    }
    // No whole sectors, too much data, and buffers outside of memory.
    for data in [
        (DATA, 511),
        (DATA, 8 << 20),
        (MEMORY, 512),
        (u64::MAX - 511, 512),
    ] {
        let data = [(data.0, data.1, WRITE)];
        let failed = request(&driver, VIRTIO_BLK_T_IN, 0, &data);
        assert_eq!(failed, (VIRTIO_BLK_S_IOERR, 1), "{data:x?}");
    }
    assert_eq!(request(&driver, 99, 0, &[]), (VIRTIO_BLK_S_UNSUPP, 1));
    // The file has become shorter.
    file.set_len(512 * 1000).expect("a file");
    assert_eq!(
        request(&driver, VIRTIO_BLK_T_IN, 999, &into),
        (VIRTIO_BLK_S_IOERR, 1)
    );
    assert_eq!(request(&driver, VIRTIO_BLK_T_IN, 998, &into), (0, 1025));
    assert_eq!(driver.take(DATA, 1024), content(&file, 998, 1024));
}

#[test]
fn errors_of_the_file_reach_the_guest() {
    let named = tempfile::NamedTempFile::new().expect("a file");
    named.as_file().set_len(4096).expect("room");
    let descriptor = File::open(named.path()).expect("the file");
    let driver = Driver::ready(Block::new(descriptor).expect("its size"));
    let data = [(DATA, 512, 0)];
    assert_eq!(
        request(&driver, VIRTIO_BLK_T_OUT, 0, &data),
        (VIRTIO_BLK_S_IOERR, 1)
    );
}

#[test]
fn a_driver_without_flushes_writes() {
    let file = file();
    let driver = Driver::of(Block::new(same(&file)).expect("its size"));
    driver.start_with(VERSION_1);
    driver.put(DATA, &[0xaa; 512]);
    assert_eq!(
        request(&driver, VIRTIO_BLK_T_OUT, 3, &[(DATA, 512, 0)]),
        (0, 1)
    );
    assert_eq!(content(&file, 3, 512), [0xaa; 512]);
}

#[test]
fn a_request_without_header_or_status_needs_a_reset() {
    for chain in [
        &[(HEADER, 16, 0)][..],
        &[(HEADER, 15, 0), (STATUS, 1, WRITE)],
        &[(HEADER, 16, 0), (MEMORY, 1, WRITE)],
        &[(MEMORY, 16, 0), (STATUS, 1, WRITE)],
    ] {
        let driver = Driver::ready(Block::new(file()).expect("its size"));
        driver.submit(0, chain);
        driver.broken();
    }
}

/// The guest's memory is four times as large as its budget: rings and buffers are evicted.
#[test]
fn evicted_pages_are_brought_back() {
    let file = file();
    let block = Block::new(same(&file)).expect("its size");
    let driver = Driver::on(vm(MEMORY / 4), block);
    driver.start();
    let areas = (0..8u64).map(|area| (DATA + area * (1 << 20), area * 1024));
    for (at, sector) in areas.clone() {
        // Bytes that compressed memory holds, and each sector others.
        let words = (0..64 << 10).map(|word| (sector + word / 64).to_le_bytes());
        let bytes: Vec<u8> = words.flatten().collect();
        driver.put(at, &bytes);
        let (out, into) = ([(at, 512 << 10, 0)], [(at + (512 << 10), 512 << 10, WRITE)]);
        assert_eq!(request(&driver, VIRTIO_BLK_T_OUT, sector, &out), (0, 1));
        assert_eq!(
            request(&driver, VIRTIO_BLK_T_IN, sector, &into),
            (0, (512 << 10) + 1)
        );
    }
    for (at, sector) in areas {
        let bytes = driver.take(at, 512 << 10);
        assert_eq!(content(&file, sector, 512 << 10), bytes);
        assert_eq!(driver.take(at + (512 << 10), 512 << 10), bytes);
    }
}
