//! The command line of `cargo xtask compare`.

use std::path::PathBuf;

/// The text of `--help`.
pub const HELP: &str = "\
usage: cargo xtask compare OLD [NEW] [OPTIONS]

Builds the commits OLD and NEW in worktrees under target/compare, measures them in turns with each
commit's own `lacuna lab`, and prints what became slower or faster. NEW defaults to HEAD of the
working tree, which must then be clean.

  --parts LIST     parts of the lab, with commas between them
                   (default: base.fault,thp.range,thp.touch,pml.page)
  --rounds N       paired rounds of each part (default 7; 0 measures no time)
  --quick          the lab's short rounds: for a first look, not for figures to quote
  --instructions   also count instructions per fault and per access, with x86-64 and with AArch64
                   guests (needs valgrind)
  --json FILE      write everything as JSON, too

Exit codes: 0 nothing became slower, 1 something did, or it failed in one commit; 2 wrong
arguments; 3 the commits could not be compared.";

/// The default parts. They are short, and each shows one path: a fault, an invalidation, a huge
/// first touch, a dirtied page.
const PARTS: [&str; 4] = ["base.fault", "thp.range", "thp.touch", "pml.page"];
/// The smallest and the largest ratio of seven rounds enclose the median with 98 % probability.
const ROUNDS: usize = 7;

/// A parsed command line.
#[derive(PartialEq, Eq, Debug)]
pub enum Request {
    /// Print [`HELP`].
    Help,
    /// Compare two commits.
    Compare(Arguments),
}

/// How long the lab's rounds are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// The lab's own length, without an option.
    Full,
    /// `--quick`.
    Quick,
}

/// What to compare, and how.
#[derive(PartialEq, Eq, Debug)]
pub struct Arguments {
    /// The commit to compare with.
    pub old: String,
    /// The commit to judge; `None` for HEAD of the working tree.
    pub new: Option<String>,
    /// Parts of the lab.
    pub parts: Vec<String>,
    /// Paired rounds of each part.
    pub rounds: usize,
    /// Length of the lab's own rounds.
    pub length: Length,
    /// Whether instructions are counted as well.
    pub instructions: bool,
    /// The file for the JSON.
    pub json: Option<PathBuf>,
}

/// Parses the words after `compare`. The error names the wrong word.
pub fn parse(words: &[String]) -> Result<Request, String> {
    let mut arguments = Arguments {
        old: String::new(),
        new: None,
        parts: PARTS.map(str::to_owned).to_vec(),
        rounds: ROUNDS,
        length: Length::Full,
        instructions: false,
        json: None,
    };
    let mut commits = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || {
            let value = words.next();
            value.ok_or_else(|| format!("{word} needs a value"))
        };
        match word.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "--quick" => arguments.length = Length::Quick,
            "--instructions" => arguments.instructions = true,
            "--json" => arguments.json = Some(value()?.into()),
            "--parts" => arguments.parts = parts(value()?)?,
            "--rounds" => {
                let text = value()?;
                let number = text.parse();
                arguments.rounds = number.map_err(|_| format!("--rounds {text}: not a number"))?;
            }
            option if option.starts_with('-') => return Err(format!("no option {option}")),
            commit => commits.push(commit.to_owned()),
        }
    }
    if arguments.rounds == 0 && !arguments.instructions {
        return Err("--rounds 0 measures nothing without --instructions".into());
    }
    let mut commits = commits.into_iter();
    arguments.old = commits.next().ok_or("which commit is OLD?")?;
    arguments.new = commits.next();
    match commits.next() {
        Some(third) => Err(format!("{third}: two commits are compared, not three")),
        None => Ok(Request::Compare(arguments)),
    }
}

fn parts(list: &str) -> Result<Vec<String>, String> {
    let parts: Vec<String> = list.split(',').map(str::to_owned).collect();
    if parts.iter().any(String::is_empty) {
        return Err(format!("--parts {list}: a name is missing beside a comma"));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Request, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&words)
    }

    #[test]
    fn a_commit_is_enough() {
        let Ok(Request::Compare(arguments)) = parsed("abc") else {
            panic!("a comparison");
        };
        assert_eq!((arguments.old.as_str(), arguments.new), ("abc", None));
        assert_eq!(arguments.parts, PARTS);
        assert_eq!((arguments.rounds, arguments.length), (7, Length::Full));
    }

    #[test]
    fn options_stand_anywhere() {
        let line = "--quick a --parts thp.range,base.cpu b --rounds 3 --instructions --json x.json";
        let Ok(Request::Compare(arguments)) = parsed(line) else {
            panic!("a comparison");
        };
        let expected = Arguments {
            old: "a".into(),
            new: Some("b".into()),
            parts: vec!["thp.range".into(), "base.cpu".into()],
            rounds: 3,
            length: Length::Quick,
            instructions: true,
            json: Some("x.json".into()),
        };
        assert_eq!(arguments, expected);
    }

    #[test]
    fn errors_name_the_word() {
        for (line, word) in [
            ("", "OLD"),
            ("a b c", "c:"),
            ("a --fast", "--fast"),
            ("a --rounds many", "many"),
            ("a --rounds", "--rounds needs"),
            ("a --rounds 0", "measures nothing"),
            ("a --parts x,,y", "missing beside a comma"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
        assert_eq!(parsed("a --help"), Ok(Request::Help));
    }

    /// The list in the help text is the list in the code.
    #[test]
    fn the_help_names_the_default_parts() {
        assert!(HELP.contains(&PARTS.join(",")));
        assert!(HELP.contains(&format!("(default {ROUNDS};")));
    }
}
