//! A snapshot whose memory file is the guest's memory: the VM maps it privately.
//!
//! Linux copies a page when the guest writes to it. The other pages stay in the page cache, once
//! for all VMs that were restored from the snapshot.

use super::files::{WHOLE, ZEROS};
use super::reader::Snapshot;
use crate::copy::OnPages;
use crate::state::restore_state;
use crate::{MemoryLayout, MigrateError};
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{PlatformDevices, Vm};
use lacuna_source::Holes;
use rustix::fs::{fstat, fstatfs};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

impl Snapshot {
    /// The memory file, if its bytes are the memory of a VM as it is made: a whole snapshot, with a
    /// memory that is not packed, in a local folder (in a tmpfs, without holes), of a machine
    /// without added memory slots. Make the VM for [`Snapshot::restore_in_place`] with a private
    /// mapping of it.
    ///
    /// `None` is no error: [`Snapshot::restore`] takes every snapshot.
    pub fn memory_file(&self) -> Option<OwnedFd> {
        let machine = self.machine();
        let is_as_made = MemoryLayout::as_made(machine.arch, machine.memory);
        let is_mappable = self.format() == WHOLE && is_as_made.as_ref() == Some(&machine.layout);
        let file = self.layers()[0].file.local().filter(|_| is_mappable)?;
        // A touch of a hole takes memory for the file there, and fails where the limit is reached.
        if is_in_tmpfs(file) && has_holes(file) {
            return None;
        }
        // Without another descriptor the caller reads the snapshot.
        file.try_clone().map(OwnedFd::from).ok()
    }

    /// As [`Snapshot::restore`], but leaves the pages where they are: `vm` has been made with a
    /// private mapping of [`Snapshot::memory_file`]. Reads the file once, checks each page, and
    /// calls `each` with the number of pages since the last call.
    ///
    /// The check ends with this call: if Linux reads a page from the disk again later, its checksum
    /// is not compared. The file must not change while the VM exists. It may be deleted.
    ///
    /// # Errors
    /// As [`Snapshot::restore`]; the VM has other memory slots than [`Snapshot::machine`], or other
    /// memory than the file.
    pub fn restore_in_place<V: Vm>(
        &self,
        vm: &Arc<V>,
        devices: &PlatformDevices,
        each: OnPages<'_>,
    ) -> Result<Vec<V::Vcpu>, MigrateError> {
        self.check(&**vm, devices)?;
        if vm.missing_memory().is_some() {
            return Err(MigrateError::HasSource);
        }
        let file = self.layers()[0].file.local();
        let is_same = MemoryLayout::of(&**vm) == self.machine().layout;
        let Some(file) = file.filter(|_| is_same) else {
            return Err(MigrateError::OtherSlots);
        };
        self.read_pages(each, &mut |gpa, bytes| {
            let mut mapped = [0; PAGE_SIZE];
            vm.read(gpa, &mut mapped)?;
            match bytes.starts_with(&mapped) {
                true => Ok((bytes.len() / PAGE_SIZE) as u64),
                false => Err(MigrateError::OtherMemory),
            }
        })?;
        self.check_zeros(file)?;
        let bare = vm.bare_vcpus();
        let mut vcpus = bare.map_err(|error| MigrateError::Vcpus(error.to_string()))?;
        restore_state(&**vm, &mut vcpus, devices, self.state())?;
        Ok(vcpus)
    }

    /// Checks the pages without content. A restore that copies pages does not read them.
    fn check_zeros(&self, file: &File) -> Result<(), MigrateError> {
        let path = &self.layers()[0].path;
        let (mut holes, mut bytes) = (Holes::default(), [0; PAGE_SIZE]);
        for page in 0..self.places().pages() {
            let offset = page * PAGE_SIZE as u64;
            let place = self.places().get(page);
            if place.is_some_and(|place| place.entry != ZEROS) || holes.is_hole(file, offset) {
                continue;
            }
            let read = file.read_exact_at(&mut bytes, offset);
            read.map_err(MigrateError::io(path, "read the file"))?;
            if bytes != [0; PAGE_SIZE] {
                let wrong = format!("page {page} is not zeros, as it was saved");
                return Err(MigrateError::damaged(path, wrong));
            }
        }
        Ok(())
    }
}

/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS: u32 = 0x0102_1994;

fn is_in_tmpfs(file: &File) -> bool {
    // The type of the number differs from architecture to architecture.
    fstatfs(file).is_ok_and(|system| u32::try_from(system.f_type) == Ok(TMPFS))
}

fn has_holes(file: &File) -> bool {
    // A block has 512 bytes here, whatever the file system (stat(2)).
    fstat(file).is_ok_and(|stat| stat.st_blocks * 512 < stat.st_size)
}
