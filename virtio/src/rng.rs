//! The entropy device (virtio 1.2, 5.4).

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest};
use crate::queue::Chain;
use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

/// The most bytes for one request. A driver asks again for the rest.
const MOST: usize = 4096;

/// Gives the guest random bytes of the host's kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rng;

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn queues(&self) -> usize {
        1
    }

    fn handle(&self, _: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let mut bytes = [0; MOST];
        let wanted = chain.writable.bytes().min(MOST as u64) as usize;
        if wanted == 0 {
            return Err(Fault::Driver("a request for entropy has no buffer"));
        }
        // A short answer, or none: a signal came first, or the pool is not yet initialised.
        let random =
            rustix::io::retry_on_intr(|| getrandom(&mut bytes[..wanted], GetRandomFlags::empty()));
        let got = random.expect("getrandom fails for a signal alone");
        chain.writable.write(guest, 0, &bytes[..got])?;
        Ok(Answer::Used(got as u32))
    }
}
