//! Walks the workspace and applies every rule.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package as CargoPackage};

use crate::finding::Finding;
use crate::{
    arch, book, circles, comments, figures, imports, locks, pages, phrases, ratchet, scan, source,
    tree,
};

/// Handwritten text in this repository, besides Rust and Markdown.
const OTHER_SOURCES: [&str; 5] = ["c", "h", "S", "ld", "toml"];

/// Prints every finding; fails if there is one.
pub fn run() -> ExitCode {
    match check() {
        Ok((findings, notes)) => {
            for finding in &findings {
                println!("{finding}");
            }
            for note in notes {
                println!("note: {note}");
            }
            if findings.is_empty() {
                println!("tidy: ok");
                return ExitCode::SUCCESS;
            }
            eprintln!("tidy: {} to mend", findings.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("tidy could not look: {error}");
            ExitCode::from(3)
        }
    }
}

/// The findings so far.
struct Findings {
    root: PathBuf,
    all: Vec<Finding>,
    lengths: Vec<source::Length>,
    /// The findings in the prose of each package and page, by its path from the root.
    phrases: BTreeMap<String, Vec<Finding>>,
    tree: pages::Tree,
}

fn check() -> Result<(Vec<Finding>, Vec<String>), Box<dyn Error>> {
    let metadata = MetadataCommand::new().no_deps().exec()?;
    let root = metadata.workspace_root.as_std_path();
    let mut findings = Findings {
        root: root.to_path_buf(),
        all: check_imports(&metadata),
        lengths: Vec::new(),
        phrases: BTreeMap::new(),
        tree: pages::Tree::default(),
    };
    findings.all.extend(tree::check_readmes(root));
    findings.all.extend(figures::check(root)?);
    findings.tree.paths = tree::paths(root)?;
    for package in metadata.workspace_packages() {
        findings.package(package)?;
    }
    findings.pages()?;
    let Findings {
        mut all,
        lengths,
        phrases,
        ..
    } = findings;
    let exceptions = fs::read_to_string(root.join(ratchet::PATH))?;
    all.extend(ratchet::check(&exceptions, &lengths));
    let exceptions = fs::read_to_string(root.join(phrases::PATH))?;
    let (more, notes) = phrases::ratchet(&exceptions, phrases);
    all.extend(more);
    all.sort();
    Ok((all, notes))
}

fn check_imports(metadata: &Metadata) -> Vec<Finding> {
    let root = metadata.workspace_root.as_std_path();
    let packages = metadata.workspace_packages();
    let ours = |name: &str| packages.iter().any(|package| package.name.as_str() == name);
    let manifests: Vec<String> = packages
        .iter()
        .map(|package| relative(root, package.manifest_path.as_std_path()))
        .collect();
    let known = packages
        .iter()
        .zip(&manifests)
        .map(|(package, manifest)| imports::Package {
            name: package.name.as_str(),
            manifest,
            imports: (package.dependencies.iter())
                .filter(|dependency| dependency.kind != DependencyKind::Development)
                .map(|dependency| dependency.name.as_str())
                .filter(|name| ours(name))
                .collect(),
        });
    imports::check(&known.collect::<Vec<_>>())
}

impl Findings {
    /// Applies the rules of sources to one package.
    fn package(&mut self, package: &CargoPackage) -> Result<(), Box<dyn Error>> {
        let dir = package
            .manifest_path
            .parent()
            .ok_or("a manifest lies in a folder")?;
        let target = |is: &dyn Fn(&cargo_metadata::Target) -> bool| -> Vec<PathBuf> {
            let targets = package.targets.iter().filter(|target| is(target));
            targets
                .map(|target| target.src_path.clone().into_std_path_buf())
                .collect()
        };
        let roots = target(&|_| true);
        for program in target(&|target| target.is_test() && target.test) {
            self.all
                .extend(tree::check_test_program(&relative(&self.root, &program)));
        }
        let products = target(&|target| target.is_lib() || target.is_bin());
        let reachable = tree::reachable(&roots);
        let policy = imports::unsafe_policy(package.name.as_str());
        let place = relative(&self.root, dir.as_std_path());
        self.phrases.entry(place.clone()).or_default();
        let (src, mut circles) = (dir.as_std_path().join("src"), circles::Files::default());
        for file in tree::files(dir.as_std_path(), &["rs"])? {
            let (path, text) = (relative(&self.root, &file), fs::read_to_string(&file)?);
            self.text(&place, &path, &text);
            self.all.extend(arch::check(&path, &text));
            self.all.extend(locks::check(&path, &text));
            if !reachable.contains(&file) {
                let what = "an orphan: no crate compiles it";
                self.all.push(Finding::of(&path, what));
            }
            let scan = match scan::scan(&text) {
                Ok(scan) => scan,
                Err(error) => {
                    self.all.push(Finding::of(&path, error));
                    continue;
                }
            };
            self.all.extend(source::check_code(&path, &text, &scan));
            self.lengths.extend(source::lengths(&path, &text, &scan));
            if products.contains(&file) {
                let breaches = source::check_root(&path, &text, &scan, policy);
                self.all.extend(breaches);
            }
            self.tree.names.push(scan.names);
            if let Ok(inside) = file.strip_prefix(&src) {
                circles.add(inside, &text)?;
            }
        }
        let files = circles.in_circles();
        self.lengths.push(source::Length {
            what: format!("{place}::circles"),
            line: 0,
            lines: files.len(),
            limit: 0,
            unit: format!(
                "files that import each other in circles ({})",
                files.join(", ")
            ),
        });
        for file in tree::files(dir.as_std_path(), &OTHER_SOURCES)? {
            let text = fs::read_to_string(&file)?;
            self.text(&place, &relative(&self.root, &file), &text);
            self.tree.names.push(scan::words(&text).collect());
        }
        Ok(())
    }

    /// Applies the rules of text to one file of the package at `place`.
    fn text(&mut self, place: &str, path: &str, text: &str) {
        self.all.extend(source::check_text(path, text));
        let phrases = self.phrases.entry(place.to_owned()).or_default();
        for comment in comments::of(text) {
            phrases.extend(phrases::check(path, comment.line, comment.text));
            for gone in pages::files_missing(comment.text, &self.tree) {
                let what = format!("there is no file {gone}: name what it is now");
                self.all.push(Finding::at(path, comment.line, what));
            }
        }
    }

    /// Applies the rules of Markdown. Every package has been scanned before, because pages name
    /// items.
    fn pages(&mut self) -> Result<(), Box<dyn Error>> {
        let mut pages = BTreeMap::new();
        for file in tree::files(&self.root, &["md"])? {
            pages.insert(relative(&self.root, &file), fs::read_to_string(&file)?);
        }
        for (path, text) in &pages {
            self.all.extend(pages::check(path, text, &self.tree));
            let phrases = self.phrases.entry(path.clone()).or_default();
            phrases.extend(pages::columns(path, text));
            for (line, text) in (1..).zip(text.lines()) {
                phrases.extend(phrases::check(path, line, text));
            }
        }
        self.all.extend(book::check(&pages));
        Ok(())
    }
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}
