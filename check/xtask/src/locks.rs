//! Every lock of the engine has a place in the lock order.
//!
//! `lacuna_sync` has locks with a rank, and debug builds assert the order of docs/locking.md. A
//! lock of the standard library would escape this check.

use crate::finding::Finding;

/// The folders of crates whose locks are ranked. `control`, the tools, the tests and `base` itself
/// may use the standard library's.
const RANKED: [&str; 7] = [
    "memory/", "engine/", "cpu/", "backend/", "migrate/", "pager/", "virtio/",
];
const TYPES: [&str; 3] = ["Mutex", "RwLock", "Condvar"];
const MODULE: &str = "std::sync::";

/// The findings of one Rust file.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    let product = path.contains("/src/") && !path.contains("/tests");
    if !product || !RANKED.iter().any(|row| path.starts_with(row)) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (at, _) in text.match_indices(MODULE) {
        let rest = &text[at + MODULE.len()..];
        let named = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or(list),
            None => rest
                .split(|c: char| !c.is_alphanumeric())
                .next()
                .unwrap_or(rest),
        };
        let mut names = named.split(|c: char| !c.is_alphanumeric());
        if let Some(name) = names.find(|name| TYPES.contains(name)) {
            let line = 1 + text[..at].matches('\n').count();
            let what = format!("{MODULE}{name} has no rank: use lacuna_sync's (docs/locking.md)");
            findings.push(Finding::at(path, line, what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranked_locks_in_the_engine() {
        let found = |path, text| check(path, text).len();
        let file = "memory/host/src/host.rs";
        assert_eq!(found(file, "use std::sync::{Arc,\n    Mutex};"), 1);
        assert_eq!(
            found(file, "a: std::sync::RwLock<()>,\nb: std::sync::Condvar,"),
            2
        );
        assert_eq!(
            found(file, "use std::sync::{Arc, OnceLock};\nMutex::new(());"),
            0
        );
        assert_eq!(found(file, "use std::sync::MutexGuard;"), 0);
        assert_eq!(found(file, "use lacuna_sync::Mutex;"), 0);
        assert_eq!(
            found("memory/host/tests/host.rs", "use std::sync::Mutex;"),
            0
        );
        assert_eq!(
            found("memory/host/src/tests.rs", "use std::sync::Mutex;"),
            0
        );
        assert_eq!(found("tools/lab/src/lab.rs", "use std::sync::Mutex;"), 0);
    }
}
