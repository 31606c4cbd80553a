//! Stops all vCPUs for a locked access that crosses a cache line.
//!
//! Host atomics are at most 8 bytes and aligned, so a split lock must exclude all other accesses.
//! The vCPU with the split lock raises a flag, kicks the others, and continues when it is alone.
//! Meanwhile a vCPU that is about to go online steps back. Split locks are rare: compilers do not
//! emit them.

use lacuna_sync::{Mutex, Qsbr, VcpuSlot, lock_order};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::yield_now;

/// Stops all vCPUs of one VM.
#[derive(Default)]
pub(crate) struct Exclusive {
    active: AtomicBool,
    turn: Mutex<(), lock_order::ExclusiveTurn>,
}

/// The raised flag; drop lowers it, also after a panic of the body.
struct Active<'a>(&'a AtomicBool);

impl<'a> Active<'a> {
    fn raise(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Self(flag)
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Exclusive {
    /// Brings vCPU `index` online, unless another one has the machine to itself.
    pub(crate) fn online(&self, qsbr: &Qsbr, index: usize) -> lacuna_sync::GracePeriod {
        loop {
            // This vCPU must not go online again and again: the vCPU that waits to be alone must
            // see all others offline at one moment.
            while self.active.load(Ordering::Acquire) {
                yield_now();
            }
            let grace = qsbr.online(index);
            fence(Ordering::SeqCst);
            if !self.active.load(Ordering::SeqCst) {
                return grace;
            }
            qsbr.offline(index);
        }
    }

    /// Runs `body` while no other vCPU executes guest code. The caller is offline.
    pub(crate) fn alone<R>(&self, qsbr: &Qsbr, index: usize, body: impl FnOnce() -> R) -> R {
        // This vCPU is offline, so while it waits for its turn, it holds nothing that the present
        // owner needs.
        let turn = self.turn.lock().expect("a panicking vCPU ends the run");
        let active = Active::raise(&self.active);
        while !qsbr.alone(index) {
            for other in (0..qsbr.len()).filter(|&i| i != index) {
                qsbr.vcpu(other).request(VcpuSlot::KICK);
            }
            yield_now();
        }
        let result = body();
        drop(active);
        drop(turn);
        result
    }
}
