//! The record of a skipped test, and the list of all records.

use crate::alone::ALONE;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write as _};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};

/// A test that did not run.
pub(crate) struct Skipped {
    /// Its package and name.
    pub(crate) test: String,
    /// The reason.
    pub(crate) why: String,
}

impl Skipped {
    /// Writes one line by one system call, so that lines of several threads do not mix.
    pub(crate) fn record(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let path = folder.join(std::process::id().to_string());
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.write_all(format!("{}\t{}\n", self.test, self.why).as_bytes())
    }
}

/// Skipped tests by reason.
#[derive(Default)]
pub(crate) struct List(BTreeMap<String, Vec<String>>);

impl List {
    /// The records of one run's test programs in `folder`.
    pub(crate) fn read(folder: &Path) -> Self {
        let mut list = Self::default();
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            for (test, why) in text.lines().filter_map(|line| line.split_once('\t')) {
                let tests = list.0.entry(why.to_owned()).or_default();
                tests.push(test.to_owned());
            }
        }
        for tests in list.0.values_mut() {
            tests.sort();
            tests.dedup();
        }
        list
    }
}

impl Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: usize = self.0.values().map(Vec::len).sum();
        if count == 0 {
            return writeln!(f, "skipped tests: none");
        }
        let mut text = format!("skipped tests: {count}\n");
        for (why, tests) in &self.0 {
            writeln!(text, "  because: {why}")?;
            for test in tests {
                writeln!(text, "    {test}")?;
            }
        }
        f.write_str(&text)
    }
}

/// The folder for the records of this run's test programs: beside cargo's `deps`.
pub(crate) fn folder() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let profile = program.parent()?.parent()?;
    // A test with its own process belongs to the run that started it.
    let run = std::env::var(ALONE).unwrap_or_else(|_| parent_id().to_string());
    Some(profile.join("skipped").join(run))
}

/// Removes the records of runs that ended without a report. Their parent process is gone.
pub(crate) fn remove_left_behind(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        if !Path::new("/proc").join(entry.file_name()).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
