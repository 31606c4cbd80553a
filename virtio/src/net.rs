//! The network device (virtio 1.2, 5.1), on a descriptor that carries packets.

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest};
use crate::mmio::Mmio;
use crate::queue::Chain;
use crate::shared::Shared;
use lacuna_sync::{Condvar, Mutex, lock, lock_order};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{read, retry_on_intr, write};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MAC;

/// The queue with the driver's buffers for packets. The other one has its packets.
const RECEIVE: usize = 0;
/// The header before each packet (`virtio_net_hdr_v1`).
const HEADER: usize = 12;
/// The header of a received packet: no offload, in one buffer chain.
const RECEIVED: [u8; HEADER] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// The least room that a driver gives for a packet and its header (5.1.6.3.1).
const ROOM_MIN: u64 = 1526;
/// The longest packet: 64 KiB with an Ethernet header.
const PACKET_MAX: usize = 65_550;
/// The most packets that one request drops.
const DROPS_MAX: usize = 64;
/// The time between two looks at a descriptor without packets that is not quiet, such as a tap
/// whose interface is down.
const PAUSE: Duration = Duration::from_millis(100);

/// A network card. Its packets are Ethernet frames without checksum or segmentation offload.
///
/// Packets are lost as on a wire: received ones that are longer than the driver's buffer, and sent
/// ones that the descriptor does not take at once. Packets that come while the driver has no buffer
/// stay in the descriptor. A guest that has moved is found by its first packet.
pub struct Net {
    wire: OwnedFd,
    mac: [u8; 6],
    /// The receiving queue waits for a packet.
    waits: Mutex<bool, lock_order::VirtioWire>,
    changed: Condvar,
}

impl Net {
    /// A card with the address `mac` on `wire`, whose reads and writes are one packet each: a tap
    /// (`IFF_TAP | IFF_NO_PI`, without `IFF_VNET_HDR`) or a UNIX datagram socket.
    /// [`Mmio::listen`] makes received packets reach the driver.
    ///
    /// # Errors
    /// The descriptor cannot be made non-blocking.
    pub fn new(wire: OwnedFd, mac: [u8; 6]) -> io::Result<Self> {
        fcntl_setfl(&wire, fcntl_getfl(&wire)? | OFlags::NONBLOCK)?;
        Ok(Self {
            wire,
            mac,
            waits: Mutex::new(true),
            changed: Condvar::new(),
        })
    }

    fn set_waits(&self, waits: bool) {
        *lock(&self.waits) = waits;
        self.changed.notify_all();
    }

    fn receive(&self, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let room = chain.writable.bytes();
        if room < ROOM_MIN {
            return Err(Fault::Driver(
                "a buffer for a packet has less than 1526 bytes",
            ));
        }
        // A packet that fills the buffer may have been longer.
        let mut packet = vec![0; PACKET_MAX.min(room as usize - HEADER + 1)];
        for _ in 0..DROPS_MAX {
            let bytes = match retry_on_intr(|| read(&self.wire, &mut packet)) {
                Ok(bytes) => bytes,
                // There is none, or the interface is down.
                Err(_) => break,
            };
            if (1..packet.len()).contains(&bytes) {
                chain.writable.write(guest, 0, &RECEIVED)?;
                chain
                    .writable
                    .write(guest, HEADER as u64, &packet[..bytes])?;
                return Ok(Answer::Used((HEADER + bytes) as u32));
            }
        }
        self.set_waits(true);
        Ok(Answer::Later)
    }

    fn transmit(&self, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let bytes = chain.readable.bytes().checked_sub(HEADER as u64);
        let bytes = bytes.ok_or(Fault::Driver("a packet has no header"))?;
        if bytes as usize > PACKET_MAX {
            return Err(Fault::Driver("a packet is longer than 64 KiB"));
        }
        let mut packet = vec![0; bytes as usize];
        chain.readable.read(guest, HEADER as u64, &mut packet)?;
        // A refused packet is lost.
        let _ = retry_on_intr(|| write(&self.wire, &packet));
        Ok(Answer::Used(0))
    }
}

impl VirtioDevice for Net {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_NET_F_MAC
    }

    fn config(&self) -> Vec<u8> {
        self.mac.to_vec()
    }

    fn handle(&self, queue: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        match queue {
            RECEIVE => self.receive(chain, guest),
            _ => self.transmit(chain, guest),
        }
    }
}

impl Mmio<Net> {
    /// Starts a thread that wakes the device when a packet comes. Dropping the value ends it.
    ///
    /// # Errors
    /// The host has no thread, or no descriptor.
    pub fn listen(&self) -> io::Result<Listening> {
        let end = Arc::new(End {
            is_over: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC)?,
        });
        let device = Arc::clone(&self.shared);
        let named = thread::Builder::new().name("lacuna-net".into());
        let thread = named.spawn({
            let (device, end) = (Arc::clone(&device), Arc::clone(&end));
            move || device.listen(&end)
        })?;
        Ok(Listening {
            end,
            device,
            thread: Some(thread),
        })
    }
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net").finish_non_exhaustive()
    }
}

/// The thread of [`Mmio::listen`].
pub struct Listening {
    end: Arc<End>,
    device: Arc<Shared<Net>>,
    thread: Option<JoinHandle<()>>,
}

/// The end of a thread that listens.
struct End {
    is_over: AtomicBool,
    bell: OwnedFd,
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").finish_non_exhaustive()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.end.is_over.store(true, Ordering::SeqCst);
        // The write fails only if the counter is full: then the thread is woken anyway.
        let _ = write(&self.end.bell, &1u64.to_ne_bytes());
        let net = &self.device.device;
        // The thread looks at `is_over` under this lock.
        drop(lock(&net.waits));
        net.changed.notify_all();
        let joined = self.thread.take().map(JoinHandle::join);
        debug_assert!(joined.is_some_and(|joined| joined.is_ok()), "no panic");
    }
}

impl Shared<Net> {
    /// Notifies the receiving queue when there are packets for which it waits.
    fn listen(&self, end: &End) {
        let is_over = || end.is_over.load(Ordering::SeqCst);
        let net = &self.device;
        let look = Timespec::try_from(PAUSE).expect("a tenth of a second");
        loop {
            let waits = net
                .changed
                .wait_while(lock(&net.waits), |waits| !*waits && !is_over());
            drop(waits.unwrap_or_else(PoisonError::into_inner));
            let mut fds = [&net.wire, &end.bell].map(|fd| PollFd::new(fd, PollFlags::IN));
            // After an interruption there may be no packet, and the queue waits again.
            let _ = poll(&mut fds, None);
            let events = fds[0].revents();
            if events.intersects(PollFlags::ERR | PollFlags::HUP) {
                let _ = poll(&mut [PollFd::new(&end.bell, PollFlags::IN)], Some(&look));
            }
            if is_over() {
                return;
            }
            net.set_waits(false);
            self.notify(&mut self.lock(), 1 << RECEIVE);
        }
    }
}
