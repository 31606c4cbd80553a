//! Every image has the form that a loader expects, and the native benchmark runs.

use lacuna_guest::Arch;
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
        let elf = image.file;
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

/// Linux's arm64 boot protocol: Documentation/arch/arm64/booting.rst.
#[test]
fn arm64_images_have_the_header_of_linux() {
    assert!(!Arch::Arm64.images().is_empty());
    for image in Arch::Arm64.images() {
        let (file, name) = (image.file, image.name);
        assert_eq!(&file[56..60], b"ARMd", "{name}: magic");
        assert_eq!(number(file, 8, 8), 0, "{name}: text_offset");
        let size = number(file, 16, 8);
        assert!(size > file.len() as u64, "{name}: image_size has .bss, too");
        assert_eq!(size % 4096, 0, "{name}: whole pages");
        // Little-endian, 4 KiB pages, anywhere in memory.
        assert_eq!(number(file, 24, 8), 0xa, "{name}: flags");
        assert_eq!(number(file, 3, 1) >> 2, 5, "{name}: begins with a branch");
    }
}

fn in_the_catalog(arch: Arch, folder: &str) {
    if let Some(reason) = arch.unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads");
    let crowd = fs::read_to_string(all.join("crowd.h")).unwrap();
    let own = fs::read_dir(all.join("arch").join(folder)).unwrap();
    let mut count = 0;
    for entry in fs::read_dir(all).unwrap().chain(own) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "c") {
            let name = path.file_stem().unwrap().to_str().unwrap();
            let image = arch
                .image(name)
                .unwrap_or_else(|| panic!("{name} is missing"));
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
            count += 1;
        }
    }
    assert_eq!(arch.images().len(), count);
    assert!(arch.image("no such").is_none());
}

#[test]
fn every_workload_has_its_entry_in_the_catalog() {
    in_the_catalog(Arch::X86_64, "x86");
}

#[test]
fn every_arm64_workload_has_its_entry_in_the_catalog() {
    in_the_catalog(Arch::Arm64, "arm64");
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
