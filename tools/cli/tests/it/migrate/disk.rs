//! `--disk`: a guest moves while its disk is busy, and ends at its destination.

use super::destination::Destination;
use super::{Guest, failure, is_too_late, migrate};
use lacuna_skip::test;
use std::fs::File;
use tempfile::TempDir;

/// How many requests each thread makes. On a busy machine the guest may end before it can move.
/// Then a guest with ten times as many is tried.
const REQUESTS: [u64; 3] = [10_000, 100_000, 1_000_000];

#[test]
fn a_guest_moves_with_its_disk() {
    for arch in ["x86_64", "arm64"] {
        let moved = REQUESTS.iter().any(|requests| moves(arch, *requests));
        assert!(moved, "{arch}: it always ends before it could move");
    }
}

/// Whether the guest has moved. Then it has found its blocks on the other side.
fn moves(arch: &str, requests: u64) -> bool {
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let option = format!("--disk {}", disk.display());
    let words =
        format!("diskbusy --arch {arch} --memory 16M {option} --append=requests={requests}");
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", &option);
    let guest = Guest::start(folder.path(), &words);
    let answer = guest.client().ask(migrate(&to.address));
    if is_too_late(&answer) {
        return false;
    }
    assert!(!answer["migrated"].is_null(), "{answer}");
    let (code, json, errors) = to.end();
    assert_eq!(code, Some(0), "{json} {errors}");
    assert_eq!(guest.end().0, 0);
    true
}

#[test]
fn a_file_that_is_no_disk_is_refused_with_the_remedy() {
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    let words = format!("run diskbusy --memory 16M --disk {}", disk.display());
    let remedy = format!("truncate -s SIZE {}", disk.display());
    let is_refused = || {
        let (code, errors) = failure(&words);
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains(&remedy), "{errors}");
    };
    is_refused();
    File::create(&disk).unwrap().set_len(511).unwrap();
    is_refused();
}

#[test]
fn a_destination_without_the_disk_names_it() {
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let words = format!(
        "bm --memory 16M --append=seconds=1000000 --disk {}",
        disk.display()
    );
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "");
    let guest = Guest::start(folder.path(), &words);
    let answer = guest.client().ask(migrate(&to.address));
    assert!(answer["error"].to_string().contains("disk0"), "{answer}");
    assert_ne!(to.end().0, Some(0));
}
