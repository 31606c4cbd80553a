//! A guest of two vCPUs that needs no kernel: the first computes in a piece of memory, the second
//! keeps touching every page of another piece, the next 2 MiB.

use crate::experiment::LabError;
use crate::fixture::{boot_code, resident};
use crate::native::thread_cpu_ns;
use lacuna_addr::{BackingRange, Gfn, PAGE_SIZE};
use lacuna_machine::{Exit, Kick as _, Vcpu as _};
use lacuna_soft::{Delivery, HugePages, RmapWalk, Vcpu, Vm, VmBuilder};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CODE: u32 = 0x10_0000;
/// What the first vCPU works in: a piece that stays in a core's caches.
const WORK: u32 = 8 << 20;
const WORK_BYTES: u32 = 256 << 10;
/// What the second vCPU touches, and the host takes away: the block after the one of `WORK`.
const TOUCHED: u32 = 10 << 20;
const TOUCHED_BYTES: u32 = 2 << 20;
const MEMORY_MIB: u64 = 32;

/// The guest and the range that is taken from it.
pub struct Scene {
    vm: Arc<Vm>,
    range: BackingRange,
}

/// What came of taking the range.
pub struct Taken {
    /// How long that took.
    pub spent: Duration,
    /// Leaves removed: fewer than there can be, if the vCPU was not through with touching.
    pub leaves: u64,
}

/// The vCPU that computes.
pub struct Worker(Vcpu);

/// The vCPU that touches.
pub struct Toucher(Vcpu);

impl Scene {
    /// A guest in which the worker goes through its piece `passes` times in each of its runs.
    pub fn new(huge: HugePages, passes: u32) -> Result<(Self, Worker, Toucher), LabError> {
        let builder = VmBuilder {
            huge,
            ..resident(MEMORY_MIB, 2)
        };
        let code = program(passes);
        let pieces = [(u64::from(CODE), &*code)];
        let (vm, vcpus) = boot_code(&builder, Delivery::Bitmap, &pieces)?;
        let mut vcpus = vcpus.into_iter();
        let (worker, toucher) = vcpus.next().zip(vcpus.next()).expect("two vCPUs");
        let first = Gfn::new(u64::from(TOUCHED) / PAGE_SIZE as u64).expect("a small address");
        let slots = vm.mmu().slots();
        let slot = slots.find(first).expect("its memory");
        let pages = u64::from(TOUCHED_BYTES) / PAGE_SIZE as u64;
        let range = BackingRange::new(slot.backing_of(first), pages).expect("inside the slot");
        Ok((Self { vm, range }, Worker(worker), Toucher(toucher)))
    }

    /// The host takes the range.
    pub fn take(&self) -> Taken {
        let start = Instant::now();
        let steps = self.vm.mmu().invalidate_as(RmapWalk::PerLevel, self.range);
        let spent = start.elapsed();
        Taken {
            spent,
            leaves: steps.leaves,
        }
    }

    /// Faults of the guest so far.
    pub fn faults(&self) -> u64 {
        let stats = self.vm.host().stats();
        stats.faults_resident + stats.faults_zero_fill + stats.huge_faults
    }

    /// Makes the toucher, and a worker in its run, come back.
    pub fn end(&self) {
        self.vm.kick_all();
    }
}

impl Worker {
    /// One run; the CPU time that it takes.
    pub fn work(&mut self) -> Result<Duration, LabError> {
        let before = thread_cpu_ns();
        match self.0.run() {
            Ok(Exit::IoOut { .. }) => Ok(Duration::from_nanos(thread_cpu_ns() - before)),
            other => Err(LabError::Guest(format!("the worker ended with {other:?}"))),
        }
    }
}

impl Toucher {
    /// Touches until [`Scene::end`].
    pub fn touch(&mut self) -> Result<(), LabError> {
        match self.0.run() {
            Ok(Exit::Interrupted) => Ok(()),
            other => Err(LabError::Guest(format!("the toucher ended with {other:?}"))),
        }
    }
}

/// The machine code.
fn program(passes: u32) -> Vec<u8> {
    let word = u32::to_le_bytes;
    [
        &[0xb8, 1, 0, 0, 0][..], // begin: mov eax, 1
        &[0x0f, 0xa2],           // cpuid
        &[0xc1, 0xeb, 24],       // shr ebx, 24         the APIC id
        &[0x85, 0xdb],           // test ebx, ebx
        &[0x75, 0x22],           // jnz touch
        &[0xbe],
        &word(passes), // mov esi, passes
        &[0xbf],
        &word(WORK),             // pass: mov edi, WORK
        &[0x48, 0x83, 0x07, 1],  // line: add qword [rdi], 1
        &[0x48, 0x83, 0xc7, 64], // add rdi, 64
        &[0x81, 0xff],
        &word(WORK + WORK_BYTES), // cmp edi, WORK + WORK_BYTES
        &[0x72, 0xf0],            // jb line
        &[0xff, 0xce],            // dec esi
        &[0x75, 0xe7],            // jnz pass
        &[0xe6, 0xf4],            // out 0xf4, al
        &[0xeb, 0xd0],            // jmp begin
        &[0xbf],
        &word(TOUCHED),                     // touch: mov edi, TOUCHED
        &[0xc6, 0x07, 1],                   // page: mov byte [rdi], 1
        &[0x48, 0x81, 0xc7, 0, 0x10, 0, 0], // add rdi, 4096
        &[0x81, 0xff],
        &word(TOUCHED + TOUCHED_BYTES), // cmp edi, TOUCHED + TOUCHED_BYTES
        &[0x72, 0xee],                  // jb page
        &[0xeb, 0xe7],                  // jmp touch
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Waits for `what`, which another thread brings about.
    fn until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < deadline, "it never came");
            thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn what_is_taken_is_touched_again_while_the_neighbour_works() {
        for (huge, pages) in [(HugePages::Always, 1), (HugePages::Never, 512)] {
            let (scene, mut worker, mut toucher) = Scene::new(huge, 1).unwrap();
            thread::scope(|scope| {
                let touching = scope.spawn(|| toucher.touch());
                // Its code and table, and all of the range.
                until(|| scene.faults() >= pages);
                for _ in 0..3 {
                    let before = scene.faults();
                    scene.take();
                    assert!(worker.work().unwrap() > Duration::ZERO);
                    until(|| scene.faults() >= before + pages);
                }
                scene.end();
                touching.join().unwrap().unwrap();
            });
        }
    }
}
