//! The block device (virtio 1.2, 5.2), on a file or a block device of the host.

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest};
use crate::queue::{Buffers, Chain};
use lacuna_machine::StateError;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

const SECTOR: u64 = 512;
/// The largest buffer of a request, and how many there are.
const BUFFER_MAX: u32 = 128 << 10;
const BUFFERS_MAX: u32 = 62;
/// The most data of one request.
const DATA_MAX: u64 = BUFFER_MAX as u64 * BUFFERS_MAX as u64;
/// The most sectors of one range to discard or to zero, and the most ranges.
const RANGE_MAX: u32 = 1 << 22;
const RANGES_MAX: u32 = 32;
/// Data moves between the file and the guest by so many bytes.
const STEP: usize = 64 << 10;
/// Type, reserved and sector.
const HEADER: u64 = 16;
/// Sector, count and flags of a range.
const RANGE: usize = 16;

/// A disk with the bytes of a file. Its size is the file's size when the device is made, in whole
/// sectors of 512 bytes.
///
/// A write has reached the file when the driver gets its answer, and the host's disk after a flush.
/// For a driver without flushes (VIRTIO_BLK_F_FLUSH) each write is flushed. Errors of the file
/// become VIRTIO_BLK_S_IOERR.
///
/// # Pauses and other hosts
/// A pause flushes the file if anything was written since the last flush, because a flush on
/// another host does not reach this host's page cache. A migration's downtime includes the time of
/// that flush. If it fails, the driver's next flush fails, on the host where the guest then runs.
///
/// The device reads and writes through the host's page cache. A guest moves to another host only
/// with a file in a file system that keeps the page caches of both hosts coherent: a cluster file
/// system such as GFS2, OCFS2, CephFS or Lustre. The destination opens the file before the last
/// write of the source. So NFS, which is coherent only from close to open, is not enough, and
/// neither is a block device that both hosts see.
#[derive(Debug)]
pub struct Block {
    file: File,
    sectors: u64,
    is_read_only: bool,
    /// Whether anything was written since the last flush.
    is_dirty: AtomicBool,
    /// Whether the flush of a pause has failed. No request has reported it yet.
    is_lost: AtomicBool,
    serial: [u8; VIRTIO_BLK_ID_BYTES as usize],
}

impl Block {
    /// A disk that the driver may write.
    ///
    /// # Errors
    /// The size of the file cannot be found, or it is less than a sector
    /// ([`io::ErrorKind::InvalidInput`]).
    pub fn new(file: File) -> io::Result<Self> {
        // A block device has no length in its metadata.
        let bytes = (&file).seek(SeekFrom::End(0))?;
        if bytes < SECTOR {
            let why = format!("it has {bytes} bytes, and a disk has at least {SECTOR}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self {
            file,
            sectors: bytes / SECTOR,
            is_read_only: false,
            is_dirty: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            serial: *b"lacuna\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        })
    }

    /// A disk that the driver may only read. The file may be read-only.
    ///
    /// # Errors
    /// As [`Block::new`].
    pub fn read_only(file: File) -> io::Result<Self> {
        Ok(Self {
            is_read_only: true,
            ..Self::new(file)?
        })
    }

    /// The same disk with a serial number of its own: its first 20 bytes.
    #[must_use]
    pub fn with_serial(mut self, serial: &str) -> Self {
        self.serial = [0; VIRTIO_BLK_ID_BYTES as usize];
        self.serial
            .iter_mut()
            .zip(serial.bytes())
            .for_each(|(to, from)| *to = from);
        self
    }

    /// The bytes of `count` bytes from `sector` on, if the disk has them in whole sectors.
    fn range(&self, sector: u64, count: u64) -> Result<Range<u64>, Refusal> {
        let sectors = count / SECTOR;
        let end = sector
            .checked_add(sectors)
            .filter(|end| *end <= self.sectors);
        match end {
            Some(end) if count.is_multiple_of(SECTOR) => Ok(sector * SECTOR..end * SECTOR),
            _ => Err(Refusal::Error),
        }
    }

    /// Begins a change of the file.
    fn begin_write(&self) -> Result<(), Refusal> {
        if self.is_read_only {
            return Err(Refusal::Error);
        }
        self.is_dirty.store(true, Relaxed);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()?;
        self.is_dirty.store(false, Relaxed);
        Ok(())
    }

    fn read(&self, sector: u64, data: &Data<'_>) -> Result<u64, Refusal> {
        let range = self.range(sector, data.count)?;
        data.steps(|from, part| {
            self.file.read_exact_at(part, range.start + from)?;
            Ok(data.buffers.write(data.guest, data.from + from, part)?)
        })?;
        Ok(data.count)
    }

    fn write(&self, sector: u64, data: &Data<'_>) -> Result<u64, Refusal> {
        self.begin_write()?;
        let range = self.range(sector, data.count)?;
        data.steps(|from, part| {
            data.buffers.read(data.guest, data.from + from, part)?;
            Ok(self.file.write_all_at(part, range.start + from)?)
        })?;
        Ok(0)
    }

    /// Discards or zeroes ranges. Zeroed ranges keep their blocks, unless a flag allows a hole.
    fn clear(&self, data: &Data<'_>, kind: u32) -> Result<u64, Refusal> {
        self.begin_write()?;
        let ranges = data.count / RANGE as u64;
        if !data.count.is_multiple_of(RANGE as u64) || ranges > RANGES_MAX.into() {
            return Err(Refusal::Error);
        }
        for index in 0..ranges {
            let mut raw = [0; RANGE];
            let at = data.from + index * RANGE as u64;
            data.buffers.read(data.guest, at, &mut raw)?;
            let [sector @ .., a, b, c, d, e, f, g, h] = raw;
            let (count, flags) = (
                u32::from_le_bytes([a, b, c, d]),
                u32::from_le_bytes([e, f, g, h]),
            );
            let is_hole = match (kind, flags) {
                (VIRTIO_BLK_T_DISCARD, 0) => true,
                (VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) => true,
                (VIRTIO_BLK_T_WRITE_ZEROES, 0) => false,
                _ => return Err(Refusal::Unsupported),
            };
            if count > RANGE_MAX {
                return Err(Refusal::Error);
            }
            let range = self.range(u64::from_le_bytes(sector), u64::from(count) * SECTOR)?;
            if !range.is_empty() {
                self.zero(range, is_hole)?;
            }
        }
        Ok(0)
    }

    fn zero(&self, range: Range<u64>, is_hole: bool) -> Result<(), Refusal> {
        let zeros = match is_hole {
            true => FallocateFlags::PUNCH_HOLE,
            false => FallocateFlags::ZERO_RANGE,
        };
        let zeros = zeros | FallocateFlags::KEEP_SIZE;
        let bytes = range.end - range.start;
        rustix::io::retry_on_intr(|| fallocate(&self.file, zeros, range.start, bytes)).map_err(
            |error| match error {
                Errno::OPNOTSUPP => Refusal::Unsupported,
                _ => Refusal::Error,
            },
        )
    }

    /// Serves one request. Returns the bytes written to the driver's data buffers.
    fn serve(
        &self,
        kind: u32,
        sector: u64,
        chain: &Chain,
        guest: &Guest<'_>,
    ) -> Result<u64, Refusal> {
        let for_device = || Data::new(guest, &chain.readable, HEADER, chain.readable.bytes());
        let for_driver = || Data::new(guest, &chain.writable, 0, chain.writable.bytes() - 1);
        let changes = match kind {
            VIRTIO_BLK_T_IN => return self.read(sector, &for_driver()?),
            VIRTIO_BLK_T_GET_ID => {
                let data = for_driver()?;
                let count = data.count.min(self.serial.len() as u64);
                data.buffers
                    .write(guest, 0, &self.serial[..count as usize])?;
                return Ok(count);
            }
            VIRTIO_BLK_T_OUT => self.write(sector, &for_device()?)?,
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => self.clear(&for_device()?, kind)?,
            VIRTIO_BLK_T_FLUSH => 0,
            _ => return Err(Refusal::Unsupported),
        };
        // Without flushes, the driver takes a finished write for one that survives a crash.
        if kind == VIRTIO_BLK_T_FLUSH || !guest.has(VIRTIO_BLK_F_FLUSH) {
            if self.is_lost.swap(false, Relaxed) {
                return Err(Refusal::Error);
            }
            self.flush()?;
        }
        Ok(changes)
    }
}

/// Why a request fails, with the driver as the one to handle it.
enum Refusal {
    Error,
    Unsupported,
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Self {
        Self::Error
    }
}

/// Data buffers outside of memory, or lost pages, fail the request alone.
impl From<Fault> for Refusal {
    fn from(_: Fault) -> Self {
        Self::Error
    }
}

/// The data of a request: bytes of its buffers.
struct Data<'a> {
    guest: &'a Guest<'a>,
    buffers: &'a Buffers,
    from: u64,
    count: u64,
}

impl<'a> Data<'a> {
    fn new(
        guest: &'a Guest<'a>,
        buffers: &'a Buffers,
        from: u64,
        to: u64,
    ) -> Result<Self, Refusal> {
        let count = to - from;
        match count <= DATA_MAX {
            true => Ok(Self {
                guest,
                buffers,
                from,
                count,
            }),
            false => Err(Refusal::Error),
        }
    }

    /// Calls `step` with the offset of each part of the data, and a buffer for it.
    fn steps(
        &self,
        mut step: impl FnMut(u64, &mut [u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut buffer = vec![0; STEP.min(self.count as usize)];
        let parts = (0..self.count).step_by(STEP);
        parts.into_iter().try_for_each(|from| {
            let part = (self.count - from).min(STEP as u64) as usize;
            step(from, &mut buffer[..part])
        })
    }
}

impl VirtioDevice for Block {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn queues(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        let read_only = match self.is_read_only {
            true => 1 << VIRTIO_BLK_F_RO,
            false => 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES,
        };
        1 << VIRTIO_BLK_F_SIZE_MAX | 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_FLUSH | read_only
    }

    /// `struct virtio_blk_config`, up to `write_zeroes_may_unmap` and its padding.
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        config[..8].copy_from_slice(&self.sectors.to_le_bytes());
        let mut set =
            |at: usize, value: u32| config[at..at + 4].copy_from_slice(&value.to_le_bytes());
        set(8, BUFFER_MAX);
        set(12, BUFFERS_MAX);
        for at in [36, 48] {
            set(at, RANGE_MAX);
            set(at + 4, RANGES_MAX);
        }
        // Sectors of alignment for a discard: a page of the file.
        set(44, 8);
        set(56, 1);
        config
    }

    /// Writes from before the pause reach the host's disk.
    fn paused(&self) {
        if self.is_dirty.load(Relaxed) && self.flush().is_err() {
            self.is_lost.store(true, Relaxed);
        }
    }

    /// A byte if the flush of a pause has failed.
    fn save(&self) -> Vec<u8> {
        vec![1; self.is_lost.load(Relaxed).into()]
    }

    fn restore(&self, state: &[u8]) -> Result<(), StateError> {
        let is_lost = match state {
            [] => false,
            [1] => true,
            _ => {
                return Err(StateError::Invalid {
                    field: "virtio.own",
                    value: state.len() as u64,
                });
            }
        };
        self.is_lost.store(is_lost, Relaxed);
        Ok(())
    }

    fn handle(&self, _: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let status_at = chain.writable.bytes().checked_sub(1);
        let status_at = status_at.ok_or(Fault::Driver("a block request has no status byte"))?;
        let mut header = [0; HEADER as usize];
        chain.readable.read(guest, 0, &mut header)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let served = self.serve(kind, u64::from_le_bytes(sector), chain, guest);
        let (status, written) = match served {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Refusal::Error) => (VIRTIO_BLK_S_IOERR, 0),
            Err(Refusal::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        chain.writable.write(guest, status_at, &[status as u8])?;
        Ok(Answer::Used(written as u32 + 1))
    }
}
