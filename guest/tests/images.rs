//! Every image is what a loader expects, and the native benchmark runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const PT_LOAD: u64 = 1;
const PT_NOTE: u64 = 4;
const PHYS32_ENTRY: u64 = 18;

fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
    let field = &bytes[at..at + width];
    field
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// (type, offset, physical address, file size) of each program header.
fn segments(elf: &[u8]) -> Vec<(u64, usize, u64, usize)> {
    let (table, size) = (number(elf, 32, 8) as usize, number(elf, 54, 2) as usize);
    let headers = (0..number(elf, 56, 2) as usize).map(|i| &elf[table + i * size..][..size]);
    headers
        .map(|h| {
            let (offset, filesz) = (number(h, 8, 8) as usize, number(h, 32, 8) as usize);
            (number(h, 0, 4), offset, number(h, 24, 8), filesz)
        })
        .collect()
}

#[test]
fn images_are_elf64_with_a_pvh_note() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        assert!(
            lacuna_guest::images().is_empty(),
            "nothing half built is offered"
        );
        return;
    }
    assert!(!lacuna_guest::images().is_empty());
    for image in lacuna_guest::images() {
        let elf = image.elf;
        assert_eq!(
            &elf[..6],
            b"\x7fELF\x02\x01",
            "{}: ELF64, little-endian",
            image.name
        );
        assert_eq!(number(elf, 18, 2), 62, "{}: x86-64", image.name);
        let segments = segments(elf);
        let holds = |address: u64| {
            segments.iter().any(|&(kind, _, start, size)| {
                kind == PT_LOAD && (start..start + size as u64).contains(&address)
            })
        };
        assert!(
            holds(number(elf, 24, 8)),
            "{}: e_entry is in a segment",
            image.name
        );
        let lowest = segments
            .iter()
            .filter(|s| s.0 == PT_LOAD)
            .map(|s| s.2)
            .min();
        assert_eq!(lowest, Some(0x10_0000), "{}: loads from 1 MiB", image.name);

        let note = segments
            .iter()
            .find(|s| s.0 == PT_NOTE)
            .expect("a PT_NOTE segment");
        let note = &elf[note.1..note.1 + note.3];
        assert_eq!(
            (number(note, 0, 4), number(note, 4, 4)),
            (4, 8),
            "{}",
            image.name
        );
        assert_eq!(number(note, 8, 4), PHYS32_ENTRY, "{}", image.name);
        assert_eq!(&note[12..16], b"Xen\0", "{}", image.name);
        assert!(
            holds(number(note, 16, 8)),
            "{}: PVH entry is in a segment",
            image.name
        );
    }
}

#[test]
fn every_workload_has_its_entry_in_the_catalog() {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads");
    let crowd = fs::read_to_string(folder.join("crowd.h")).unwrap();
    let arch = fs::read_dir(folder.join("arch/x86")).unwrap();
    for entry in fs::read_dir(folder).unwrap().chain(arch) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "c") {
            let name = path.file_stem().unwrap().to_str().unwrap();
            let image = lacuna_guest::image(name).unwrap_or_else(|| panic!("{name} is missing"));
            let mut source = fs::read_to_string(&path).unwrap();
            if source.contains("#include \"crowd.h\"") {
                source.push_str(&crowd);
            }
            for param in image.params {
                let quoted = format!("\"{}\"", param.name);
                assert!(
                    source.contains(&quoted),
                    "{name} does not read {}",
                    param.name
                );
            }
        }
    }
    assert!(lacuna_guest::image("no such").is_none());
}

#[test]
fn native_cpubench_runs_every_test() {
    let bytes = lacuna_guest::native_cpubench();
    if bytes.is_empty() {
        lacuna_skip::skip("not an x86-64 host, there is no native cpubench");
        return;
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cpubench-native");
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(&path)
        .args(["test=all", "iters=100"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for (test, insns) in [
        ("alu", 16),
        ("mem256k", 14),
        ("mem64m", 14),
        ("branchy", 21604),
    ] {
        let line = format!("END {test} ops=100 insns={} ", insns * 100);
        assert!(text.contains(&line), "{line:?} in {text}");
    }
    let wrong = Command::new(&path).arg("test=nothing").status().unwrap();
    assert_eq!(wrong.code(), Some(2));
}
