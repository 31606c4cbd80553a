//! The device's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! The rings lie in guest memory, which the driver may change at any time. So each value is read
//! once, checked, and used from a copy.

use crate::guest::{Fault, Guest};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
};

/// The most descriptors in a ring.
pub(crate) const SIZE_MAX: u16 = 256;
/// The most buffers in a chain. Linux makes a table of indirect descriptors longer than the ring if
/// a request needs it.
const CHAIN_MAX: usize = 1024;
/// The most bytes in a chain.
const CHAIN_BYTES_MAX: u64 = u32::MAX as u64;

/// The registers of a queue, and the device's places in its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueState {
    /// The number of descriptors; 0 until the driver has written a valid one.
    pub size: u16,
    /// Whether the driver has given the queue to the device.
    pub ready: bool,
    /// The descriptor table.
    pub descriptors: u64,
    /// The driver's ring.
    pub available: u64,
    /// The device's ring.
    pub used: u64,
    /// The place in the driver's ring of the next chain.
    pub next_available: u16,
    /// The place in the device's ring of the next chain.
    pub next_used: u16,
}

impl QueueState {
    /// Whether a driver may make a queue of these registers ready.
    pub(crate) fn is_valid(&self) -> bool {
        self.size.is_power_of_two()
            && self.size <= SIZE_MAX
            && self.descriptors.is_multiple_of(16)
            && self.available.is_multiple_of(2)
            && self.used.is_multiple_of(4)
            && [self.descriptors, self.available, self.used].map(|at| at >> 48) == [0; 3]
    }

    /// The next chain of buffers that the driver made available.
    pub(crate) fn pop(&mut self, guest: &Guest<'_>) -> Result<Option<Chain>, Fault> {
        let available = read_u16(guest, self.available + 2)?;
        let count = available.wrapping_sub(self.next_available);
        if count > self.size {
            return Err(Fault::Driver("more chains are available than the ring has"));
        }
        if count == 0 {
            return Ok(None);
        }
        // The index was read before the chain that it publishes.
        fence(Ordering::Acquire);
        let slot = u64::from(self.next_available % self.size);
        let head = read_u16(guest, self.available + 4 + 2 * slot)?;
        let chain = self.chain(guest, head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(chain))
    }

    /// Makes the last popped chain available again.
    pub(crate) fn undo_pop(&mut self) {
        self.next_available = self.next_available.wrapping_sub(1);
    }

    /// Gives a chain back to the driver, with `written` bytes in its writable buffers. Returns
    /// whether the driver wants an interrupt.
    pub(crate) fn push(
        &mut self,
        guest: &Guest<'_>,
        head: u16,
        written: u32,
    ) -> Result<bool, Fault> {
        let slot = u64::from(self.next_used % self.size);
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&written.to_le_bytes());
        guest.write(self.used + 4 + 8 * slot, &element)?;
        // The buffers and the element are written before the index that publishes them.
        fence(Ordering::Release);
        self.next_used = self.next_used.wrapping_add(1);
        guest.write(self.used + 2, &self.next_used.to_le_bytes())?;
        // The driver clears the flag, then reads the index. One of the two sees the other's write.
        fence(Ordering::SeqCst);
        let flags = read_u16(guest, self.available)?;
        Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    fn chain(&self, guest: &Guest<'_>, head: u16) -> Result<Chain, Fault> {
        let (mut table, mut entries) = (self.descriptors, u32::from(self.size));
        let (mut index, mut is_indirect) = (head, false);
        let mut chain = Chain::new(head);
        loop {
            if u32::from(index) >= entries {
                return Err(Fault::Driver("a descriptor lies outside of its table"));
            }
            let descriptor = Descriptor::read(guest, table, index)?;
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                if is_indirect || descriptor.has(VRING_DESC_F_NEXT) {
                    return Err(Fault::Driver("an indirect table is not the end of a chain"));
                }
                if descriptor.bytes % 16 != 0 {
                    return Err(Fault::Driver("an indirect table ends inside of an entry"));
                }
                (table, entries) = (descriptor.at, descriptor.bytes / 16);
                (index, is_indirect) = (0, true);
                continue;
            }
            chain.add(&descriptor)?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(chain);
            }
            index = descriptor.next;
        }
    }
}

fn read_u16(guest: &Guest<'_>, at: u64) -> Result<u16, Fault> {
    let mut bytes = [0; 2];
    guest.read(at, &mut bytes)?;
    Ok(u16::from_le_bytes(bytes))
}

struct Descriptor {
    at: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn read(guest: &Guest<'_>, table: u64, index: u16) -> Result<Self, Fault> {
        let at = table.checked_add(16 * u64::from(index));
        let mut raw = [0; 16];
        guest.read(at.ok_or(Fault::Address(table))?, &mut raw)?;
        let [a, b, c, d, e, f, g, h, rest @ ..] = raw;
        let [i, j, k, l, m, n, o, p] = rest;
        Ok(Self {
            at: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            bytes: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        })
    }

    fn has(&self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }
}

/// A request of the driver: bytes for the device, then room for its answer.
#[derive(Debug)]
pub struct Chain {
    pub(crate) head: u16,
    /// What the driver has written.
    pub readable: Buffers,
    /// Where the device may write.
    pub writable: Buffers,
}

impl Chain {
    fn new(head: u16) -> Self {
        Self {
            head,
            readable: Buffers::default(),
            writable: Buffers::default(),
        }
    }

    fn add(&mut self, descriptor: &Descriptor) -> Result<(), Fault> {
        if self.readable.parts.len() + self.writable.parts.len() == CHAIN_MAX {
            return Err(Fault::Driver(
                "a chain is a loop, or longer than 1024 buffers",
            ));
        }
        let buffers = match descriptor.has(VRING_DESC_F_WRITE) {
            true => &mut self.writable,
            false if self.writable.parts.is_empty() => &mut self.readable,
            false => return Err(Fault::Driver("a readable buffer is behind a writable one")),
        };
        buffers.parts.push((descriptor.at, descriptor.bytes));
        buffers.bytes += u64::from(descriptor.bytes);
        // The bound of the specification (2.7.5.2) bounds the time of each request.
        match self.readable.bytes() + self.writable.bytes() {
            0..=CHAIN_BYTES_MAX => Ok(()),
            _ => Err(Fault::Driver("a chain has 4 GiB or more")),
        }
    }
}

/// Buffers in guest memory, as one sequence of bytes.
#[derive(Debug, Default)]
pub struct Buffers {
    /// The address and the size of each.
    parts: Vec<(u64, u32)>,
    bytes: u64,
}

impl Buffers {
    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Each buffer's address and size.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.parts.iter().copied()
    }

    /// Reads `into.len()` bytes from byte `from` on.
    ///
    /// # Errors
    /// There are fewer bytes, or as [`Guest::read`].
    pub fn read(&self, guest: &Guest<'_>, from: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.each(from, into.len(), |at, part| guest.read(at, &mut into[part]))
    }

    /// Writes `bytes` from byte `from` on.
    ///
    /// # Errors
    /// There are fewer bytes, or as [`Guest::write`].
    pub fn write(&self, guest: &Guest<'_>, from: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.each(from, bytes.len(), |at, part| guest.write(at, &bytes[part]))
    }

    /// Calls `each` with the address of each part of `count` bytes, and its place among them.
    fn each(
        &self,
        from: u64,
        count: usize,
        mut each: impl FnMut(u64, Range<usize>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (mut skip, mut done) = (from, 0);
        for (at, bytes) in self.iter() {
            let bytes = u64::from(bytes);
            if skip >= bytes {
                skip -= bytes;
                continue;
            }
            let part = (bytes - skip).min((count - done) as u64) as usize;
            if part > 0 {
                let at = at.checked_add(skip).ok_or(Fault::Address(at))?;
                each(at, done..done + part)?;
            }
            done += part;
            skip = 0;
        }
        match done == count {
            true => Ok(()),
            false => Err(Fault::Driver("a request's buffers are too small")),
        }
    }
}
