//! One of KVM's statistics of a vCPU (`KVM_GET_STATS_FD`, Linux 5.14).
//!
//! UNSAFETY: the ioctl returns a new descriptor as a number.

use crate::counted::Counted;
use rustix::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use rustix::io::{self, Errno, pread};
use rustix::ioctl::{Opcode, ioctl, opcode};

/// `KVMIO`.
const TYPE: u8 = 0xae;
const GET_STATS_FD: Opcode = opcode::none(TYPE, 0xce);

/// The size of `struct kvm_stats_header`, and of `struct kvm_stats_desc` without its name.
const HEADER: usize = 24;
const DESCRIPTION: usize = 16;
/// Limits on the sizes in a kernel's answer, far above Linux's values.
const NAME_MAX: usize = 256;
const NUMBER_MAX: u32 = 4096;

/// A 64-bit number kept by KVM, readable at any time.
#[derive(Debug)]
pub struct VcpuStatistic {
    file: OwnedFd,
    at: u64,
}

impl VcpuStatistic {
    /// The statistic of this name.
    ///
    /// # Safety
    /// `vcpu` is the descriptor of a KVM vCPU.
    ///
    /// # Errors
    /// `NOENT`: no statistic has this name. Others: KVM has no statistics of vCPUs.
    pub unsafe fn find(vcpu: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        // SAFETY: 1. KVM_GET_STATS_FD on a vCPU ignores its argument.
        let number = unsafe { ioctl(vcpu, Counted::<GET_STATS_FD, ()>::new(&mut ())) }?;
        // SAFETY: 1. the number belongs to a descriptor that KVM has just opened.
        let file = unsafe { OwnedFd::from_raw_fd(number as i32) };
        let mut header = [0; HEADER];
        whole(pread(&file, &mut header, 0)?, HEADER)?;
        let [_, name_size, number, _, descriptions, data] =
            std::array::from_fn(|field| word(&header, field * 4));
        let size = DESCRIPTION + name_size as usize;
        if name_size as usize > NAME_MAX || number > NUMBER_MAX {
            return Err(Errno::PROTO);
        }
        let mut description = [0; DESCRIPTION + NAME_MAX];
        for each in 0..u64::from(number) {
            let description = &mut description[..size];
            let at = u64::from(descriptions) + each * size as u64;
            whole(pread(&file, &mut *description, at)?, size)?;
            let (fixed, found) = description.split_at(DESCRIPTION);
            if found.split(|byte| *byte == 0).next() == Some(name.as_bytes()) {
                let at = u64::from(data) + u64::from(word(fixed, 8));
                return Ok(Self { file, at });
            }
        }
        Err(Errno::NOENT)
    }

    /// Its value now.
    ///
    /// # Errors
    /// KVM refuses the read.
    pub fn read(&self) -> io::Result<u64> {
        let mut value = [0; 8];
        whole(pread(&self.file, &mut value, self.at)?, value.len())?;
        Ok(u64::from_ne_bytes(value))
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes[at..at + 4].try_into().expect("four bytes");
    u32::from_ne_bytes(bytes)
}

fn whole(read: usize, size: usize) -> io::Result<()> {
    if read == size { Ok(()) } else { Err(Errno::IO) }
}
