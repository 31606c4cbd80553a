//! The code blocks of the README and of the book. The command accepts their command lines, the
//! crates and examples that they name exist, and their Rust is copied from programs that the tests
//! compile.

use clap::Parser;
use lacuna_cli::args::Cli;
use std::fs;
use std::path::{Path, PathBuf};

/// Programs that are the command. `cargo run` is too, unless it names a crate.
const COMMAND: [&str; 2] = ["lacuna", "target/release/lacuna"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The README, the guests' README, and the pages below `docs`.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![root().join("README.md"), root().join("guest/README.md")];
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                pages.push(path);
            }
        }
    }
    pages
}

/// The code blocks of a page in `language`.
fn blocks<'a>(text: &'a str, language: &str) -> impl Iterator<Item = &'a str> {
    let blocks = text.split("```").skip(1).step_by(2);
    blocks.filter_map(move |block| block.strip_prefix(language)?.strip_prefix('\n'))
}

/// The words of each command of a script: quotes, comments and continued lines are as in `sh`. A
/// redirection ends the words of its command.
fn commands(script: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let (mut quote, mut is_redirected) = (None, false);
    let mut chars = script.chars().chain(['\n']);
    while let Some(mut c) = chars.next() {
        match c {
            _ if quote == Some(c) => quote = None,
            '\'' | '"' if quote.is_none() => {
                quote = Some(c);
                word.get_or_insert_default();
                continue;
            }
            '\\' if quote != Some('\'') => match chars.next() {
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            '#' if quote.is_none() && word.is_none() => {
                c = chars.find(|&c| c == '\n').unwrap_or('\n');
            }
            '<' | '>' if quote.is_none() => is_redirected = true,
            _ if quote.is_none() && (c.is_whitespace() || ";&|".contains(c)) => {}
            _ => word.get_or_insert_default().push(c),
        }
        if quote.is_none() && (c.is_whitespace() || ";&|".contains(c)) {
            words.extend(word.take().filter(|_| !is_redirected));
            if "\n;&|".contains(c) {
                commands.push(std::mem::take(&mut words));
                is_redirected = false;
            }
        }
    }
    commands.retain(|words| !words.is_empty());
    commands
}

/// What is wrong with a command of a page. `None` too for one with a placeholder, which is a word
/// in capitals, and for other programs.
fn problem(words: &[String]) -> Option<String> {
    let is_setting = |word: &&String| word.contains('=') && !word.starts_with('-');
    let mut words = words.iter().skip_while(is_setting).map(String::as_str);
    let placeholder = |word: &str| {
        let mut chars = word.trim_end_matches(']').chars();
        word.len() > 1 && chars.all(|c| c.is_ascii_uppercase() || c == '.')
    };
    if words.clone().any(placeholder) {
        return None;
    }
    let nested = words.clone().filter(|word| word.contains(' '));
    if let Some(wrong) = nested.flat_map(commands).find_map(|words| problem(&words)) {
        return Some(wrong);
    }
    let all = words.clone();
    let after = |name: &str| all.clone().skip_while(|&word| word != name).nth(1);
    match words.next()? {
        "exec" => problem(&words.map(str::to_owned).collect::<Vec<_>>()),
        program if COMMAND.contains(&program) => refusal(words),
        "cargo" => match after("-p") {
            Some(name) => {
                let Some(folder) = folder(name) else {
                    return Some(format!("no crate {name}"));
                };
                let example = folder.join(format!("examples/{}.rs", after("--example")?));
                (!example.exists()).then(|| format!("no {}", example.display()))
            }
            None if words.next() == Some("run") => {
                refusal(words.skip_while(|&w| w != "--").skip(1))
            }
            None => None,
        },
        _ => None,
    }
}

/// Why the command refuses its arguments.
fn refusal<'a>(words: impl Iterator<Item = &'a str>) -> Option<String> {
    let line = ["lacuna"].into_iter().chain(words);
    Cli::try_parse_from(line)
        .err()
        .map(|error| error.to_string())
}

/// The folder of the crate `name` of this workspace.
fn folder(name: &str) -> Option<PathBuf> {
    let inside = |folder: PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path()))
    };
    let line = format!("\nname = \"{name}\"\n");
    let is_its = |folder: &PathBuf| {
        let manifest = fs::read_to_string(folder.join("Cargo.toml"));
        manifest.is_ok_and(|text| text.contains(&line))
    };
    let mut folders = inside(root()).flat_map(|row| inside(row.clone()).chain([row]));
    folders.find(is_its)
}

#[test]
fn the_pages_show_commands_that_are_accepted() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for words in blocks(&text, "sh").flat_map(commands) {
            seen += 1;
            if let Some(problem) = problem(&words) {
                wrong.push(format!(
                    "{}: {}\n{problem}",
                    page.display(),
                    words.join(" ")
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 100, "only {seen} commands found");
}

#[test]
fn a_wrong_command_of_a_page_is_found() {
    let text = "`lacuna nosuch`\n```text\nlacuna nosuch\n```\n```sh\nA=1 lacuna run bm \\\n  \
                --append \"a=1 b=2\" & # live\ntrue && lacuna nosuch > file 2\n```\n";
    let found: Vec<_> = blocks(text, "sh").flat_map(commands).collect();
    assert_eq!(
        found[0],
        ["A=1", "lacuna", "run", "bm", "--append", "a=1 b=2"]
    );
    assert_eq!(found[1..], [vec!["true"], vec!["lacuna", "nosuch"]]);
    let is_wrong = |line| commands(line).iter().any(|words| problem(words).is_some());
    for wrong in [
        "cd x; lacuna run --nosuch",
        "sh -c 'exec lacuna lab nosuch'",
        "cargo run --release -- lab nosuch",
        "cargo test -p lacuna-nosuch",
        "cargo run -p lacuna --example nosuch",
    ] {
        assert!(is_wrong(wrong), "{wrong}");
    }
    for right in [
        "lacuna run IMAGE --nosuch",
        "cargo run -p lacuna --example boot",
    ] {
        assert!(!is_wrong(right), "{right}");
    }
}

/// The lines of code of an example: a program, or the documentation of a crate.
fn code(text: &str) -> Vec<&str> {
    let lines = text
        .lines()
        .map(|line| line.strip_prefix("//!").unwrap_or(line).trim());
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
    lines.filter(is_code).collect()
}

/// The compiled sources that the pages may copy from.
fn examples() -> Vec<String> {
    let mut paths = vec![
        root().join("lacuna/src/lib.rs"),
        root().join("control/src/lib.rs"),
    ];
    for folder in [
        "lacuna/examples",
        "control/examples",
        "pager-client/examples",
    ] {
        let files = fs::read_dir(root().join(folder)).unwrap();
        paths.extend(files.map(|file| file.unwrap().path()));
    }
    paths
        .iter()
        .map(|path| fs::read_to_string(path).unwrap())
        .collect()
}

#[test]
fn the_rust_of_the_pages_is_of_compiled_examples() {
    let examples = examples();
    let examples: Vec<_> = examples.iter().map(|text| code(text)).collect();
    let is_copied = |block: &str| {
        let lines = code(block);
        let is_here = |example: &Vec<&str>| example.windows(lines.len()).any(|it| it == lines);
        !lines.is_empty() && examples.iter().any(is_here)
    };
    assert!(!is_copied("let a = 1;") && is_copied("// A comment.\nsocket.attend(&guest);\n"));
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for block in blocks(&text, "rust") {
            let page = page.display();
            assert!(is_copied(block), "{page}: no example has\n{block}");
        }
    }
}
