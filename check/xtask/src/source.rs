//! The rules for a single file.

use crate::finding::Finding;
use crate::imports::Unsafe;
use crate::scan::Scan;

/// Longest line, in characters. A line with a URL may be longer: it cannot be broken.
const COLUMNS: usize = 100;
/// Longest function, signature and braces included.
pub const FUNCTION_LINES: usize = 70;
/// Longest file, its tests not counted.
pub const FILE_LINES: usize = 500;
/// Longest root of a library, its tests not counted: purpose, neighbours, modules.
pub const LIB_LINES: usize = 80;

/// Notes that must not reach the main branch. Each is written in two parts, so that this line does
/// not contain one.
const NOTES: [&str; 2] = [concat!("FIX", "ME"), concat!("TO", "DO")];
/// Placeholder macros for missing code.
const PLACEHOLDERS: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// A number with a limit, which [`crate::ratchet`] judges.
#[derive(PartialEq, Eq, Debug)]
pub struct Length {
    /// `path`, `path::function` or `folder::circles`.
    pub what: String,
    /// Line to point at.
    pub line: usize,
    /// Its length, in `unit`.
    pub lines: usize,
    /// The limit.
    pub limit: usize,
    /// What is counted.
    pub unit: String,
}

/// Rules about lines, for any text file.
pub fn check_text(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        if columns > COLUMNS && !line.contains("://") {
            findings.push(Finding::at(
                path,
                number,
                format!("{columns} columns, more than 100"),
            ));
        }
        if let Some(note) = NOTES.iter().find(|note| line.contains(**note)) {
            let what = format!("{note}: do it, or open an issue");
            findings.push(Finding::at(path, number, what));
        }
    }
    findings
}

/// Rules about code, for any Rust file.
pub fn check_code(path: &str, text: &str, scan: &Scan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |line, what: String| findings.push(Finding::at(path, line, what));
    for call in scan
        .macros
        .iter()
        .filter(|call| PLACEHOLDERS.contains(&call.text.as_str()))
    {
        add(call.line, format!("{}! is a placeholder", call.text));
    }
    for attribute in &scan.attributes {
        if attribute.text == "ignore" || attribute.text.starts_with("ignore=") {
            add(attribute.line, "an ignored test tests nothing".into());
        }
        if attribute.text.starts_with("allow(unsafe_code") && !attribute.text.contains("reason=") {
            add(
                attribute.line,
                "allow(unsafe_code) without its reason".into(),
            );
        }
    }
    let lines: Vec<&str> = text.lines().collect();
    for line in scan
        .unsafe_lines
        .iter()
        .filter(|line| !is_justified(&lines, **line))
    {
        add(*line, "unsafe without a SAFETY comment above it".into());
    }
    findings
}

/// Whether the `unsafe` at `line` (from one) has its reason on the same line, or in the comment
/// above its statement. The statement may begin up to two lines before.
fn is_justified(lines: &[&str], line: usize) -> bool {
    let mut code_lines = 0;
    for text in lines[..line].iter().rev() {
        if text.contains("SAFETY:") {
            return true;
        }
        let text = text.trim_start();
        if !text.starts_with("//") && !text.starts_with("#[") {
            code_lines += 1;
        }
        if code_lines > 3 {
            return false;
        }
    }
    false
}

/// Rules about the root file of a library or program.
pub fn check_root(path: &str, text: &str, scan: &Scan, policy: Unsafe) -> Vec<Finding> {
    let has = |attribute: &str| {
        scan.inner_attributes
            .iter()
            .any(|has| has.starts_with(attribute))
    };
    let header = || text.lines().take_while(|line| line.starts_with("//!"));
    let (kept, rule) = match policy {
        Unsafe::Forbidden => (
            has("forbid(unsafe_code"),
            "#![forbid(unsafe_code)] is missing",
        ),
        Unsafe::Exceptional => (has("deny(unsafe_code"), "#![deny(unsafe_code)] is missing"),
        Unsafe::Room => (
            header().any(|line| line.contains("unsafe")),
            "a room with unsafe code says in its header why it needs it",
        ),
    };
    if kept {
        Vec::new()
    } else {
        vec![Finding::of(path, rule)]
    }
}

/// The lengths in a file that have a limit.
pub fn lengths(path: &str, text: &str, scan: &Scan) -> Vec<Length> {
    let functions = scan.functions.iter().map(|function| Length {
        what: format!("{path}::{}", function.name),
        line: function.line,
        lines: function.lines,
        limit: FUNCTION_LINES,
        unit: "lines".into(),
    });
    let mut lengths: Vec<Length> = functions.collect();
    if !path
        .split('/')
        .any(|part| part == "tests" || part == "tests.rs")
    {
        let limit = if path.ends_with("src/lib.rs") {
            LIB_LINES
        } else {
            FILE_LINES
        };
        lengths.push(Length {
            what: path.into(),
            line: 0,
            lines: product_lines(text),
            limit,
            unit: "lines".into(),
        });
    }
    lengths
}

/// Lines before the test module at the end of a file.
fn product_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| {
        pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{')
    });
    tests.unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::scan;

    fn lines(findings: &[Finding]) -> Vec<usize> {
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn long_lines_and_notes() {
        let (long, note) = ("ä".repeat(101), NOTES[1]);
        let text = format!("short\n{long}\n// {note}: later\n// see https://{long}\n");
        assert_eq!(lines(&check_text("a.rs", &text)), [2, 3]);
        assert!(check_text("a.rs", &"ä".repeat(100)).is_empty());
    }

    #[test]
    fn placeholders_and_ignored_tests() {
        let text = "fn a() { todo!() }\n#[ignore = \"slow\"]\nfn b() {}\n#[allow(unsafe_code)]\n\
                    fn c() {}\n#[allow(unsafe_code, reason = \"one impl\")]\nfn d() {}";
        assert_eq!(
            lines(&check_code("a.rs", text, &scan(text).unwrap())),
            [1, 2, 4]
        );
    }

    #[test]
    fn unsafe_needs_its_reason_near() {
        let good = "fn f() {\n    // SAFETY: p is ours,\n    // and aligned.\n    let x =\n\
                    \x20       unsafe { *p };\n}";
        assert!(check_code("a.rs", good, &scan(good).unwrap()).is_empty());
        let bad = "// SAFETY: too far\nfn f() {\n  a();\n  b();\n  c();\n  unsafe { *p };\n}";
        assert_eq!(lines(&check_code("a.rs", bad, &scan(bad).unwrap())), [6]);
        let none = "unsafe impl Send for X {}";
        assert_eq!(lines(&check_code("a.rs", none, &scan(none).unwrap())), [1]);
    }

    #[test]
    fn roots_keep_their_crate_safe() {
        let check = |text: &str, policy| check_root("lib.rs", text, &scan(text).unwrap(), policy);
        let forbids = "//! Docs.\n#![forbid(unsafe_code)]";
        let denies = "#![deny(unsafe_code, reason = \"one impl\")]";
        assert!(check(forbids, Unsafe::Forbidden).is_empty());
        assert!(check(denies, Unsafe::Exceptional).is_empty());
        assert_eq!(check(denies, Unsafe::Forbidden).len(), 1);
        assert_eq!(check("//! Docs.", Unsafe::Exceptional).len(), 1);
        assert!(check("//! Holds `unsafe`: it maps memory.", Unsafe::Room).is_empty());
        assert_eq!(check("//! Docs.", Unsafe::Room).len(), 1);
    }

    #[test]
    fn tests_do_not_count_as_product() {
        let text = "fn a() {\n}\n\n#[cfg(test)]\nmod tests {\n    fn long() {\n    }\n}\n";
        assert_eq!(product_lines(text), 3);
        assert_eq!(product_lines("#[cfg(test)]\nmod tests;\nfn a() {}\n"), 3);
        let found = lengths("x/src/lib.rs", text, &scan(text).unwrap());
        let found: Vec<_> = found
            .iter()
            .map(|l| (l.what.as_str(), l.lines, l.limit))
            .collect();
        let expected = [
            ("x/src/lib.rs::a", 2, 70),
            ("x/src/lib.rs::long", 2, 70),
            ("x/src/lib.rs", 3, 80),
        ];
        assert_eq!(found, expected);
    }
}
