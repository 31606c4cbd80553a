//! Phrases that no page or comment may use, each with a replacement.
//!
//! The list is short on purpose. It has pronouns that do not name the actor, private words for the
//! field's terms, and references to things outside of the repository. All text of Markdown pages is
//! checked, and the comments of sources.
//!
//! `check/xtask/phrases.txt` lists the packages and pages that still break these rules, one `path
//! count` a line. A page's overlong lines count there too. A count may only fall: more are a
//! finding. For fewer, a note gives the new count for the entry.

use std::collections::BTreeMap;

use crate::finding::Finding;

/// The file of exceptions, from the root of the workspace.
pub const PATH: &str = "check/xtask/phrases.txt";

/// A phrase in lower case, and its remedy. `#` stands for a number.
const REFUSED: &[(&str, &str)] = &[
    ("whoever", NAME_IT),
    ("who", NAME_IT),
    ("whom", NAME_IT),
    ("nobody", "name what does not act: no thread, no caller"),
    ("somebody", NAME_IT),
    ("anybody", NAME_IT),
    ("everybody", NAME_IT),
    ("he", NAME_IT),
    ("his", NAME_IT),
    ("him", NAME_IT),
    ("issue #", "say what is so now; history is in the log"),
    ("magazine", "write: per-CPU page cache"),
    ("magazines", "write: per-CPU page caches"),
    ("stripe", "write: range lock"),
    ("stripes", "write: range locks"),
    ("shatter", "write: split"),
    ("shattered", "write: split"),
    ("playground", "write: fixture"),
    ("done list", "write: completion queue"),
    ("../shared", OUTSIDE),
    ("/work/", OUTSIDE),
];

const NAME_IT: &str = "name the thread, vCPU, function or structure";
const OUTSIDE: &str = "the reader has only this repository: say it here";

/// The findings of one line of prose.
pub fn check(path: &str, line: usize, text: &str) -> Vec<Finding> {
    let text = text.to_lowercase();
    let words: Vec<&str> = text
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect();
    let used = REFUSED.iter().filter(|(phrase, _)| {
        if phrase.contains('/') {
            return text.contains(phrase);
        }
        let phrase: Vec<&str> = phrase.split(' ').collect();
        words
            .windows(phrase.len())
            .any(|part| part.iter().zip(&phrase).all(|(word, want)| is(word, want)))
    });
    used.map(|(phrase, instead)| {
        let what = format!("\"{phrase}\" is refused: {instead}");
        Finding::at(path, line, what)
    })
    .collect()
}

fn is(word: &str, want: &str) -> bool {
    if want == "#" {
        return word.bytes().all(|byte| byte.is_ascii_digit());
    }
    word == want
}

/// The findings of all places with more than `exceptions` allows, and notes about places with
/// fewer.
///
/// `places` has the findings of each package and page, by its path from the root.
pub fn ratchet(
    exceptions: &str,
    mut places: BTreeMap<String, Vec<Finding>>,
) -> (Vec<Finding>, Vec<String>) {
    let (mut findings, mut notes) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(exceptions.lines()) {
        let entry = line.split('#').next().unwrap_or("").trim();
        if entry.is_empty() {
            continue;
        }
        let parsed = entry.split_once(' ');
        let parsed = parsed.and_then(|(path, n)| Some((path, n.trim().parse::<usize>().ok()?)));
        let place = parsed.and_then(|(path, n)| Some((path, n, places.remove(path)?)));
        let Some((path, allowed, found)) = place else {
            let what = format!("want `path count` of a package or page that exists: {entry}");
            findings.push(Finding::at(PATH, number, what));
            continue;
        };
        if found.len() > allowed {
            let what = format!("{} breaches in prose, more than {allowed}", found.len());
            findings.push(Finding::of(path, what));
            findings.extend(found);
        } else if found.len() < allowed {
            notes.push(format!("{PATH}: lower {path} to {}", found.len()));
        }
    }
    findings.extend(places.into_values().flatten());
    (findings, notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phrases(text: &str) -> Vec<String> {
        let found = check("a.md", 3, text);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_refusal_says_where_what_and_what_instead() {
        let want = format!("a.md:3: \"whoever\" is refused: {NAME_IT}");
        assert_eq!(phrases("Whoever unmaps, waits."), [want]);
        assert_eq!(phrases("see Issue 12, or issue #7"), phrases("issue 7"));
        assert_eq!(phrases("[x](../shared/a.md) /work/b").len(), 2);
        assert_eq!(phrases("Nobody he knows.").len(), 2);
    }

    #[test]
    fn a_phrase_is_whole_words() {
        assert!(phrases("the whole issue, whose theory of history; who_am_i").is_empty());
        assert!(phrases("issues 12; an issue: 5x").is_empty());
    }

    fn places(count: usize) -> BTreeMap<String, Vec<Finding>> {
        let found = vec![Finding::at("a/b.rs", 1, "who"); count];
        BTreeMap::from([("a".to_owned(), found)])
    }

    #[test]
    fn a_count_only_falls() {
        assert_eq!(ratchet("", places(1)).0.len(), 1);
        assert_eq!(ratchet("# why\na 2 # two", places(2)), (vec![], vec![]));
        let (findings, _) = ratchet("a 2", places(3));
        assert_eq!(findings[0].what, "3 breaches in prose, more than 2");
        assert_eq!(findings.len(), 4);
        let (findings, notes) = ratchet("a 2", places(1));
        assert!(findings.is_empty());
        assert_eq!(notes, [format!("{PATH}: lower a to 1")]);
    }

    #[test]
    fn stale_and_malformed_entries_are_findings() {
        assert_eq!(ratchet("b 1", places(0)).0.len(), 1);
        assert_eq!(ratchet("a many", places(0)).0.len(), 1);
        assert_eq!(ratchet("a 1\na 1", places(1)).0.len(), 1);
    }
}
