//! A guest of two vCPUs without a kernel. The first vCPU writes to a piece of memory and exits. The
//! second keeps touching every page of the next 2 MiB.

use crate::experiment::{LabError, LabResult};
use crate::fixture::{boot_code, gpa_of, joined, resident, time_to_port};
use lacuna::memory::HugePages;
use lacuna::soft::{Vcpu, Vm, VmBuilder};
use lacuna::{Arch, Exit, Gfn, GfnRange, Kick as _, PAGE_SIZE, Vcpu as _};
use lacuna_addr::{BackingRange, Level};
use lacuna_soft::{Format, Mmu, RmapWalk, VmMmu};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Offsets in the guest's memory: the code, the first vCPU's block, and the second vCPU's.
const CODE: u32 = 4 << 20;
const WORK: u32 = 8 << 20;
const TOUCHED: u32 = 10 << 20;
const BLOCK_BYTES: u32 = 2 << 20;
const MEMORY_MIB: u64 = 32;
/// Cores: the first vCPU, or the calling thread, has one for itself.
pub const WORKER: usize = 0;
pub const OTHERS: usize = 1;

/// The longest time that a vCPU may take to touch its range again.
const TOUCH: Duration = Duration::from_secs(10);

/// What the first vCPU writes to in a run: so many bytes from [`WORK`] on, in steps, so many times.
#[derive(Clone, Copy)]
pub struct Work {
    pub bytes: u32,
    pub step: u32,
    pub passes: u32,
}

/// Every page of its block, once.
pub const PAGES: Work = Work {
    bytes: BLOCK_BYTES,
    step: PAGE_SIZE as u32,
    passes: 1,
};

/// A block of 2 MiB, and its backing.
#[derive(Clone, Copy)]
pub struct Block {
    first: Gfn,
    range: BackingRange,
}

/// The guest, and the blocks of its vCPUs.
pub struct Scene {
    pub vm: Arc<Vm>,
    pub work: Block,
    pub touched: Block,
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

impl Scene {
    /// A guest with its two vCPUs: the worker, and the toucher.
    pub fn new(arch: Arch, huge: HugePages, work: Work) -> LabResult<(Self, Vcpu, Vcpu)> {
        let builder = VmBuilder {
            arch,
            huge,
            ..resident(MEMORY_MIB, 2)
        };
        let start = gpa_of(arch, 0).get();
        let code = match arch {
            Arch::Arm64 => arm64_program(start as u32, work),
            _ => program(work),
        };
        let pieces = [(start + u64::from(CODE), &*code)];
        let (vm, vcpus) = boot_code(&builder, &pieces)?;
        let mut vcpus = vcpus.into_iter();
        let (mut worker, toucher) = vcpus.next().zip(vcpus.next()).expect("two vCPUs");
        let [work, touched] = [WORK, TOUCHED].map(|address| {
            let first = Gfn::new((start + u64::from(address)) / PAGE_SIZE as u64);
            Block::new(&vm, first.expect("a small address"))
        });
        // On AArch64 the first vCPU's code starts the second one.
        self::work(&mut worker)?;
        Ok((Self { vm, work, touched }, worker, toucher))
    }

    /// The number of memory slots that the VM has.
    pub fn slots(&self) -> usize {
        self.vm.mmu().slots().len()
    }

    /// Waits until every page of the touched block is mapped.
    pub fn wait_mapped(&self) -> LabResult {
        let Block { first, range } = self.touched;
        let is_mapped = |page| {
            self.vm
                .mmu()
                .is_mapped(first.checked_add(page).expect("in it"))
        };
        wait_until(|| (0..range.pages()).all(is_mapped))
    }

    /// Waits until the guest has had `faults` faults.
    pub fn wait_faults(&self, faults: u64) -> LabResult {
        wait_until(|| self.faults() >= faults)
    }

    /// Faults of the guest so far. A fault counts when the host has found the page, before its leaf
    /// is installed.
    pub fn faults(&self) -> u64 {
        let stats = self.vm.host().stats();
        stats.faults_resident + stats.faults_zero_fill + stats.huge_faults
    }

    /// Lets `toucher` touch its block on a thread of its own until `work` has ended there on
    /// another thread. Returns the result of `work`, and of the toucher, whose failure is the cause
    /// of other errors.
    pub fn beside<T: Send>(
        &self,
        toucher: &mut Vcpu,
        work: impl FnOnce() -> LabResult<T> + Send,
    ) -> LabResult<T> {
        thread::scope(|scope| {
            let end = End(self);
            let touching = scope.spawn(|| {
                crate::cores::pin(OTHERS);
                match toucher.run() {
                    Ok(Exit::Interrupted) => Ok(()),
                    other => Err(LabError::Guest(format!("the toucher ended with {other:?}"))),
                }
            });
            let result = joined(scope.spawn(|| {
                crate::cores::pin(WORKER);
                work()
            }));
            drop(end);
            joined(touching).and(result)
        })
    }
}

/// Makes the vCPUs' runs return when it is dropped, also after an error or a panic.
struct End<'a>(&'a Scene);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.vm.kick_all();
    }
}

/// Waits until the vCPU has done `what`.
///
/// # Errors
/// [`LabError::Busy`]: the vCPU's thread does not get a processor.
fn wait_until(what: impl Fn() -> bool) -> LabResult {
    let deadline = Instant::now() + TOUCH;
    while !what() {
        if Instant::now() > deadline {
            let text = format!("a vCPU did not touch its range again within {TOUCH:?}");
            return Err(LabError::Busy(text));
        }
        thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

/// Invalidates `block`, as reclaim does.
pub fn call(vm: &Vm, walk: RmapWalk, block: Block) -> Call {
    match vm.mmu() {
        VmMmu::Ept(mmu) => call_in(&**mmu, walk, block),
        VmMmu::Arm64(mmu) => call_in(&**mmu, walk, block),
    }
}

fn call_in<F: Format>(mmu: &Mmu<F>, walk: RmapWalk, block: Block) -> Call {
    let start = Instant::now();
    let begun = mmu.begin_invalidation_as(walk, &[block.range]);
    let unmapped = Instant::now();
    let leaves = begun.steps().leaves;
    let waited = begun.finish_counted();
    Call {
        walk: unmapped - start,
        shootdown: unmapped.elapsed(),
        leaves,
        waited,
    }
}

impl Block {
    /// The block of `vm` that begins at `first`.
    fn new(vm: &Vm, first: Gfn) -> Self {
        let slots = vm.mmu().slots();
        let slot = slots.find(first).expect("its memory");
        let range = BackingRange::new(slot.backing_of(first), Level::L2M.pages());
        let range = range.expect("inside the slot");
        Self { first, range }
    }

    /// All blocks of `vm` inside `gfns`, a part of one slot.
    pub fn all(vm: &Vm, gfns: GfnRange) -> impl Iterator<Item = Self> {
        let pages = Level::L2M.pages();
        let (first, end) = (gfns.start().get().next_multiple_of(pages), gfns.end_raw());
        let firsts = (first..end + 1 - pages).step_by(pages as usize);
        firsts.map(|first| Self::new(vm, Gfn::new(first).expect("a page of the guest")))
    }
}

/// CPU time of a run of the worker.
pub fn work(worker: &mut Vcpu) -> LabResult<Duration> {
    time_to_port(worker).map(Duration::from_nanos)
}

/// The x86-64 machine code.
fn program(work: Work) -> Vec<u8> {
    let word = u32::to_le_bytes;
    [
        &[0xb8, 1, 0, 0, 0][..], // begin: mov eax, 1
        &[0x0f, 0xa2],           // cpuid
        &[0xc1, 0xeb, 24],       // shr ebx, 24         the APIC id
        &[0x85, 0xdb],           // test ebx, ebx
        &[0x75, 0x25],           // jnz touch
        &[0xbe],
        &word(work.passes), // mov esi, passes
        &[0xbf],
        &word(WORK),            // pass: mov edi, WORK
        &[0x48, 0x83, 0x07, 1], // line: add qword [rdi], 1
        &[0x48, 0x81, 0xc7],
        &word(work.step), // add rdi, step
        &[0x81, 0xff],
        &word(WORK + work.bytes), // cmp edi, WORK + bytes
        &[0x72, 0xed],            // jb line
        &[0xff, 0xce],            // dec esi
        &[0x75, 0xe4],            // jnz pass
        &[0xe6, 0xf4],            // out 0xf4, al
        &[0xeb, 0xcd],            // jmp begin
        &[0xbf],
        &word(TOUCHED),                     // touch: mov edi, TOUCHED
        &[0xc6, 0x07, 1],                   // page: mov byte [rdi], 1
        &[0x48, 0x81, 0xc7, 0, 0x10, 0, 0], // add rdi, 4096
        &[0x81, 0xff],
        &word(TOUCHED + BLOCK_BYTES), // cmp edi, TOUCHED + BLOCK_BYTES
        &[0x72, 0xee],                // jb page
        &[0xeb, 0xe7],                // jmp touch
    ]
    .concat()
}

/// The AArch64 machine code, in a guest whose memory begins at `start`. A device's address takes
/// the place of the port.
fn arm64_program(start: u32, work: Work) -> Vec<u8> {
    let parameters = [
        work.passes,
        start + WORK,
        start + WORK + work.bytes,
        work.step,
        start + TOUCHED,
        start + TOUCHED + BLOCK_BYTES,
    ];
    let words = ARM64.iter().chain(&parameters);
    words.flat_map(|word| word.to_le_bytes()).collect()
}

/// X10: the vCPU; X9: the parameters, which follow the code.
#[rustfmt::skip]
const ARM64: [u32; 30] = [
    0xd53800aa, 0x92401d4a, // start: mrs x10, mpidr_el1; and x10, x10, #0xff
    0xb50002aa, 0x52800060, 0x72b88000, // cbnz x10, touch; mov w0, #0x3; movk w0, #0xc400, lsl #16
    0xd2800021, 0x10ffff42, 0xd4000002, // mov x1, #0x1; adr x2, start; hvc #0x0     CPU_ON
    0x100002c9, 0x29401524, // begin: adr x9, parameters; ldp w4, w5, [x9]
    0x29411d26, // ldp w6, w7, [x9, #8]
    0x2a0503e3, // pass: mov w3, w5
    0xf9400060, 0x91000400, 0xf9000060, // line: ldr x0, [x3]; add x0, x0, #0x1; str x0, [x3]
    0x8b070063, 0x6b06007f, 0x54ffff63, // add x3, x3, x7; cmp w3, w6; b.lo line
    0x71000484, 0x54ffff01, // subs w4, w4, #0x1; b.ne pass
    0x52a12008, 0xb9000104, // mov w8, #0x9000000; str w4, [x8]
    0x17fffff2, // b begin
    0x100000e9, 0x29421925, // touch: adr x9, parameters; ldp w5, w6, [x9, #16]
    0x390000aa, 0x914004a5, // page: strb w10, [x5]; add x5, x5, #0x1, lsl #12
    0x6b0600bf, 0x54ffffa3, 0x17fffffa, // cmp w5, w6; b.lo page; b touch
];
