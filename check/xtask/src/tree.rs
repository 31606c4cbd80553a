//! Files and folders: every source file belongs to a crate, and every row of folders has its
//! README.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::finding::Finding;
use crate::scan::{Module, scan};

/// The rows of folders (`docs/architecture.md`).
const ROWS: [&str; 7] = [
    "base", "memory", "engine", "cpu", "backend", "tools", "check",
];
/// Longest README of a row: its import rule, and its contents.
const README_LINES: usize = 10;

/// Every file below `dir` that has one of `extensions`, sorted. Build outputs and hidden folders
/// are left out.
pub fn files(dir: &Path, extensions: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut found = everything(dir)?;
    found.retain(|path| {
        let extension = path.extension().unwrap_or_default();
        extensions.iter().any(|wanted| extension == *wanted) && !path.is_dir()
    });
    found.sort();
    Ok(found)
}

/// Every file and folder below `root`, by its path from there. Build outputs and hidden folders are
/// left out.
pub fn paths(root: &Path) -> io::Result<BTreeSet<String>> {
    let from_root = |path: &PathBuf| {
        let path = path.strip_prefix(root).unwrap_or(path);
        path.to_string_lossy().into_owned()
    };
    Ok(everything(root)?.iter().map(from_root).collect())
}

fn everything(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(everything(&path)?);
        }
        found.push(path);
    }
    Ok(found)
}

/// The root of a program of integration tests. A crate has only one, because each is linked with
/// all its dependencies. `cargo test` leaves out the programs with models under loom.
pub fn check_test_program(path: &str) -> Option<Finding> {
    let only = path.ends_with("/tests/it/main.rs") || path == "check/xtask/tests/skipped.rs";
    let what = "a second program of integration tests: make it a module of tests/it/main.rs";
    (!only).then(|| Finding::of(path, what))
}

/// Where a file is in its crate.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileRole {
    Root,
    Module,
}

/// The Rust files that the crate roots `roots` reach through their `mod` declarations.
pub fn reachable(roots: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    let root = |path: &PathBuf| (path.clone(), FileRole::Root);
    let mut open: Vec<(PathBuf, FileRole)> = roots.iter().map(root).collect();
    while let Some((file, place)) = open.pop() {
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        if !reached.insert(file.clone()) {
            continue;
        }
        let modules = scan(&text).map(|scan| scan.modules).unwrap_or_default();
        for module in modules {
            open.extend(candidates(&file, place, &module).map(|path| (path, FileRole::Module)));
        }
    }
    reached
}

/// The possible paths of the file of `module`, declared in `file`.
fn candidates(file: &Path, place: FileRole, module: &Module) -> impl Iterator<Item = PathBuf> {
    let dir = file.parent().unwrap_or(Path::new("")).to_path_buf();
    let paths = match &module.file {
        Some(path) => vec![dir.join(path)],
        None => {
            let owns_dir = place == FileRole::Root || file.ends_with("mod.rs");
            let base = if owns_dir {
                dir
            } else {
                file.with_extension("")
            };
            let inner = base.join(module.path.iter().collect::<PathBuf>());
            vec![inner.with_extension("rs"), inner.join("mod.rs")]
        }
    };
    paths.into_iter()
}

/// Checks that every row below `root` has a short README.
pub fn check_readmes(root: &Path) -> Vec<Finding> {
    let check = |row: &&str| {
        let path = format!("{row}/README.md");
        let problem = match fs::read_to_string(root.join(&path)) {
            Err(_) => "each row of folders has its README".into(),
            Ok(text) if text.lines().count() > README_LINES => {
                format!("a row's README has at most {README_LINES} lines")
            }
            Ok(_) => return None,
        };
        Some(Finding::of(&path, problem))
    };
    ROWS.iter().filter_map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn orphans_are_what_no_root_reaches() {
        let dir = tree(&[
            (
                "src/lib.rs",
                "mod a; mod b { mod c; } #[path = \"odd.rs\"] mod d;",
            ),
            ("src/a.rs", "mod deep;"),
            ("src/a/deep.rs", ""),
            ("src/b/c.rs", ""),
            ("src/odd.rs", ""),
            ("src/left.rs", "mod over;"),
            ("tests/it.rs", "mod common;"),
            ("tests/common/mod.rs", "mod more;"),
            ("tests/common/more.rs", ""),
            ("target/x.rs", ""),
            (".hidden/x.rs", ""),
            ("notes.txt", ""),
        ]);
        let at = |path: &str| dir.path().join(path);
        let reached = reachable(&[at("src/lib.rs"), at("tests/it.rs")]);
        let all = files(dir.path(), &["rs"]).unwrap();
        let orphans: Vec<_> = all
            .into_iter()
            .filter(|file| !reached.contains(file))
            .collect();
        assert_eq!(orphans, [at("src/left.rs")]);
        let known = paths(dir.path()).unwrap();
        assert!(known.contains("src/b/c.rs") && known.contains("src/b"));
        assert!(!known.contains("target/x.rs") && !known.contains(".hidden/x.rs"));
    }

    #[test]
    fn rows_have_short_readmes() {
        let mut rows = ROWS.map(|row| (format!("{row}/README.md"), "one line".to_owned()));
        rows[0].1 = "line\n".repeat(README_LINES + 1);
        let rows: Vec<_> = rows[..6]
            .iter()
            .map(|(path, text)| (&**path, &**text))
            .collect();
        let findings = check_readmes(tree(&rows).path());
        let paths: Vec<_> = findings.iter().map(|finding| &*finding.path).collect();
        assert_eq!(paths, ["base/README.md", "check/README.md"]);
    }

    #[test]
    fn a_crate_has_one_program_of_tests() {
        for path in ["migrate/tests/it/main.rs", "check/xtask/tests/skipped.rs"] {
            assert!(check_test_program(path).is_none(), "{path}");
        }
        assert!(check_test_program("migrate/tests/streams.rs").is_some());
    }
}
