//! House-keeping that `cargo` does not do: `cargo xtask tidy`.
//!
//! Style rules are a test, or they are a wish. Each module here is one group of rules, a function
//! from text to [`finding::Finding`]s that its own tests run on small fixtures; [`tidy`] walks the
//! workspace and applies them.
//!
//! | module | rules |
//! |---|---|
//! | [`imports`] | which crate may import which; which crates may hold `unsafe` |
//! | [`source`] | one file: columns, lengths, SAFETY comments, leftovers |
//! | [`tree`] | no orphan file; every row of folders has its README |
//! | [`ratchet`] | the exceptions in length, which may only shrink |
//! | [`phrases`] | phrases that pages and comments do not use |
//! | [`pages`] | Markdown: columns; files, links and items that are named exist |
#![forbid(unsafe_code)]

mod comments;
mod finding;
mod imports;
mod pages;
mod phrases;
mod ratchet;
mod scan;
mod source;
mod tidy;
mod tree;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy::run(),
        _ => {
            eprintln!("usage: cargo xtask tidy     check the house rules (what CI does: .ci/run)");
            ExitCode::from(2)
        }
    }
}
