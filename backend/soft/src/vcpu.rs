//! One vCPU: a step that never waits, and the thread-mode loop around it that does.
//!
//! ```text
//! step:  obey pokes -> online (flush the TLB if an epoch passed) -> run the processor -> offline
//!        -> Ran | Exit | Wait(for what) | Failed
//! run:   step; wait for what it says; until Exit           (threads: `lacuna_machine::run`)
//! World: step; note what it says; step another             (one thread: `seeded`)
//! ```

use crate::bus::{Blocked, SoftBus};
use crate::code::Stale;
use crate::vm::Meter;
use crate::{SoftError, Vm};
use lacuna_addr::Gpa;
use lacuna_cpu::Stop;
use lacuna_host::Ticket;
use lacuna_machine::{Boot, Exit, VcpuError, Width};
use lacuna_sync::{Epoch, Nanos, Quiescence, VcpuSlot};
use lacuna_x86::{Cpu, Regs, System, Table};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::yield_now;

/// Instructions after which a vCPU looks at its timer: some 20 to 100 us.
const FUEL: u64 = 20_000;

/// What one step ended with.
pub enum Step {
    /// Guest code ran; step again.
    Ran,
    /// The VMM has to do something.
    Exit(Exit),
    /// There is nothing to run before this happens.
    Wait(Wait),
    /// It cannot go on.
    Failed(VcpuError),
}

/// What a vCPU waits for.
pub enum Wait {
    /// An interrupt; by itself at this time, if a timer is armed.
    Halt(Option<Nanos>),
    /// A page.
    Page(Ticket),
    /// A free frame.
    Memory,
    /// An invalidation near its page to end: moments.
    Busy,
}

/// One virtual processor of the soft backend.
pub struct Vcpu {
    vm: Arc<Vm>,
    index: usize,
    cpu: Cpu,
    bus: SoftBus,
    /// When the TLB was last known to hold nothing stale.
    flushed: Epoch,
    /// Instructions retired when its holds were last let go.
    held_at: u64,
    stalled_since: Option<Nanos>,
}

/// A vCPU that is online; offline again on drop, also when it panics: shoot-downs must not wait for
/// a thread that is gone.
struct Online<'a> {
    quiescence: &'a Quiescence,
    index: usize,
}

impl Drop for Online<'_> {
    fn drop(&mut self) {
        self.quiescence.offline(self.index);
    }
}

impl Vcpu {
    pub(crate) fn new(vm: Arc<Vm>, index: usize, boot: &Boot) -> Result<Self, SoftError> {
        let mut cpu = Cpu::new(index, Arc::clone(&vm.apics), Arc::clone(&vm.clock));
        cpu.set_system(boot_system(boot));
        cpu.set_regs(&boot_regs(boot));
        Ok(Self {
            bus: SoftBus::new(Arc::clone(&vm), index)?,
            vm,
            index,
            cpu,
            flushed: Epoch::default(),
            held_at: 0,
            stalled_since: None,
        })
    }

    /// Its registers, for traces and debuggers.
    pub fn regs(&self) -> Regs {
        self.cpu.regs()
    }

    /// Instructions retired so far.
    pub fn retired(&self) -> u64 {
        self.cpu.retired()
    }

    /// Runs about `fuel` instructions at most. Never sleeps.
    pub fn step(&mut self, fuel: u64) -> Step {
        if let Some(since) = self.stalled_since.take() {
            let mut stalls = self
                .meter()
                .stalls
                .lock()
                .expect("no panic under this lock");
            stalls.record(since, self.vm.clock.now());
        }
        if self.cpu.retired() != self.held_at {
            self.held_at = self.cpu.retired();
            self.bus.faulter().retired();
        }
        let exit = self.online(|vcpu| {
            let slot = vcpu.vm.bells.quiescence.vcpu(vcpu.index);
            vcpu.cpu.run(&mut vcpu.bus, slot, fuel)
        });
        self.meter()
            .retired
            .store(self.cpu.retired(), Ordering::Relaxed);
        self.finish(exit)
    }

    fn meter(&self) -> &Meter {
        &self.vm.meters[self.index]
    }

    /// Runs `body` between two quiescent points.
    fn online<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        if self.vm.quiescence().vcpu(self.index).take() & VcpuSlot::CODE != 0 {
            self.drop_code();
        }
        let vm = Arc::clone(&self.vm);
        let epoch = vm.exclusive.online(vm.quiescence(), self.index);
        let _online = Online {
            quiescence: vm.quiescence(),
            index: self.index,
        };
        self.flush_since(epoch);
        body(self)
    }

    fn flush_since(&mut self, epoch: Epoch) {
        if epoch > self.flushed {
            self.cpu.flush_tlb();
            self.flushed = epoch;
        }
    }

    fn drop_code(&mut self) {
        match self.vm.code.take(self.index) {
            Stale::All => self.cpu.drop_all_code(),
            Stale::Pages(pages) => pages.into_iter().for_each(|gfn| self.cpu.drop_code(gfn)),
        }
    }

    fn finish(&mut self, exit: lacuna_x86::Exit) -> Step {
        use lacuna_x86::Exit as X;
        match exit {
            X::Fuel | X::Poked | X::Stop(Stop::Again) => Step::Ran,
            X::Halt => Step::Wait(Wait::Halt(self.cpu.next_deadline())),
            X::Stop(Stop::Wait | Stop::Lost) => self.blocked(),
            X::Stop(Stop::Mmio(gpa)) => self.unbacked(gpa),
            X::IoOut { port, size, value } => Step::Exit(Exit::IoOut {
                port,
                width: width(size),
                value,
            }),
            X::IoIn { port, size } => Step::Exit(Exit::IoIn {
                port,
                width: width(size),
            }),
            X::MmioRead { gpa, size } => Step::Exit(Exit::MmioRead {
                gpa,
                width: width(size),
            }),
            X::MmioWrite { gpa, size, value } => Step::Exit(Exit::MmioWrite {
                gpa,
                width: width(size),
                value,
            }),
            X::Exclusive => {
                let exit = self.run_alone();
                self.finish(exit)
            }
            X::Shutdown(shutdown) => {
                let lacuna_x86::Shutdown { rip, first } = shutdown;
                Step::Exit(Exit::Shutdown(format!(
                    "vCPU {}: triple fault: vector {} at rip {rip:#x} could not be delivered",
                    self.index, first.vector
                )))
            }
        }
    }

    /// One instruction with the world to itself.
    fn run_alone(&mut self) -> lacuna_x86::Exit {
        let vm = Arc::clone(&self.vm);
        let quiescence = vm.quiescence();
        vm.exclusive.alone(quiescence, self.index, || {
            let epoch = quiescence.online(self.index);
            let _online = Online {
                quiescence,
                index: self.index,
            };
            self.flush_since(epoch);
            self.cpu
                .run_exclusive(&mut self.bus, quiescence.vcpu(self.index))
        })
    }

    fn blocked(&mut self) -> Step {
        let vcpu = self.index;
        let wait = match self.bus.blocked.take() {
            Some(Blocked::Page(ticket)) => Wait::Page(ticket),
            Some(Blocked::Memory) => Wait::Memory,
            Some(Blocked::Busy) | None => return Step::Wait(Wait::Busy),
            Some(Blocked::Lost(gpa, cause)) => {
                return Step::Failed(VcpuError::PageLost { vcpu, gpa, cause });
            }
            Some(Blocked::NoTables(cause)) => {
                return Step::Failed(VcpuError::NoMemory { vcpu, cause });
            }
        };
        self.stalled_since = Some(self.vm.clock.now());
        Step::Wait(wait)
    }

    /// The guest runs code, or keeps page tables, where there is no memory. Hardware would fetch
    /// ones from the bus and end the same way.
    fn unbacked(&self, gpa: Gpa) -> Step {
        let text = format!(
            "vCPU {}: code, page table or system structure at {gpa}, where there is no memory \
             (rip {:#x})",
            self.index,
            self.cpu.regs().rip
        );
        Step::Exit(Exit::Shutdown(text))
    }

    /// Whether somebody wants its attention: an interrupt, a shoot-down.
    pub(crate) fn is_poked(&self) -> bool {
        self.vm.quiescence().vcpu(self.index).poked()
    }

    /// What a vCPU that waits for a frame does about it: takes pages from others, or from itself.
    pub(crate) fn reclaim(&self) -> Result<(), VcpuError> {
        match self.vm.host.reclaim_direct() {
            Ok(_) => Ok(()),
            Err(e) => Err(VcpuError::NoMemory {
                vcpu: self.index,
                cause: e.to_string(),
            }),
        }
    }
}

impl lacuna_machine::Vcpu for Vcpu {
    fn index(&self) -> usize {
        self.index
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        loop {
            if self.vm.is_stopping() {
                return Ok(Exit::Interrupted);
            }
            match self.step(FUEL) {
                Step::Ran => {}
                Step::Exit(exit) => return Ok(exit),
                Step::Failed(error) => return Err(error),
                Step::Wait(Wait::Halt(until)) => {
                    self.vm
                        .bells
                        .parker(self.index)
                        .park(&*self.vm.clock, until);
                }
                // A failed read shows when the page is resolved again: it is lost then.
                Step::Wait(Wait::Page(ticket)) => drop(self.vm.host.wait(&ticket)),
                Step::Wait(Wait::Memory) => self.reclaim()?,
                Step::Wait(Wait::Busy) => yield_now(),
            }
        }
    }

    fn complete_read(&mut self, value: u64) {
        self.cpu.complete_read(value);
    }
}

fn width(size: u8) -> Width {
    match size {
        1 => Width::Byte,
        2 => Width::Word,
        4 => Width::Long,
        _ => Width::Quad,
    }
}

fn boot_regs(boot: &Boot) -> Regs {
    let mut regs = Regs {
        rip: boot.entry.get(),
        rflags: 2,
        ..Regs::default()
    };
    const RBX: usize = 3;
    const RSI: usize = 6;
    regs.gpr[RBX] = boot.start_info.get();
    regs.gpr[RSI] = boot.start_info.get();
    regs
}

fn boot_system(boot: &Boot) -> System {
    let (code, data) = (boot.code_selector, boot.data_selector);
    let mut system = System::long_mode(boot.page_table.get());
    system.selectors = [data, code, data, data, data, data];
    system.gdtr = Table {
        base: boot.gdt.get(),
        limit: u32::from(boot.gdt_limit),
        ..Table::default()
    };
    system
}
