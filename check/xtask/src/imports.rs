//! Two tables: which crate may import which, and which crates may hold `unsafe`.

use crate::finding::Finding;

/// Every crate of the workspace, and the crates that it may import. Dev-dependencies are not
/// checked. Some rows allow less than the order of the rows would: `mmu` and `machine` do not
/// import each other, and the processors import no hypervisor. Only `soft` imports all of these.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("lacuna-addr", &[]),
    ("lacuna-metrics", &[]),
    ("lacuna-state", &[]),
    ("lacuna-sync", &[]),
    ("lacuna-sys", &["lacuna-addr"]),
    ("lacuna-tables", &["lacuna-addr", "lacuna-sync"]),
    (
        "lacuna-slots",
        &["lacuna-metrics", "lacuna-addr", "lacuna-sync"],
    ),
    (
        "lacuna-source",
        &["lacuna-metrics", "lacuna-addr", "lacuna-sync", "lacuna-sys"],
    ),
    (
        "lacuna-objects",
        &["lacuna-addr", "lacuna-sync", "lacuna-source"],
    ),
    ("lacuna-swap", &["lacuna-addr", "lacuna-sync"]),
    (
        "lacuna-frames",
        // swap: page words name swap entries, and a device may keep pages in frames. sys: the pool
        // watches for pages that the kernel takes away.
        &["lacuna-addr", "lacuna-sync", "lacuna-swap", "lacuna-sys"],
    ),
    (
        "lacuna-linux",
        &[
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-sys",
            "lacuna-frames",
            "lacuna-source",
        ],
    ),
    (
        "lacuna-host",
        // sys: Linux memory is filled by userfaultfd.
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-frames",
            "lacuna-linux",
            "lacuna-source",
            "lacuna-swap",
            "lacuna-sys",
        ],
    ),
    (
        "lacuna-stage2",
        &["lacuna-addr", "lacuna-sync", "lacuna-tables"],
    ),
    (
        "lacuna-mmu",
        &[
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-slots",
            "lacuna-host",
            "lacuna-stage2",
        ],
    ),
    (
        "lacuna-machine",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-state",
            "lacuna-sync",
            "lacuna-slots",
            "lacuna-source",
        ],
    ),
    (
        "lacuna-apf",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-state",
            "lacuna-sync",
        ],
    ),
    (
        "lacuna-cpu",
        &["lacuna-addr", "lacuna-state", "lacuna-sync"],
    ),
    (
        "lacuna-x86",
        &["lacuna-addr", "lacuna-state", "lacuna-sync", "lacuna-cpu"],
    ),
    (
        "lacuna-arm64",
        &["lacuna-addr", "lacuna-state", "lacuna-sync", "lacuna-cpu"],
    ),
    (
        "lacuna-pager",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-sys",
            "lacuna-source",
        ],
    ),
    (
        "lacuna-pager-client",
        &["lacuna-addr", "lacuna-source", "lacuna-sys"],
    ),
    (
        "lacuna-offload",
        &["lacuna-addr", "lacuna-sys", "lacuna-source"],
    ),
    (
        "lacuna-migrate",
        // source: a snapshot whose pages are read on demand is a page source.
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-source",
            "lacuna-machine",
        ],
    ),
    (
        "lacuna-soft",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-slots",
            "lacuna-host",
            "lacuna-stage2",
            "lacuna-mmu",
            "lacuna-apf",
            "lacuna-machine",
            "lacuna-cpu",
            "lacuna-x86",
            "lacuna-arm64",
        ],
    ),
    (
        "lacuna-kvm",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-sys",
            "lacuna-slots",
            "lacuna-source",
            "lacuna-host",
            "lacuna-apf",
            "lacuna-machine",
        ],
    ),
    (
        "lacuna-virtio",
        &["lacuna-addr", "lacuna-sync", "lacuna-machine"],
    ),
    ("lacuna-guest", &[]),
    // The lab is a user of the library. Beside it, it compares mechanisms that only soft has
    // (`comparisons`), threads on a bare userfaultfd (`sys`) with VMs, and the pager with a simple
    // handler.
    (
        "lacuna-lab",
        &[
            "lacuna",
            "lacuna-addr",
            "lacuna-pager",
            "lacuna-report",
            "lacuna-source",
            "lacuna-sys",
            "lacuna-soft",
            "lacuna-guest",
        ],
    ),
    (
        "lacuna",
        &[
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-source",
            "lacuna-objects",
            // What either backend takes: swap, kinds of memory, huge pages.
            "lacuna-host",
            "lacuna-machine",
            "lacuna-soft",
            "lacuna-kvm",
            "lacuna-migrate",
            "lacuna-virtio",
        ],
    ),
    ("lacuna-control", &["lacuna"]),
    ("lacuna-sandbox", &[]),
    // What any VMM may import, and what is the repository's own.
    (
        "lacuna-cli",
        &[
            "lacuna",
            "lacuna-control",
            "lacuna-guest",
            "lacuna-lab",
            "lacuna-offload",
            "lacuna-pager",
            "lacuna-pager-test",
            "lacuna-report",
            "lacuna-sandbox",
        ],
    ),
    // It reads the lab's JSON, so that `xtask` needs no other crate for the committed report.
    ("lacuna-report", &[]),
    (
        "lacuna-fuzz",
        &[
            "lacuna-a64",
            "lacuna-addr",
            "lacuna-sync",
            "lacuna-host",
            "lacuna-mmu",
            "lacuna-machine",
            "lacuna-migrate",
            "lacuna-soft",
            "lacuna-guest",
            "lacuna-offload",
            "lacuna-pager",
            "lacuna-cli",
        ],
    ),
    (
        "lacuna-conformance",
        &[
            "lacuna-a64",
            "lacuna-metrics",
            "lacuna-addr",
            "lacuna-source",
            "lacuna-sync",
            "lacuna-machine",
            "lacuna-soft",
            "lacuna-kvm",
            "lacuna-guest",
            "lacuna-skip",
            "lacuna-virtio",
        ],
    ),
    // The VMM's side of a protocol with a page-fault handler or a daemon, and nothing of a VMM
    // beside it.
    (
        "lacuna-pager-test",
        &["lacuna-addr", "lacuna-source", "lacuna-sys"],
    ),
    ("lacuna-a64", &[]),
    ("lacuna-skip", &["lacuna-skip-attribute"]),
    ("lacuna-skip-attribute", &[]),
    ("xtask", &["lacuna-report"]),
];

/// A crate's permission for `unsafe`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsafe {
    /// `#![forbid(unsafe_code)]`: every crate that [`ROOMS`] does not name.
    Forbidden,
    /// `#![deny(unsafe_code)]`, and a reason with each exception.
    Exceptional,
    /// A room: its header says why it holds `unsafe`, and each block says why it is sound.
    Room,
}

/// The crates that may hold `unsafe`, each with its reason in its own header.
const ROOMS: &[(&str, Unsafe)] = &[
    ("lacuna-tables", Unsafe::Room),
    ("lacuna-frames", Unsafe::Room),
    ("lacuna-host", Unsafe::Room),
    ("lacuna-cpu", Unsafe::Room),
    ("lacuna-soft", Unsafe::Exceptional),
    ("lacuna-sys", Unsafe::Room),
    ("lacuna-kvm", Unsafe::Room),
    ("lacuna-pager-test", Unsafe::Room),
    ("lacuna-sandbox", Unsafe::Room),
];

/// The permission of `package` for `unsafe`.
pub fn unsafe_policy(package: &str) -> Unsafe {
    let room = ROOMS.iter().find(|(name, _)| *name == package);
    room.map_or(Unsafe::Forbidden, |(_, policy)| *policy)
}

/// One package of the workspace, and the packages of the workspace that it imports.
pub struct Package<'a> {
    /// Its name.
    pub name: &'a str,
    /// Path of its manifest from the root.
    pub manifest: &'a str,
    /// Normal and build dependencies within this workspace.
    pub imports: Vec<&'a str>,
}

/// Checks `packages` against the table.
pub fn check(packages: &[Package<'_>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in packages {
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == package.name) else {
            let what = format!("{} has no row in check/xtask/src/imports.rs", package.name);
            findings.push(Finding::of(package.manifest, what));
            continue;
        };
        for import in package
            .imports
            .iter()
            .filter(|import| !allowed.contains(import))
        {
            let what = format!("{} must not import {import}", package.name);
            findings.push(Finding::of(package.manifest, what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches(name: &str, imports: &[&str]) -> Vec<String> {
        let package = Package {
            name,
            manifest: "Cargo.toml",
            imports: imports.to_vec(),
        };
        check(&[package])
            .into_iter()
            .map(|finding| finding.what)
            .collect()
    }

    #[test]
    fn strangers_stay_strangers() {
        assert!(breaches("lacuna-mmu", &["lacuna-host", "lacuna-stage2"]).is_empty());
        assert_eq!(
            breaches("lacuna-mmu", &["lacuna-machine"]),
            ["lacuna-mmu must not import lacuna-machine"]
        );
        assert_eq!(
            breaches("lacuna-x86", &["lacuna-mmu", "lacuna-host"]).len(),
            2
        );
    }

    #[test]
    fn a_new_crate_needs_a_row() {
        assert!(breaches("lacuna-new", &[])[0].contains("has no row"));
    }

    /// Cargo runs the packages' tests in the order of the packages' names. This package, which
    /// lists the skipped tests, must be the last.
    #[test]
    fn no_package_comes_after_this_one() {
        for (name, _) in MAY_IMPORT {
            assert!(*name <= env!("CARGO_PKG_NAME"), "{name}");
        }
    }

    /// The table has no cycle: no crate reaches itself.
    #[test]
    fn the_table_has_no_cycle() {
        fn reaches(from: &str, to: &str) -> bool {
            let (_, imports) = MAY_IMPORT.iter().find(|(name, _)| *name == from).unwrap();
            imports
                .iter()
                .any(|import| *import == to || reaches(import, to))
        }
        for (name, _) in MAY_IMPORT {
            assert!(!reaches(name, name), "{name}");
        }
    }
}
