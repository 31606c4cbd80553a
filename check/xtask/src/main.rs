//! The workspace's own commands: `cargo xtask tidy`, `cargo xtask compare`, `cargo xtask figures`
//! and `cargo xtask guest`.
//!
//! [`tidy`] checks the rules of the workspace. Each of its modules is one group of rules: a
//! function from text to [`finding::Finding`]s, with tests on small fixtures. [`compare`] measures
//! two commits in turns on one machine. [`figures`] renews the pages' figures. [`guest`] builds the
//! committed images.
//!
//! | module | contents |
//! |---|---|
//! | [`tidy`] | walks the workspace and applies the rules below |
//! | [`imports`] | which crate may import which; which crates may hold `unsafe` |
//! | [`source`] | one file: columns, lengths, SAFETY comments, leftovers |
//! | [`circles`] | files of a crate do not import each other in circles |
//! | [`tree`] | no orphan file; every row of folders has its README |
//! | [`ratchet`] | the exceptions in length, which may only shrink |
//! | [`phrases`] | phrases that pages and comments do not use |
//! | [`pages`] | Markdown: columns; files, links and items that are named exist |
//! | [`book`] | the book's contents list every page; links lead to headings, and stay inside |
//! | [`guest`] | builds the committed AArch64 guest images, or compares them with their sources |
//! | [`compare`] | two commits, measured in turns: what became slower or faster |
//! | [`figures`] | the figures in pages, from the runs in `docs/figures.json` |
#![forbid(unsafe_code)]

mod arch;
mod book;
mod circles;
mod comments;
mod compare;
mod figures;
mod finding;
mod guest;
mod imports;
mod locks;
mod pages;
mod phrases;
mod ratchet;
mod scan;
mod source;
mod tidy;
mod tree;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask tidy                         check the rules of the house
       cargo xtask compare OLD [NEW] [OPTIONS]  measure two commits; --help lists the options
       cargo xtask figures [--add FILE]         renew the figures in all pages; --help says more
       cargo xtask guest [--check]              build the AArch64 guest images, or compare them";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy::run(),
        ["guest", ..] => guest::run(&arguments[1..]),
        ["figures", ..] => figures::run(&arguments[1..]),
        ["compare", ..] => compare::run(&arguments[1..]),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
