//! The rules of Markdown pages: columns, and references.
//!
//! A page may name a file, a folder or an item of the code. Each of them must exist, so a commit
//! that renames or moves one also changes the page.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::finding::Finding;

/// Longest line of prose. Rows of tables, lines inside of code blocks and lines with a URL may be
/// longer: they cannot be broken.
const COLUMNS: usize = 100;
/// The ends of references to files of this repository. Headers (`.h`) are left out, because
/// comments name mostly the kernel's headers.
const EXTENSIONS: [&str; 7] = [".rs", ".md", ".c", ".S", ".sh", ".toml", ".txt"];
/// Names of other projects that pages cite.
const FOREIGN_NAMES: [&str; 10] = [
    "CLOCK_THREAD_CPUTIME_ID",
    "COOP_TASKRUN",
    "PAGEMAP_SCAN",
    "PartiallyCopied",
    "RING_FULL",
    "UFFDIO_MOVE",
    "WP_ASYNC",
    "halt_poll_ns",
    "mm_cpumask",
    "mmu_lock",
];
/// The folders of Linux that pages cite.
const FOREIGN: [&str; 4] = ["include/uapi/", "virt/kvm/", "arch/", "Documentation/"];

/// The files and names of the repository. References are compared with them.
#[derive(Default)]
pub struct Tree {
    /// Files and folders, from the root.
    pub paths: BTreeSet<String>,
    /// The names in each source: `crate::scan::Scan::names`, or all words of a C file.
    pub names: Vec<BTreeSet<String>>,
}

impl Tree {
    /// Whether `path` is a file or folder from the root, or the end of the path of one.
    fn has_path(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let end = format!("/{path}");
        self.paths.contains(path) || self.paths.iter().any(|known| known.ends_with(&end))
    }

    /// Whether one file has all of `names` as identifiers.
    fn has_together(&self, names: &[&str]) -> bool {
        let has = |file: &BTreeSet<String>| names.iter().all(|name| file.contains(*name));
        self.names.iter().any(has)
    }
}

/// The lines of `text` with their numbers, and whether each is inside of a code block. The fences
/// are left out.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut in_block = false;
    (1..).zip(text.lines()).filter_map(move |(number, line)| {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
            return None;
        }
        Some((number, line, in_block))
    })
}

/// The overlong lines of prose of one page.
pub fn columns(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line, in_block) in lines(text) {
        let columns = line.chars().count();
        // A row of a table and the marker of a generated table each take one line.
        let is_row = line.trim_start().starts_with(['|', '<']);
        if columns > COLUMNS && !in_block && !is_row && !line.contains("://") {
            let what = format!("{columns} columns, more than {COLUMNS}: wrap it");
            findings.push(Finding::at(path, number, what));
        }
    }
    findings
}

/// The broken references of one page.
pub fn check(path: &str, text: &str, tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line, in_block) in lines(text) {
        let mut add = |what: String| findings.push(Finding::at(path, number, what));
        for gone in files_missing(line, tree) {
            add(format!("there is no file {gone}: name what it is now"));
        }
        if !in_block {
            for gone in links_missing(path, line, tree) {
                add(format!("the link leads nowhere: {gone}"));
            }
            for gone in items_missing(line, tree) {
                add(format!("the code has no `{gone}`: name what it is now"));
            }
        }
    }
    findings
}

/// The missing files that a line of a page or comment names with their folder
/// (`memory/frames/src/block.rs`).
pub fn files_missing<'a>(line: &'a str, tree: &Tree) -> Vec<&'a str> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let foreign = |word: &str| FOREIGN.iter().any(|folder| word.starts_with(folder));
    let words = line.split(|c: char| c.is_whitespace() || "`()[]{},;:\"'|".contains(c));
    words
        .map(|word| word.trim_end_matches('.').trim_start_matches("../"))
        .filter(|word| {
            word.contains('/') && !word.starts_with(['/', '.']) && word.chars().all(is_path)
        })
        .filter(|word| EXTENSIONS.iter().any(|ext| word.ends_with(ext)) && !foreign(word))
        .filter(|word| !tree.has_path(word))
        .collect()
}

/// The targets of the relative links of a text.
pub fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

/// The relative links without a target in the repository, in a line of the page `path`.
fn links_missing<'a>(path: &str, line: &'a str, tree: &Tree) -> Vec<&'a str> {
    links(line)
        .filter(|target| !target.starts_with('#'))
        .filter(|target| {
            let file = target.split('#').next().unwrap_or(target);
            resolve(path, file).is_none_or(|file| !tree.paths.contains(&file))
        })
        .collect()
}

/// `target` as the page `path` sees it, from the root; `None` outside of it.
pub fn resolve(path: &str, target: &str) -> Option<String> {
    let mut resolved = PathBuf::from(path);
    resolved.pop();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir if !resolved.pop() => return None,
            Component::Normal(part) => resolved.push(part),
            _ => {}
        }
    }
    Some(resolved.to_string_lossy().into_owned())
}

/// The items between backticks that no source has. An item is a path (`Mmu::fault`), or a name with
/// an underscore or a capital inside (`host_page`, `VcpuMmu`).
fn items_missing<'a>(line: &'a str, tree: &Tree) -> Vec<&'a str> {
    let spans = line.split('`').skip(1).step_by(2);
    let is_missing = |span: &&str| {
        if span.contains("::") {
            return !span.starts_with("std::") && !item_exists(span, tree);
        }
        let name = span.split('(').next().unwrap_or(span);
        is_item(name) && !FOREIGN_NAMES.contains(&name) && !tree.has_together(&[name])
    };
    spans.filter(is_missing).collect()
}

/// Whether `word` is an identifier, and no ordinary word.
fn is_item(word: &str) -> bool {
    let is_name = word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let inner = word.chars().zip(word.chars().skip(1));
    let has_hump = inner
        .clone()
        .any(|(a, b)| a.is_ascii_lowercase() && b.is_ascii_uppercase());
    is_name && (has_hump || inner.clone().any(|(_, b)| b == '_'))
}

/// Whether the last two names of an item's path are in one file, if the first of them is a type;
/// else whether any file has the last one. Several may end the path: `Kind::{A, B}`.
fn item_exists(span: &str, tree: &Tree) -> bool {
    let path = span.split(['(', '<']).next().unwrap_or(span);
    let (before, last) = path.rsplit_once("::").unwrap_or(("", path));
    let owner = before.rsplit("::").next().unwrap_or(before);
    let is_type = owner.starts_with(|c: char| c.is_ascii_uppercase());
    let last = last.trim_matches(['{', '}']);
    last.split(',').map(str::trim).all(|name| {
        if is_type {
            tree.has_together(&[owner, name])
        } else {
            tree.has_together(&[name])
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Tree {
            paths: names(&[
                "README.md",
                "docs",
                "docs/a.md",
                "x",
                "x/y.rs",
                "docs/d/b.md",
            ]),
            names: vec![names(&["Mmu", "fault"]), names(&["Rmap", "bytes", "free"])],
        }
    }

    fn findings(text: &str) -> Vec<String> {
        let mut found = columns("docs/a.md", text);
        found.extend(check("docs/a.md", text, &tree()));
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn prose_has_columns_and_rows_and_blocks_have_none() {
        let long = "a ".repeat(60);
        assert_eq!(
            findings(&format!("short\n{long}")),
            ["docs/a.md:2: 120 columns, more than 100: wrap it"]
        );
        let free = format!("| {long} |\n```sh\n{long}\n```\nhttps://x {long}");
        assert_eq!(findings(&free), [""; 0]);
        assert_eq!(findings(&format!("```\n```\n{long}")).len(), 1);
    }

    #[test]
    fn links_lead_to_files_inside() {
        let good = "[a](a.md) [b](d/b.md#part) [c](../README.md) [d](#here) [e](https://x.y)";
        assert_eq!(findings(good), [""; 0]);
        assert_eq!(findings("[a](../a.md) [b](../../README.md)").len(), 2);
    }

    #[test]
    fn files_that_are_named_exist() {
        let good = "`x/y.rs`, (x/y.rs:12) and x/y.rs. `arch/x86/kvm/mmu.c` `dir/*.rs` /etc/a.txt";
        assert_eq!(findings(good), [""; 0]);
        let gone = ["docs/a.md:2: there is no file x/z.rs: name what it is now"];
        assert_eq!(findings("```\n└─ a (x/z.rs)\n```"), gone);
    }

    #[test]
    fn items_that_are_named_exist() {
        let good = "`Mmu::fault(id)`, `mmu::Mmu`, `host::Rmap::{bytes, free}`, `std::sync::Arc`";
        assert_eq!(findings(good), [""; 0]);
        assert_eq!(
            findings("`Mmu::bytes` `mmu::Gone` `Rmap::{bytes, fault}`").len(),
            3
        );
        assert_eq!(findings("```\n`Mmu::bytes`\n```"), [""; 0]);
        let good = "`Mmu`, `fault(id)`, `word`, `KVM`, `x.y_z`, `WP_ASYNC`, `HugePage`, `a_b(c)`";
        let gone = findings(good);
        assert_eq!(gone.len(), 2, "{gone:?}");
        assert!(gone[0].contains("`HugePage`") && gone[1].contains("`a_b(c)`"));
    }
}
