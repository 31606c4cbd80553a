//! What the VMs of one socket use together.

use crate::HandshakeError;
use crate::image::Image;
use lacuna_sync::{Mutex, lock, lock_order};

/// The VMs of one socket, and the bytes of their memory.
#[derive(Default)]
pub struct Quota(Mutex<(u64, u64), lock_order::PagerQuota>);

/// The part of one VM, until it is dropped.
pub struct Share<'a> {
    of: &'a Quota,
    bytes: u64,
}

impl Quota {
    /// The part of a VM with `bytes` bytes of memory, if `image` allows it.
    ///
    /// # Errors
    /// [`HandshakeError::ManyVms`], [`HandshakeError::MuchMemory`].
    pub fn share(&self, image: &Image, bytes: u64) -> Result<Share<'_>, HandshakeError> {
        let mut used = lock(&self.0);
        let (vms, has) = *used;
        if let Some(most) = image.vms_max
            && vms >= most
        {
            return Err(HandshakeError::ManyVms(most));
        }
        // Each VM has at most the source's bytes, so the sum does not overflow.
        if let Some(most) = image.memory_max
            && has + bytes > most
        {
            return Err(HandshakeError::MuchMemory { bytes, has, most });
        }
        *used = (vms + 1, has + bytes);
        Ok(Share { of: self, bytes })
    }

    /// The part of a VM that an earlier pager has accepted. It is served whatever the limits say.
    pub fn add(&self, bytes: u64) -> Share<'_> {
        let mut used = lock(&self.0);
        *used = (used.0 + 1, used.1 + bytes);
        Share { of: self, bytes }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let mut used = lock(&self.of.0);
        *used = (used.0 - 1, used.1 - self.bytes);
    }
}
