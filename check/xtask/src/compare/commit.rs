//! Commits: their names, worktrees and binaries.
//!
//! ```text
//! target/compare/old/tree      a git worktree at the old commit        new/tree   at the new one
//!               old/target    cargo's target folder, kept             new/target
//! ```
//! A second comparison moves the worktrees to its commits, so cargo compiles only the differences.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::lab::tail;
use super::progress::Progress;
use super::{Failure, failure};

/// How many lines of a failed build are shown.
const TAIL_LINES: usize = 30;
/// Length of an abbreviated commit.
const SHORT: usize = 10;

/// A commit of this repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Commit {
    /// Its full hash.
    pub hash: String,
    /// The first line of its message.
    pub subject: String,
}

impl Commit {
    /// The abbreviated hash.
    pub fn short(&self) -> &str {
        &self.hash[..SHORT.min(self.hash.len())]
    }
}

/// A commit with its program.
pub struct Built {
    /// The commit.
    pub commit: Commit,
    /// Its `lacuna` program.
    pub binary: PathBuf,
}

/// The root of the working tree.
pub fn root() -> Result<PathBuf, Failure> {
    let here = std::env::current_dir().map_err(|error| Failure(error.to_string()))?;
    let root = git(&here, &["rev-parse", "--show-toplevel"])?;
    Ok(PathBuf::from(root))
}

/// The commit that `name` means.
pub fn resolve(root: &Path, name: &str) -> Result<Commit, Failure> {
    let revision = format!("{name}^{{commit}}");
    let hash = git(
        root,
        &[
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &revision,
        ],
    );
    let Ok(hash) = hash else {
        return failure(format!(
            "there is no commit {name}: give a hash, a branch or a tag of this repository"
        ));
    };
    let subject = git(root, &["log", "-1", "--format=%s", &hash])?;
    Ok(Commit { hash, subject })
}

/// HEAD. Refuses if files differ from it, because the changes would not be measured.
pub fn head_of_clean_tree(root: &Path) -> Result<Commit, Failure> {
    let changes = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    if changes.is_empty() {
        return resolve(root, "HEAD");
    }
    failure(format!(
        "these files differ from HEAD, and only commits are measured:\n{changes}\n\
         Commit them, or name NEW (HEAD measures the commit without these changes)."
    ))
}

/// Builds `commit` in `folder`.
pub fn build(
    root: &Path,
    folder: &Path,
    commit: Commit,
    progress: &mut Progress,
) -> Result<Built, Failure> {
    let (tree, target) = (folder.join("tree"), folder.join("target"));
    check_out(root, &tree, &commit)?;
    let step = format!("build {}", commit.short());
    progress.say(&step);
    let mut child = build_command(&tree, &target)
        .spawn()
        .map_err(|error| Failure(format!("cannot run cargo: {error}")))?;
    let mut printed = String::new();
    let lines = BufReader::new(child.stderr.take().expect("its stderr is a pipe")).lines();
    for line in lines.map_while(Result::ok) {
        progress.say(&format!("{step}: {}", line.trim()));
        printed.push_str(&line);
        printed.push('\n');
    }
    let status = child.wait().map_err(|error| Failure(error.to_string()))?;
    if !status.success() {
        progress.done();
        let (short, subject) = (commit.short(), &commit.subject);
        let tail = tail(&printed, TAIL_LINES);
        return failure(format!("{short} ({subject}) does not build:\n{tail}"));
    }
    let binary = target.join("release/lacuna");
    if !binary.is_file() {
        return failure(format!("{} builds no program lacuna", commit.short()));
    }
    Ok(Built { commit, binary })
}

/// Cargo runs outside of the repository. Inside of it, cargo would merge the `.cargo/config.toml`
/// of the worktree with this working tree's, and use the compiler options of both.
fn build_command(tree: &Path, target: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command.args([
        "build",
        "--release",
        "--workspace",
        "--bin",
        "lacuna",
        "--color",
        "never",
    ]);
    command.arg("--manifest-path").arg(tree.join("Cargo.toml"));
    command.arg("--target-dir").arg(target);
    let config = tree.join(".cargo/config.toml");
    if config.is_file() {
        command.arg("--config").arg(config);
    }
    command
}

/// Makes `tree` a worktree at `commit`. Moves an existing worktree there: the times of unchanged
/// files stay, so cargo does not compile them again.
fn check_out(root: &Path, tree: &Path, commit: &Commit) -> Result<(), Failure> {
    let is_worktree = tree.join(".git").exists();
    if is_worktree {
        git(
            tree,
            &["checkout", "--quiet", "--force", "--detach", &commit.hash],
        )?;
    } else {
        let tree = tree.to_string_lossy();
        // Forced twice, because git may still know a deleted folder.
        let force = [
            "worktree", "add", "--quiet", "--force", "--force", "--detach",
        ];
        git(root, &[&force[..], &[&tree, &commit.hash]].concat())?;
    }
    Ok(())
}

/// Runs git and returns what it prints, without the last newline.
fn git(dir: &Path, arguments: &[&str]) -> Result<String, Failure> {
    let output = Command::new("git")
        .current_dir(dir)
        .args(arguments)
        .output();
    let output = output.map_err(|error| Failure(format!("cannot run git: {error}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    failure(format!(
        "git {}: {}",
        arguments.join(" "),
        complaint.trim_end()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A repository with one commit, which holds the file `a`.
    fn repository() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let run = |arguments: &[&str]| git(dir.path(), arguments).unwrap();
        run(&["init", "--quiet"]);
        fs::write(dir.path().join("a"), "one").unwrap();
        run(&["add", "a"]);
        let author = ["-c", "user.name=x", "-c", "user.email=x@example.org"];
        run(&[&author[..], &["commit", "--quiet", "-m", "one: begins"]].concat());
        dir
    }

    #[test]
    fn commits_have_names() {
        let dir = repository();
        let head = resolve(dir.path(), "HEAD").unwrap();
        assert_eq!(
            (head.short().len(), head.subject.as_str()),
            (SHORT, "one: begins")
        );
        for unknown in ["nothing", "--all", ""] {
            let error = resolve(dir.path(), unknown).unwrap_err().to_string();
            assert!(error.contains(&format!("no commit {unknown}")), "{error}");
        }
    }

    #[test]
    fn a_dirty_tree_is_refused() {
        let dir = repository();
        assert!(head_of_clean_tree(dir.path()).is_ok());
        fs::write(dir.path().join("a"), "two").unwrap();
        let error = head_of_clean_tree(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains(" a\n") && error.contains("name NEW"),
            "{error}"
        );
    }

    /// A worktree is made, moved, and made again after its folder was deleted.
    #[test]
    fn a_worktree_follows_its_commit() {
        let dir = repository();
        let tree = dir.path().join("target/tree");
        let head = resolve(dir.path(), "HEAD").unwrap();
        for _ in 0..2 {
            check_out(dir.path(), &tree, &head).unwrap();
            assert_eq!(fs::read_to_string(tree.join("a")).unwrap(), "one");
            fs::write(tree.join("a"), "edited").unwrap();
        }
        fs::remove_dir_all(&tree).unwrap();
        check_out(dir.path(), &tree, &head).unwrap();
        assert_eq!(fs::read_to_string(tree.join("a")).unwrap(), "one");
    }

    #[test]
    fn a_failed_build_shows_its_end() {
        let dir = repository();
        let head = resolve(dir.path(), "HEAD").unwrap();
        let folder = dir.path().join("old");
        let Err(error) = build(dir.path(), &folder, head, &mut Progress::new()) else {
            panic!("there is no manifest to build");
        };
        let error = error.to_string();
        assert!(error.contains("(one: begins) does not build:"), "{error}");
        assert!(error.contains("Cargo.toml"), "{error}");
    }
}
