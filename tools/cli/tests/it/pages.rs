//! The command accepts the command lines of the documentation pages.

use clap::Parser;
use lacuna_cli::args::Cli;
use std::path::Path;

const PAGES: [&str; 5] = [
    "README.md",
    "guest/README.md",
    "docs/commands.md",
    "docs/speed-pml.md",
    "docs/speed-x86.md",
];

/// The words after `lacuna` of every command in the code blocks of `text`. A command with a
/// placeholder, a word in capitals, is left out.
fn commands(text: &str) -> Vec<Vec<&str>> {
    let blocks = text.split("```").skip(1).step_by(2);
    let lines = blocks.flat_map(str::lines).map(str::trim);
    lines.filter_map(arguments).collect()
}

fn arguments(line: &str) -> Option<Vec<&str>> {
    let line = line.split(" #").next()?.trim();
    let starts = [
        "lacuna ",
        "target/release/lacuna ",
        "cargo run --release -- ",
    ];
    let rest = starts.iter().find_map(|start| line.strip_prefix(start))?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let placeholder = |word: &&str| {
        let mut chars = word.chars();
        word.len() > 1 && chars.all(|c| c.is_ascii_uppercase() || c == '.')
    };
    // `lacuna = ...` is a line of a Cargo.toml.
    let command = words.first() != Some(&"=") && !words.iter().any(placeholder);
    command.then_some(words)
}

#[test]
fn the_pages_show_commands_that_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in PAGES {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        for words in commands(&text) {
            seen += 1;
            let line = ["lacuna"].iter().chain(&words);
            if let Err(error) = Cli::try_parse_from(line) {
                wrong.push(format!("{page}: {}\n{error}", words.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 12, "only {seen} commands found");
}

#[test]
fn a_command_is_found_and_a_wrong_one_is_refused() {
    let text =
        "`lacuna nosuch`\n```sh\nlacuna run bm --memory 2G    # live\nlacuna run IMAGE\n```\n";
    assert_eq!(commands(text), [["run", "bm", "--memory", "2G"]]);
    assert!(Cli::try_parse_from(["lacuna", "lab", "nosuch"]).is_err());
}
