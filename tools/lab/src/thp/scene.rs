//! A guest of two vCPUs without a kernel. The first vCPU computes in a piece of memory. The second
//! keeps touching every page of the next 2 MiB. No vCPU touches the 2 MiB after that.

use crate::experiment::LabError;
use crate::fixture::{boot_code, resident};
use crate::native::thread_cpu_ns;
use lacuna_addr::{Access, BackingRange, Gfn, Level, PAGE_SIZE};
use lacuna_machine::{Exit, Kick as _, Vcpu as _};
use lacuna_soft::{
    Delivery, Ept, Fault, Format as _, HugePages, Mmu, RmapWalk, Vcpu, VcpuMmu, Vm, VmBuilder,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CODE: u32 = 0x10_0000;
/// The piece that the first vCPU works in. It stays in a core's caches.
const WORK: u32 = 8 << 20;
const WORK_BYTES: u32 = 256 << 10;
/// The range that the second vCPU touches and the host invalidates: the block after `WORK`'s.
const TOUCHED: u32 = 10 << 20;
const TOUCHED_BYTES: u32 = 2 << 20;
/// A block that no vCPU touches.
const UNTOUCHED: u32 = 12 << 20;
const MEMORY_MIB: u64 = 32;

/// The guest, and the invalidated range.
pub struct Scene {
    vm: Arc<Vm>,
    first: Gfn,
    range: BackingRange,
}

/// The block that no vCPU touches. An MMU context without a vCPU maps it.
pub struct Untouched {
    mmu: Arc<Mmu<Ept>>,
    context: VcpuMmu,
    first: Gfn,
    range: BackingRange,
}

/// One notifier call in its parts.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The slots' index, the range lock, and the walk that unmaps.
    pub walk: Duration,
    /// The shoot-down, and the end of the invalidation.
    pub shootdown: Duration,
    /// Leaves removed.
    pub leaves: u64,
    /// Whether the call had to wait for a vCPU.
    pub waited: bool,
}

/// The result of an invalidation of the range.
pub struct Taken {
    /// How long it took.
    pub spent: Duration,
    /// Leaves removed. Fewer than all, if the vCPU had not touched the whole range again.
    pub leaves: u64,
}

/// The first vCPU, which computes.
pub struct Worker(Vcpu);

/// The second vCPU, which touches.
pub struct Toucher(Vcpu);

impl Scene {
    /// A guest whose worker goes through its piece `passes` times in each run.
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
        let (first, range) = block(&vm, TOUCHED);
        Ok((Self { vm, first, range }, Worker(worker), Toucher(toucher)))
    }

    /// The range that the second vCPU touches.
    pub const fn range(&self) -> BackingRange {
        self.range
    }

    /// The number of memory slots that the VM has.
    pub fn slots(&self) -> usize {
        self.vm.mmu().slots().len()
    }

    /// The block that no vCPU touches.
    ///
    /// # Errors
    /// There is no room for one more MMU context.
    pub fn untouched(&self) -> Result<Untouched, LabError> {
        let (first, range) = block(&self.vm, UNTOUCHED);
        let mmu = Arc::clone(self.mmu());
        let context = mmu.vcpu_mmu()?;
        Ok(Untouched {
            mmu,
            context,
            first,
            range,
        })
    }

    fn mmu(&self) -> &Arc<Mmu<Ept>> {
        Ept::of(self.vm.mmu()).expect("an x86-64 guest")
    }

    /// Invalidates `range`, as reclaim does.
    pub fn call(&self, walk: RmapWalk, range: BackingRange) -> Call {
        let start = Instant::now();
        let begun = self.mmu().begin_invalidation_as(walk, &[range]);
        let unmapped = Instant::now();
        let leaves = begun.steps().leaves;
        let waited = begun.finish_counted();
        let end = Instant::now();
        Call {
            walk: unmapped - start,
            shootdown: end - unmapped,
            leaves,
            waited,
        }
    }

    /// Invalidates the touched range, as reclaim does.
    pub fn take(&self) -> Taken {
        let start = Instant::now();
        let steps = self.vm.mmu().invalidate_as(RmapWalk::PerLevel, self.range);
        let spent = start.elapsed();
        Taken {
            spent,
            leaves: steps.leaves,
        }
    }

    /// Whether every page of the range is mapped.
    pub fn is_mapped(&self) -> bool {
        let mut gfns = (0..self.range.pages()).map(|page| self.first.checked_add(page));
        gfns.all(|gfn| gfn.is_some_and(|gfn| self.vm.mmu().is_mapped(gfn)))
    }

    /// Faults of the guest so far. A fault counts when the host has found the page, before its leaf
    /// is installed.
    pub fn faults(&self) -> u64 {
        let stats = self.vm.host().stats();
        stats.faults_resident + stats.faults_zero_fill + stats.huge_faults
    }

    /// Makes the toucher's and the worker's runs return.
    pub fn end(&self) {
        self.vm.kick_all();
    }
}

/// The block of 2 MiB at `address`, and its backing.
fn block(vm: &Vm, address: u32) -> (Gfn, BackingRange) {
    let first = Gfn::new(u64::from(address) / PAGE_SIZE as u64).expect("a small address");
    let slots = vm.mmu().slots();
    let slot = slots.find(first).expect("its memory");
    let range = BackingRange::new(slot.backing_of(first), Level::L2M.pages());
    (first, range.expect("inside the slot"))
}

impl Untouched {
    /// Maps the block by one huge leaf.
    ///
    /// # Errors
    /// The host supplied no huge page.
    pub fn map(&mut self) -> Result<(), LabError> {
        let level = loop {
            match self.mmu.fault(&mut self.context, self.first, Access::Write) {
                Fault::Mapped(page) => break Some(page.level),
                Fault::Busy => {}
                _ => break None,
            }
        };
        self.context.retired();
        match level {
            Some(Level::L2M) => Ok(()),
            other => Err(LabError::Guest(format!(
                "the host supplied {other:?} in place of a huge page"
            ))),
        }
    }

    /// Its backing.
    pub const fn range(&self) -> BackingRange {
        self.range
    }
}

impl Worker {
    /// Carries out one run and returns its CPU time.
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

    /// Waits until `what` holds, by the work of another thread.
    fn until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < deadline, "it never happened");
            thread::sleep(Duration::from_micros(100));
        }
    }

    #[test]
    fn an_invalidated_range_is_touched_again_while_the_worker_works() {
        for (huge, pages) in [(HugePages::Always, 1), (HugePages::Never, 512)] {
            let (scene, mut worker, mut toucher) = Scene::new(huge, 1).unwrap();
            thread::scope(|scope| {
                let touching = scope.spawn(|| toucher.touch());
                // The code, a table, and the whole range.
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
