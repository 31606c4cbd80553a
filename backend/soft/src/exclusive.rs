//! Stopping the world for a locked access that crosses a cache line.
//!
//! Host atomics are at most 8 bytes, aligned; a split lock has to exclude every other access
//! instead. The vCPU that needs it raises a flag, kicks the others, and goes on once it is alone; a
//! vCPU that wants to come online meanwhile steps back. Rare by nature: compilers do not emit split
//! locks.

use lacuna_sync::{Quiescence, VcpuSlot};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::yield_now;

/// The world-stop of one VM.
#[derive(Default)]
pub(crate) struct Exclusive {
    active: AtomicBool,
    turn: Mutex<()>,
}

impl Exclusive {
    /// Brings vCPU `index` online, unless another one has the world to itself.
    pub(crate) fn online(&self, quiescence: &Quiescence, index: usize) -> lacuna_sync::Epoch {
        loop {
            let epoch = quiescence.online(index);
            fence(Ordering::SeqCst);
            if !self.active.load(Ordering::SeqCst) {
                return epoch;
            }
            quiescence.offline(index);
            yield_now();
        }
    }

    /// Runs `body` while no other vCPU executes guest code. The caller is offline.
    pub(crate) fn alone<R>(
        &self,
        quiescence: &Quiescence,
        index: usize,
        body: impl FnOnce() -> R,
    ) -> R {
        // Waiting for the turn holds nothing that the present owner needs: this vCPU is offline.
        let turn = self.turn.lock().expect("a panicking vCPU ends the run");
        self.active.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        while !quiescence.alone(index) {
            for other in (0..quiescence.len()).filter(|&i| i != index) {
                quiescence.vcpu(other).poke(VcpuSlot::KICK);
            }
            yield_now();
        }
        let result = body();
        self.active.store(false, Ordering::SeqCst);
        drop(turn);
        result
    }
}
