//! A swap device of Linux for a test. Only root can add one.

use crate::skip_test;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A test's swap file, which Linux uses for all processes until the end of the test.
#[derive(Debug)]
pub struct SwapFile(PathBuf);

impl SwapFile {
    /// Adds a swap file of `mib` MiB. Ends the test if that is not possible.
    ///
    /// The test has the attribute [`test`](crate::test).
    #[track_caller]
    pub fn add(mib: u64) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("lacuna-swap-{}-{number}", std::process::id());
        let file = Self(std::env::temp_dir().join(name));
        if let Err(error) = fill(&file.0, mib).and_then(|()| file.begin()) {
            drop(file);
            skip_test(format!("no swap file can be added: {error}"));
        }
        file
    }

    fn begin(&self) -> io::Result<()> {
        run("mkswap", &self.0)?;
        run("swapon", &self.0)
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let _ = run("swapoff", &self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// Makes a file without holes: Linux swaps to no other file.
fn fill(path: &Path, mib: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    io::copy(&mut io::Read::take(io::repeat(0), mib << 20), &mut file)?;
    file.sync_all()
}

fn run(program: &str, path: &Path) -> io::Result<()> {
    let mut command = Command::new(program);
    let run = command.arg(path).stdin(Stdio::null()).output()?;
    match run.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&run.stderr);
            Err(io::Error::other(format!("{program}: {}", said.trim())))
        }
    }
}
