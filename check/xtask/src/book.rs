//! The book, which `mdbook build` makes of `docs`: its contents list every page, its links stay
//! inside, and a link to a part of any page leads to a heading.

use std::collections::{BTreeMap, BTreeSet};

use crate::finding::Finding;
use crate::pages::{lines, links, resolve};

const CONTENTS: &str = "docs/SUMMARY.md";

/// The breaches in `pages`, all Markdown of the workspace by its path from the root.
pub fn check(pages: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let contents = pages.get(CONTENTS).map_or("", String::as_str);
    let listed = links(contents).filter_map(|target| resolve(CONTENTS, target));
    let listed: BTreeSet<_> = listed.collect();
    for (path, text) in pages {
        let is_page = path.starts_with("docs/") && path != CONTENTS;
        if is_page && !listed.contains(path) {
            findings.push(Finding::of(path, format!("add it to {CONTENTS}")));
        }
        let prose = lines(text).filter(|&(_, _, in_block)| !in_block);
        for (number, target) in prose.flat_map(|(n, line, _)| links(line).map(move |to| (n, to))) {
            let (file, part) = target.split_once('#').unwrap_or((target, ""));
            let other = || resolve(path, file).unwrap_or_default();
            let file = if file.is_empty() {
                path.clone()
            } else {
                other()
            };
            let of_file = pages.get(&file).filter(|_| !part.is_empty());
            let mut add = |what| findings.push(Finding::at(path, number, what));
            // mdBook makes `index.html` of a `README.md`, and does not change the links to it.
            let is_gone = !file.starts_with("docs/") || file.ends_with("README.md");
            if is_page && (is_gone || file == CONTENTS) {
                add(format!(
                    "the book has no page {file}: name it without a link"
                ));
            } else if of_file.is_some_and(|text| anchors(text).all(|anchor| anchor != part)) {
                add(format!("{file} has no heading for #{part}"));
            }
        }
    }
    findings
}

/// The names of the headings of a page, as mdBook and forges make them.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    let headings = lines(text).filter(|(_, line, in_block)| !in_block && line.starts_with('#'));
    headings.map(|(_, line, _)| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = |c: char| match c {
            ' ' => Some('-'),
            _ => (c.is_alphanumeric() || "_-".contains(c)).then_some(c),
        };
        title.chars().filter_map(kept).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contents_list_all_pages_and_links_lead_to_headings_inside() {
        let pages = [
            (
                "README.md",
                "[a](docs/a.md#gone) [a](docs/a.md#one-more-v2)",
            ),
            (CONTENTS, "- [a](a.md)"),
            (
                "docs/a.md",
                "```sh\n# b\n```\n# One more: `v2`\n[a](#b) [c](https://c.d/#e)",
            ),
            ("docs/left.md", "[r](../README.md)"),
        ];
        let found = check(&pages.map(|(path, text)| (path.into(), text.into())).into());
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        let wanted = [
            "README.md:1: docs/a.md has no heading for #gone",
            "docs/a.md:5: docs/a.md has no heading for #b",
            "docs/left.md: add it to docs/SUMMARY.md",
            "docs/left.md:1: the book has no page README.md: name it without a link",
        ];
        assert_eq!(found, wanted);
    }
}
