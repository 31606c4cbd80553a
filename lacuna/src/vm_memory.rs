//! Guest memory by the traits of rust-vmm's `vm-memory`, in both directions.
//!
//! [`View`] shows a guest of this crate to code generic over `Bytes<GuestAddress>`. It is no
//! `vm_memory::GuestMemory`: that trait lends host addresses, and an overcommitted guest's page has
//! no stable one.
//!
//! [`Foreign`] shows another monitor's memory to the loaders of this crate, such as
//! [`Boot::load`](crate::Boot::load).
#![cfg(feature = "vm-memory")]

use crate::memory::MemoryError;
use crate::source::FailureKind;
use crate::{GuestMemory, PAGE_SIZE};
use lacuna_addr::Gpa;
use std::io;
use std::sync::atomic::{Ordering, fence};
use vm_memory::{
    AtomicAccess, Bytes, GuestAddress, GuestMemoryError, ReadVolatile, VolatileSlice, WriteVolatile,
};

/// The memory of a guest of this crate.
#[derive(Debug)]
pub struct View<'a, M>(pub &'a M);

impl<M> Clone for View<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for View<'_, M> {}

fn gpa(at: GuestAddress) -> Result<Gpa, GuestMemoryError> {
    Gpa::new(at.0).ok_or(GuestMemoryError::InvalidGuestAddress(at))
}

fn error(error: MemoryError) -> GuestMemoryError {
    match error {
        MemoryError::NoSlot(gpa) => GuestMemoryError::InvalidGuestAddress(GuestAddress(gpa.get())),
        other => GuestMemoryError::IOError(io::Error::other(other)),
    }
}

/// `count` bytes at `at` in pieces, each in one page: the address, and the range of the bytes.
fn pieces(
    at: GuestAddress,
    count: usize,
) -> impl Iterator<Item = Result<(GuestAddress, std::ops::Range<usize>), GuestMemoryError>> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < count).then(|| {
            let here = at.0.checked_add(done as u64);
            let here = here.ok_or(GuestMemoryError::GuestAddressOverflow)?;
            let left_in_page = PAGE_SIZE - here as usize % PAGE_SIZE;
            let piece = done..done + left_in_page.min(count - done);
            done = piece.end;
            Ok((GuestAddress(here), piece))
        })
    })
}

/// Refuses an access that no single atomic access can do.
fn check_atomic<T>(at: GuestAddress) -> Result<(), GuestMemoryError> {
    match size_of::<T>() {
        size @ (1 | 2 | 4 | 8) if at.0.is_multiple_of(size as u64) => Ok(()),
        _ => Err(GuestMemoryError::InvalidBackendAddress),
    }
}

impl<M: GuestMemory> View<'_, M> {
    /// Moves up to `count` bytes through a buffer of this process, a page at a time. `step` returns
    /// the number of moved bytes.
    fn bounce(
        &self,
        at: GuestAddress,
        count: usize,
        mut step: impl FnMut(GuestAddress, &mut [u8]) -> Result<usize, GuestMemoryError>,
    ) -> Result<usize, GuestMemoryError> {
        let mut buffer = [0; PAGE_SIZE];
        for piece in pieces(at, count) {
            let (here, piece) = piece?;
            let moved = step(here, &mut buffer[..piece.len()])?;
            if moved < piece.len() {
                return Ok(piece.start + moved);
            }
        }
        Ok(count)
    }
}

fn whole(moved: usize, expected: usize) -> Result<(), GuestMemoryError> {
    if moved < expected {
        return Err(GuestMemoryError::PartialBuffer {
            expected,
            completed: moved,
        });
    }
    Ok(())
}

impl<M: GuestMemory> Bytes<GuestAddress> for View<'_, M> {
    type E = GuestMemoryError;

    /// Writes all of `buf`, or returns an error. The pages before the failed one are written.
    fn write(&self, buf: &[u8], at: GuestAddress) -> Result<usize, GuestMemoryError> {
        self.write_slice(buf, at).map(|()| buf.len())
    }

    /// Reads all of `buf`, or returns an error.
    fn read(&self, buf: &mut [u8], at: GuestAddress) -> Result<usize, GuestMemoryError> {
        self.read_slice(buf, at).map(|()| buf.len())
    }

    fn write_slice(&self, buf: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.0.write(gpa(at)?, buf).map_err(error)
    }

    fn read_slice(&self, buf: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.0.read(gpa(at)?, buf).map_err(error)
    }

    fn read_volatile_from<F: ReadVolatile>(
        &self,
        at: GuestAddress,
        source: &mut F,
        count: usize,
    ) -> Result<usize, GuestMemoryError> {
        self.bounce(at, count, |here, buffer| {
            let read = source.read_volatile(&mut VolatileSlice::from(&mut *buffer))?;
            self.write_slice(&buffer[..read], here)?;
            Ok(read)
        })
    }

    fn read_exact_volatile_from<F: ReadVolatile>(
        &self,
        at: GuestAddress,
        source: &mut F,
        count: usize,
    ) -> Result<(), GuestMemoryError> {
        let moved = self.bounce(at, count, |here, buffer| {
            source.read_exact_volatile(&mut VolatileSlice::from(&mut *buffer))?;
            self.write_slice(buffer, here)?;
            Ok(buffer.len())
        })?;
        whole(moved, count)
    }

    fn write_volatile_to<F: WriteVolatile>(
        &self,
        at: GuestAddress,
        sink: &mut F,
        count: usize,
    ) -> Result<usize, GuestMemoryError> {
        self.bounce(at, count, |here, buffer| {
            self.read_slice(buffer, here)?;
            Ok(sink.write_volatile(&VolatileSlice::from(&mut *buffer))?)
        })
    }

    fn write_all_volatile_to<F: WriteVolatile>(
        &self,
        at: GuestAddress,
        sink: &mut F,
        count: usize,
    ) -> Result<(), GuestMemoryError> {
        let moved = self.bounce(at, count, |here, buffer| {
            self.read_slice(buffer, here)?;
            sink.write_all_volatile(&VolatileSlice::from(&mut *buffer))?;
            Ok(buffer.len())
        })?;
        whole(moved, count)
    }

    fn store<T: AtomicAccess>(
        &self,
        value: T,
        at: GuestAddress,
        order: Ordering,
    ) -> Result<(), GuestMemoryError> {
        check_atomic::<T>(at)?;
        // The access itself is relaxed; the fences make it as strong as `order` asks or stronger.
        if order != Ordering::Relaxed {
            fence(Ordering::SeqCst);
        }
        self.write_slice(value.as_slice(), at)?;
        if order == Ordering::SeqCst {
            fence(Ordering::SeqCst);
        }
        Ok(())
    }

    fn load<T: AtomicAccess>(
        &self,
        at: GuestAddress,
        order: Ordering,
    ) -> Result<T, GuestMemoryError> {
        check_atomic::<T>(at)?;
        if order == Ordering::SeqCst {
            fence(Ordering::SeqCst);
        }
        let mut value = T::zeroed();
        self.read_slice(value.as_mut_slice(), at)?;
        if order != Ordering::Relaxed {
            fence(Ordering::SeqCst);
        }
        Ok(value)
    }
}

/// The memory of another monitor, as this crate's loaders see it.
#[derive(Debug)]
pub struct Foreign<'a, M>(pub &'a M);

fn refusal(at: Gpa, error: &GuestMemoryError) -> MemoryError {
    match error {
        GuestMemoryError::InvalidGuestAddress(at) => MemoryError::NoSlot(Gpa::truncate(at.0)),
        other => MemoryError::Backing {
            gpa: at,
            kind: FailureKind::Lost,
            cause: other.to_string(),
        },
    }
}

impl<M> GuestMemory for Foreign<'_, M>
where
    M: vm_memory::GuestMemory,
{
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        let written = self.0.write_slice(bytes, GuestAddress(gpa.get()));
        written.map_err(|e| refusal(gpa, &e))
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        let read = self.0.read_slice(into, GuestAddress(gpa.get()));
        read.map_err(|e| refusal(gpa, &e))
    }

    /// Reads. The trait has no way to find out whether the other monitor's page is resident.
    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.read(gpa, into).is_ok()
    }
}
