//! Huge pages of hugetlbfs for a test. Only root can reserve them.

use crate::skip_test;
use std::fs::{File, read_to_string, write};
use std::io;

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const RESERVED_1G: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";

/// A test's reserved huge pages of one size. They are released at the end. Tests that reserve some
/// take turns, because each changes the number for the whole machine.
#[derive(Debug)]
pub struct HugePages {
    /// The kernel's file with their number.
    file: &'static str,
    before: u64,
    _turn: File,
}

impl HugePages {
    /// Reserves `wanted` more huge pages of 2 MiB. Ends the test if that is not possible.
    ///
    /// The test has the attribute [`test`](crate::test).
    #[track_caller]
    pub fn reserve(wanted: u64) -> Self {
        Self::reserve_in(RESERVED, wanted)
    }

    /// As [`HugePages::reserve`], of 1 GiB.
    #[track_caller]
    pub fn reserve_1g(wanted: u64) -> Self {
        Self::reserve_in(RESERVED_1G, wanted)
    }

    #[track_caller]
    fn reserve_in(file: &'static str, wanted: u64) -> Self {
        let turn = File::create(std::env::temp_dir().join("lacuna-huge-pages"));
        let turn = turn.and_then(|file| file.lock().map(|()| file));
        let reserved = match turn.and_then(|turn| Ok((reserved(file)?, turn))) {
            Ok((before, _turn)) => Self {
                file,
                before,
                _turn,
            },
            Err(error) => skip_test(format!("huge pages cannot be reserved: {error}")),
        };
        if let Err(error) = reserved.change(wanted) {
            drop(reserved);
            skip_test(format!("huge pages cannot be reserved: {error}"));
        }
        reserved
    }

    /// Changes the number of this test's reserved huge pages, as far as they are free.
    ///
    /// # Errors
    /// The kernel's error: it has too little memory.
    pub fn change(&self, wanted: u64) -> io::Result<()> {
        write(self.file, (self.before + wanted).to_string())?;
        match reserved(self.file)? {
            now if now < self.before + wanted => Err(io::Error::other("no free memory for them")),
            _ => Ok(()),
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = write(self.file, self.before.to_string());
    }
}

fn reserved(file: &str) -> io::Result<u64> {
    let count = read_to_string(file)?;
    count.trim().parse().map_err(io::Error::other)
}
