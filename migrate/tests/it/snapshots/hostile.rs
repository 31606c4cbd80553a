//! Folders that no release of Lacuna writes, with correct checksums. Each is refused with a file's
//! name, and none makes the reader wait.

use super::common::{Moved, soft};
use lacuna_machine::Arch;
use lacuna_migrate::{MigrateError, Snapshot};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

fn saved(folder: &Path) -> PathBuf {
    let path = folder.join("saved");
    let moved = Moved::new(soft(Arch::X86_64, 1), "verify", "rounds=2");
    moved.save_while_it_runs(&path).1.expect("a snapshot");
    path
}

/// Changes `snapshot.json`, and makes the checksums fit. Returns the checksum of `checksums`.
fn edit(one: &Path, change: impl FnOnce(&mut Value)) -> u32 {
    let file = one.join("snapshot.json");
    let text = fs::read(&file).expect("a file");
    let mut document = serde_json::from_slice(&text).expect("JSON");
    change(&mut document);
    fs::write(&file, document.to_string()).expect("a write");
    let line = |name: &str| {
        let bytes = fs::read(one.join(name)).expect("a file");
        format!("{:08x}  {name}\n", crc32fast::hash(&bytes))
    };
    let sums = line("snapshot.json") + &line("pages");
    fs::write(one.join("checksums"), &sums).expect("a write");
    crc32fast::hash(sums.as_bytes())
}

fn refused(path: &Path) -> String {
    let error = Snapshot::open(path).map(drop).expect_err("it is hostile");
    let text = error.to_string();
    let folder = path.parent().expect("a temporary folder").display();
    assert!(
        text.contains(&folder.to_string()),
        "it names no file: {text}"
    );
    text
}

#[test]
fn a_base_is_a_name_beside_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = saved(folder.path());
    let long = "x".repeat(70_000);
    let outside = [
        "",
        ".",
        "..",
        "../saved",
        "/",
        "/etc/passwd",
        "saved/",
        "saved/.",
        "a/b",
    ];
    for name in outside.into_iter().chain(["none", "sa\0ved", &long]) {
        edit(&path, |document| {
            document["format"] = json!(2);
            document["base"] = json!({"name": name, "checksums": 7});
        });
        let text = refused(&path);
        let is_outside = text.contains("is no name of a snapshot beside it");
        assert_eq!(is_outside, outside.contains(&name), "{name:?}: {text}");
    }
}

/// A snapshot as its own base would have no end. It cannot be written by chance, because it would
/// contain its own checksum. A long chain stands for it.
#[test]
fn a_chain_has_an_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut below = saved(folder.path());
    let mut checksums = edit(&below, |_| ());
    let pages = fs::metadata(below.join("pages")).expect("a file").len() as usize / 4;
    for index in 1..=32 {
        let one = folder.path().join(format!("diff{index}"));
        fs::create_dir(&one).expect("a folder");
        for name in ["memory", "snapshot.json"] {
            fs::copy(below.join(name), one.join(name)).expect("a copy");
        }
        fs::write(one.join("pages"), 1_u32.to_le_bytes().repeat(pages)).expect("a write");
        let name = below.file_name().expect("a name").to_str().expect("a text");
        checksums = edit(&one, |document| {
            document["format"] = json!(2);
            document["base"] = json!({"name": name, "checksums": checksums});
        });
        match index {
            32 => assert!(refused(&one).contains("made of more than 32 snapshots")),
            _ => drop(Snapshot::open(&one).expect("a chain that is short enough")),
        }
        // The memory file is as large as the guest, and is needed only once.
        below = one;
    }
}

#[test]
fn files_that_would_wait_or_never_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = saved(folder.path());
    for name in ["snapshot.json", "memory", "pages", "checksums"] {
        let (file, kept) = (path.join(name), path.join("kept"));
        fs::rename(&file, &kept).expect("a file");
        mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        assert!(refused(&path).contains("it is no regular file"), "{name}");
        fs::remove_file(&file).expect("a pipe");
        for (to, told) in [
            ("/dev/zero", "it is no regular file"),
            (name, "cannot open the file"),
        ] {
            symlink(to, &file).expect("a link");
            let text = refused(&path);
            assert!(
                text.contains(name) && text.contains(told),
                "{name} {to}: {text}"
            );
            fs::remove_file(&file).expect("a link");
        }
        // A link to the file itself is as good as the file.
        symlink(&kept, &file).expect("a link");
        drop(Snapshot::open(&path).expect("a snapshot"));
        fs::remove_file(&file).expect("a link");
        fs::rename(&kept, &file).expect("a file");
    }
}

#[test]
fn slots_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = saved(folder.path());
    for change in [
        json!([{"id": 0, "gfn": u64::MAX, "pages": 1, "flags": 0}]),
        json!([{"id": 0, "gfn": 0, "pages": u64::MAX, "flags": 0}]),
        json!([{"id": 0, "gfn": 0, "pages": 0, "flags": 0}]),
        json!([{"id": 0, "gfn": 0, "pages": 9, "flags": 4_000_000_000_u32}]),
        json!([
            {"id": 0, "gfn": 0, "pages": 9, "flags": 0},
            {"id": 0, "gfn": 9, "pages": 9, "flags": 0},
        ]),
        json!([
            {"id": 0, "gfn": 0, "pages": 9, "flags": 0},
            {"id": 1, "gfn": 8, "pages": 9, "flags": 0},
        ]),
    ] {
        edit(&path, |document| {
            document["machine"]["layout"]["slots"] = change
        });
        let error = Snapshot::open(&path).map(drop).expect_err("such slots");
        assert!(matches!(error, MigrateError::Damaged { .. }), "{error}");
        assert!(refused(&path).contains("is not one that a machine can have"));
    }
}

/// Calls `each` with every object inside `value`.
fn objects(value: &mut Value, each: &mut dyn FnMut(&mut serde_json::Map<String, Value>)) {
    match value {
        Value::Object(fields) => {
            each(fields);
            fields.values_mut().for_each(|field| objects(field, each));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| objects(value, each)),
        _ => {}
    }
}

/// A field of a later release could be state that the guest would lose.
#[test]
fn a_field_that_is_not_known_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = saved(folder.path());
    let mut count = 0;
    edit(&path, |document| objects(document, &mut |_| count += 1));
    assert!(count > 20, "{count}");
    for index in 0..count {
        let (mut at, mut kept, mut fields) = (0, Value::Null, Vec::new());
        edit(&path, |document| {
            kept = document.clone();
            objects(document, &mut |object| {
                if at == index {
                    object.insert("later".into(), json!(1));
                    fields = object.keys().cloned().collect();
                }
                at += 1;
            });
        });
        let opened = Snapshot::open(&path).map(drop);
        let text = opened.expect_err(&format!("object {index}: {fields:?}"));
        assert!(text.to_string().contains("snapshot.json"), "{text}");
        edit(&path, |document| *document = kept);
    }
}
