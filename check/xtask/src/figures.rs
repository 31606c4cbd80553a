//! `cargo xtask figures`: the pages' figures come from one file, `docs/figures.json`.
//!
//! ```text
//! lacuna lab PART --json out.json ─► cargo xtask figures --add out.json ─► docs/figures.json
//! docs/figures.json ─► cargo xtask figures ─┬► tables and numbers between markers in every page
//!                   │                       └► docs/report: a page with plots, and pictures
//!                   └► cargo xtask tidy: a page that differs is a finding
//! ```
//! The file has one entry for each run of the lab ([`runs`]). A figure may have several runs, hours
//! apart, and a run may have only some experiments. [`pages`] describes the markers, [`mod@report`]
//! draws the report.

mod pages;
mod report;
mod runs;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{fs, io};

use crate::finding::Finding;
use crate::tree;
use runs::Runs;

/// The file, from the root of the workspace.
const PATH: &str = "docs/figures.json";

/// What is wrong with a page that differs.
const STALE: &str = "not what docs/figures.json has: run `cargo xtask figures`";

const HELP: &str = "\
usage: cargo xtask figures                             renew all pages and docs/report
       cargo xtask figures --add FILE [--commit NAME]  add a run of the lab, then renew them

FILE is what `lacuna lab ... --json FILE` wrote; NAME is the commit that was measured (default:
HEAD). Exit codes: 0 done; 2 wrong arguments; 3 something could not be read or written.";

/// Carries out `cargo xtask figures` with `arguments`.
pub fn run(arguments: &[String]) -> ExitCode {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        [] => renew(Path::new(".")),
        ["--add", file] => add(file, "HEAD"),
        ["--add", file, "--commit", commit] => add(file, commit),
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(said) => {
            print!("{said}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("figures: {why}");
            ExitCode::from(3)
        }
    }
}

/// Adds the lab's report in `file`, measured at `commit`.
fn add(file: &str, commit: &str) -> Result<String, String> {
    let root = Path::new(".");
    let report = read(Path::new(file))?;
    let commit = git(
        root,
        &["rev-parse", "--short=7", &format!("{commit}^{{commit}}")],
    )
    .ok_or_else(|| format!("git knows no commit {commit}"))?;
    let path = root.join(PATH);
    let mut runs = Runs::parse(&read(&path)?).map_err(|why| format!("{PATH}: {why}"))?;
    runs.add(&report, &commit)
        .map_err(|why| format!("{file}: {why}"))?;
    write(&path, &runs.to_json())?;
    renew(root)
}

/// Renews the pages below `root`, and the report. Returns the names of the changed files, a line
/// each.
fn renew(root: &Path) -> Result<String, String> {
    let runs = Runs::parse(&read(&root.join(PATH))?).map_err(|why| format!("{PATH}: {why}"))?;
    let mut changed = String::new();
    for path in markdown(root).map_err(|error| error.to_string())? {
        let text = read(&path)?;
        let (renewed, problems) = pages::renewed(&text, &runs);
        if let Some((line, problem)) = problems.first() {
            return Err(format!("{}:{line}: {problem}", path.display()));
        }
        if renewed != text {
            write(&path, &renewed)?;
            changed.push_str(&format!("renewed {}\n", path.display()));
        }
    }
    for (path, text) in report::files(&runs) {
        let path = root.join(path);
        if fs::read_to_string(&path).ok().as_deref() != Some(&text) {
            fs::create_dir_all(path.parent().unwrap_or(root)).map_err(|error| error.to_string())?;
            write(&path, &text)?;
            changed.push_str(&format!("renewed {}\n", path.display()));
        }
    }
    Ok(changed)
}

/// The pages whose figures differ from the file's, and missing commits. `root` is the root of the
/// workspace.
pub fn check(root: &Path) -> io::Result<Vec<Finding>> {
    let runs = match Runs::parse(&fs::read_to_string(root.join(PATH))?) {
        Ok(runs) => runs,
        Err(why) => return Ok(vec![Finding::of(PATH, why)]),
    };
    let mut findings = unknown_commits(root, &runs);
    for path in markdown(root)? {
        let text = fs::read_to_string(&path)?;
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy();
        let (renewed, problems) = pages::renewed(&text, &runs);
        let problems = problems.into_iter();
        findings.extend(problems.map(|(line, what)| Finding::at(&name, line, what)));
        if renewed != text {
            let mut lines = (1..).zip(renewed.lines().zip(text.lines()));
            let differs = lines.find(|(_, (new, old))| new != old);
            let line = differs.map_or(0, |(line, _)| line);
            findings.push(Finding::at(&name, line, STALE));
        }
    }
    for (path, text) in report::files(&runs) {
        if fs::read_to_string(root.join(&path)).ok().as_deref() != Some(&text) {
            findings.push(Finding::of(&path.to_string_lossy(), STALE));
        }
    }
    Ok(findings)
}

/// The commits of `runs` outside of the history of `HEAD`: a commit of a rebased branch exists only
/// where it was made. Without git, and in a clone without history, the result is empty.
fn unknown_commits(root: &Path, runs: &Runs) -> Vec<Finding> {
    if git(root, &["rev-parse", "--is-shallow-repository"]).as_deref() != Some("false") {
        return Vec::new();
    }
    let is_in_history =
        |commit| git(root, &["merge-base", "--is-ancestor", commit, "HEAD"]).is_some();
    let unknown = runs.commits().filter(|&commit| !is_in_history(commit));
    unknown
        .map(|commit| Finding::of(PATH, format!("HEAD's history has no commit {commit}")))
        .collect()
}

/// The output of git, without the newline; nothing if git fails or is not installed.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    let output = command.arg("-C").arg(root).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn markdown(root: &Path) -> io::Result<Vec<PathBuf>> {
    tree::files(root, &["md"])
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"runs":[
{"commit":"abcdef1","date":"2026-11-24","host":"H, 2 cores, L","command":"lab base","results":[
{"id":"a.b","value":2.0,"min":1.5,"max":2.5,"runs":6,"unit":"x","better":"higher"}
]}
]}
"#;

    fn workspace(page: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("docs")).unwrap();
        fs::write(dir.path().join(PATH), JSON).unwrap();
        fs::write(dir.path().join("docs/page.md"), page).unwrap();
        dir
    }

    #[test]
    fn a_page_is_renewed_and_then_agrees() {
        let dir = workspace("one\nIt is <!--= a.b-->1.00<!--/--> times.\n");
        let findings = check(dir.path()).unwrap();
        let report = findings[1].to_string();
        assert!(report.starts_with("docs/report/index.html"), "{report}");
        let text = findings[0].to_string();
        assert!(text.starts_with("docs/page.md:2: not what"), "{text}");
        assert!(renew(dir.path()).unwrap().contains("docs/page.md"));
        assert_eq!(check(dir.path()).unwrap(), []);
        let page = fs::read_to_string(dir.path().join("docs/page.md")).unwrap();
        assert!(page.contains("-->2.00 [1.50 .. 2.50]<!--/-->"), "{page}");
        assert_eq!(renew(dir.path()).unwrap(), "");
    }

    #[test]
    fn a_figure_that_was_never_measured_is_a_finding() {
        let dir = workspace("<!--= a.c-->1.00<!--/-->\n");
        let findings = check(dir.path()).unwrap();
        assert!(findings[0].to_string().contains("no run has a.c"));
        assert!(renew(dir.path()).unwrap_err().contains("page.md:1:"));
    }

    #[test]
    fn a_commit_that_git_does_not_know_is_a_finding() {
        let dir = workspace("");
        let runs = Runs::parse(JSON).unwrap();
        assert_eq!(unknown_commits(dir.path(), &runs), [], "no repository");
        if git(dir.path(), &["init", "--quiet"]).is_none() {
            lacuna_skip::skip_test("git is not installed");
        }
        let findings = unknown_commits(dir.path(), &runs);
        assert!(findings[0].to_string().contains("no commit abcdef1"));
    }
}
