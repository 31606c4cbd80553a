//! The exceptions from the limits of length, and from the rule against circles. They may only
//! become smaller.
//!
//! `check/xtask/ratchet.txt` lists overlong files and functions, and crates with files that import
//! each other in circles: a line is `path lines`, `path::function lines` or
//! `folder::circles files`. A comment behind `#` gives the reason. An entry allows exactly its
//! number: more is a finding, and so is less, until the entry is lowered or removed.

use std::collections::BTreeMap;

use crate::finding::Finding;
use crate::source::Length;

/// The file, from the root of the workspace.
pub const PATH: &str = "check/xtask/ratchet.txt";

/// Checks every length against its limit, or its exception in `ratchet`.
pub fn check(ratchet: &str, lengths: &[Length]) -> Vec<Finding> {
    let (mut exceptions, mut findings) = parse(ratchet);
    for length in lengths {
        let Length {
            what,
            line,
            lines,
            limit,
            unit,
        } = length;
        let path = what.split("::").next().unwrap_or(what);
        let allowed = exceptions.remove(what.as_str());
        let problem = match allowed {
            Some(allowed) if lines > limit && *lines < allowed => {
                format!("lower its entry in {PATH} to {lines}")
            }
            Some(_) if lines <= limit => format!("take its entry out of {PATH}"),
            _ if *lines > allowed.unwrap_or(*limit) => {
                let limit = allowed.unwrap_or(*limit);
                format!("{what} has {lines} {unit}, more than {limit}")
            }
            _ => continue,
        };
        findings.push(Finding::at(path, *line, problem));
    }
    let stale = exceptions
        .keys()
        .map(|what| Finding::of(PATH, format!("there is no {what}")));
    findings.extend(stale);
    findings
}

fn parse(ratchet: &str) -> (BTreeMap<&str, usize>, Vec<Finding>) {
    let (mut exceptions, mut findings) = (BTreeMap::new(), Vec::new());
    for (number, line) in (1..).zip(ratchet.lines()) {
        let entry = line.split('#').next().unwrap_or("").trim();
        let parsed = entry
            .split_once(' ')
            .and_then(|(what, n)| Some((what, n.trim().parse().ok()?)));
        match parsed {
            Some((what, lines)) if exceptions.insert(what, lines).is_none() => {}
            None if entry.is_empty() => {}
            _ => findings.push(Finding::at(
                PATH,
                number,
                "want one `path lines`, `path::fn lines` or `folder::circles files`",
            )),
        }
    }
    (exceptions, findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(ratchet: &str, lines: usize) -> Vec<String> {
        let length = Length {
            what: "a.rs::f".into(),
            line: 3,
            lines,
            limit: 70,
            unit: "lines".into(),
        };
        check(ratchet, &[length])
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn without_an_exception_the_limit_holds() {
        assert!(problems("", 70).is_empty());
        assert_eq!(
            problems("", 71),
            ["a.rs:3: a.rs::f has 71 lines, more than 70"]
        );
    }

    #[test]
    fn an_exception_only_shrinks() {
        let ratchet = "# one big match\na.rs::f 90 # over all opcodes\n";
        assert!(problems(ratchet, 90).is_empty());
        assert!(problems(ratchet, 91)[0].ends_with("more than 90"));
        assert!(problems(ratchet, 89)[0].ends_with("to 89"));
        assert!(problems(ratchet, 70)[0].contains("take its entry out"));
    }

    #[test]
    fn stale_and_malformed_entries_are_findings() {
        assert_eq!(
            problems("b.rs::gone 90", 1),
            [format!("{PATH}: there is no b.rs::gone")]
        );
        assert_eq!(problems("nonsense", 1).len(), 1);
        assert_eq!(problems("a.rs::f 91\na.rs::f 91", 91).len(), 1);
    }
}
