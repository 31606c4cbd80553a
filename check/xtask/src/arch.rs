//! Code for one host architecture lies in a few files, each with a portable form.
//!
//! A guest's architecture need not be the host's, so only the files listed here depend on the
//! host's processor.

use crate::finding::Finding;

/// The marks of code for one host architecture. Each is written in two parts, so that this file
/// does not contain it.
const MARKS: [&str; 5] = [
    concat!("target_", "arch"),
    concat!("target_", "feature"),
    concat!("core::", "arch"),
    concat!("std::", "arch"),
    concat!("asm", "!("),
];

/// A file that may have code for one architecture.
struct Listed {
    path: &'static str,
    portable: Portable,
}

/// Where the code for every other architecture is.
enum Portable {
    /// In the same file, under the opposite condition.
    Here,
    /// In another file of the list: a test that gives the reason for the skipped comparison.
    In(&'static str),
}

const FILES: &[Listed] = &[
    // Prefetches.
    here("memory/tables/src/backing.rs"),
    // Prefetches, and zeros past the caches.
    here("memory/frames/src/pool.rs"),
    // A load that a signal handler can end.
    here("base/sys/src/touch/arch.rs"),
    // Compare-and-swap of 16 bytes.
    here("cpu/core/src/pair.rs"),
    // System calls that newer architectures do not have.
    here("tools/sandbox/src/calls.rs"),
    // KVM's guests have the host's architecture.
    here("backend/kvm/src/arch.rs"),
    // The native benchmark runs on the guests' processor.
    here("guest/build.rs"),
    // Comparison of the software processor with the host's.
    elsewhere("cpu/x86/tests/it/native.rs"),
    elsewhere("cpu/x86/tests/it/native_faults.rs"),
    elsewhere("cpu/x86/tests/it/support/mod.rs"),
    here("cpu/x86/tests/it/native_skipped.rs"),
];

const fn here(path: &'static str) -> Listed {
    Listed {
        path,
        portable: Portable::Here,
    }
}

const fn elsewhere(path: &'static str) -> Listed {
    Listed {
        path,
        portable: Portable::In("cpu/x86/tests/it/native_skipped.rs"),
    }
}

/// The findings of one Rust file.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    let marked = (1..).zip(text.lines()).filter(|(_, line)| {
        !line.trim_start().starts_with("//") && MARKS.iter().any(|mark| line.contains(mark))
    });
    let marked: Vec<usize> = marked.map(|(number, _)| number).collect();
    let Some(listed) = FILES.iter().find(|listed| listed.path == path) else {
        let what = "code for one architecture of the host: check/xtask/src/arch.rs lists where";
        let findings = marked
            .iter()
            .map(|&line| Finding::at(path, line, what.to_owned()));
        return findings.collect();
    };
    let opposite = ["not(", "!cfg!("].map(|start| format!("{start}{}", MARKS[0]));
    let what = match listed.portable {
        _ if marked.is_empty() => {
            "has no code for one architecture: take it off the list of arch.rs"
        }
        Portable::Here if !opposite.iter().any(|not| text.contains(not.as_str())) => {
            "code for one architecture without a portable form in the same file"
        }
        Portable::In(other) if !FILES.iter().any(|listed| listed.path == other) => {
            "its portable form is not on the list of arch.rs"
        }
        _ => return Vec::new(),
    };
    vec![Finding::of(path, what)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditional(condition: impl Fn(String) -> String) -> String {
        let condition = condition(format!("{} = \"x86_64\"", MARKS[0]));
        format!("#[cfg({condition})]\nfn f() {{}}\n")
    }

    #[test]
    fn only_listed_files_have_it_and_each_has_a_portable_form() {
        let one = conditional(|arch| arch);
        assert_eq!(check("base/addr/src/lib.rs", &one).len(), 1);
        assert_eq!(check("base/addr/src/lib.rs", &format!("// {one}")).len(), 0);
        assert_eq!(check("memory/frames/src/pool.rs", &one).len(), 1);
        let both = one.clone() + &conditional(|arch| format!("not({arch})"));
        assert_eq!(check("memory/frames/src/pool.rs", &both).len(), 0);
        assert_eq!(
            check("memory/frames/src/pool.rs", "fn f() {}").len(),
            1,
            "listed in vain"
        );
        assert_eq!(check("cpu/x86/tests/it/native.rs", &one).len(), 0);
    }
}
