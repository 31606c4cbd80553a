//! Walks the workspace and applies every rule.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package as CargoPackage};

use crate::finding::Finding;
use crate::{imports, ratchet, scan, source, tree};

/// Text that people write in this repository, besides Rust.
const OTHER_SOURCES: [&str; 5] = ["c", "h", "S", "ld", "toml"];

/// Prints every finding; fails if there is one.
pub fn run() -> ExitCode {
    match check() {
        Ok(findings) if findings.is_empty() => {
            println!("tidy: ok");
            ExitCode::SUCCESS
        }
        Ok(findings) => {
            for finding in &findings {
                println!("{finding}");
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

fn check() -> Result<Vec<Finding>, Box<dyn Error>> {
    let metadata = MetadataCommand::new().no_deps().exec()?;
    let root = metadata.workspace_root.as_std_path();
    let mut findings = check_imports(&metadata);
    findings.extend(tree::check_readmes(root));
    let mut lengths = Vec::new();
    for package in metadata.workspace_packages() {
        check_package(root, package, &mut findings, &mut lengths)?;
    }
    let exceptions = fs::read_to_string(root.join(ratchet::PATH))?;
    findings.extend(ratchet::check(&exceptions, &lengths));
    findings.sort();
    Ok(findings)
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

fn check_package(
    root: &Path,
    package: &CargoPackage,
    findings: &mut Vec<Finding>,
    lengths: &mut Vec<source::Length>,
) -> Result<(), Box<dyn Error>> {
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
    let products = target(&|target| target.is_lib() || target.is_bin());
    let reachable = tree::reachable(&roots);
    let policy = imports::unsafe_policy(package.name.as_str());
    for file in tree::files(dir.as_std_path(), &["rs"])? {
        let (path, text) = (relative(root, &file), fs::read_to_string(&file)?);
        findings.extend(source::check_text(&path, &text));
        if !reachable.contains(&file) {
            findings.push(Finding::of(&path, "an orphan: no crate compiles it"));
        }
        let scan = match scan::scan(&text) {
            Ok(scan) => scan,
            Err(error) => {
                findings.push(Finding::of(&path, error));
                continue;
            }
        };
        findings.extend(source::check_code(&path, &text, &scan));
        lengths.extend(source::lengths(&path, &text, &scan));
        if products.contains(&file) {
            findings.extend(source::check_root(&path, &text, &scan, policy));
        }
    }
    for file in tree::files(dir.as_std_path(), &OTHER_SOURCES)? {
        findings.extend(source::check_text(
            &relative(root, &file),
            &fs::read_to_string(&file)?,
        ));
    }
    Ok(())
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}
