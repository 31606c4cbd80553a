//! User-mode programs on the host's own processor, up to their final fault.
//!
//! ```text
//! SHARED   of stub and signal handler: registers in and out, steps, the stub's code
//! code     the program, at the address that it has on the software processor too
//! ```
//! A stub loads all registers and jumps to the program. The fault's signal handler saves the
//! registers and continues in the stub, which returns. It also records the trap flag's traps.

use super::assemble;
use iced_x86::code_asm::*;
use libc::{c_int, c_void, siginfo_t, ucontext_t};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};

const SHARED: u64 = 0x50_0000;
/// Places of the stub's two halves in the shared page.
const ENTRY: u64 = SHARED + 0x800;
const RECOVER: u64 = SHARED + 0xc00;
const STEPS_MAX: usize = 32;
const TF: i64 = 1 << 8;

/// Registers before or after a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Registers {
    pub gpr: [u64; 16],
    pub rip: u64,
    pub flags: u64,
}

#[repr(C)]
struct Shared {
    before: Registers,
    stack: u64,
    after: Registers,
    vector: u64,
    error: u64,
    steps: [u64; STEPS_MAX],
    count: usize,
}

/// How a program ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    pub vector: u64,
    pub error: u64,
    pub registers: Registers,
    /// RIP at each of the trap flag's traps.
    pub steps: Vec<u64>,
}

static RUNNING: AtomicBool = AtomicBool::new(false);

fn shared() -> *mut Shared {
    SHARED as *mut Shared
}

/// Maps fresh memory with all rights at `at`; `None` if something is mapped there.
pub fn map(at: u64, bytes: usize) -> Option<()> {
    let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a fresh private mapping, which replaces none.
    let mapped = unsafe { libc::mmap(at as *mut c_void, bytes, rights, flags, -1, 0) };
    (mapped as u64 == at).then_some(())
}

/// Copies to memory from [`map`].
pub fn write(at: u64, bytes: &[u8]) {
    // SAFETY: mapped with all rights, and used by nothing else.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) }
}

/// Copies out of memory from [`map`].
pub fn read(at: u64, len: usize) -> Vec<u8> {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(at as *const u8, len).to_vec() }
}

/// Puts the stub and the handlers in place. Call it once in a process.
pub fn install() -> Option<()> {
    map(SHARED, 4096)?;
    write(ENTRY, &assemble(ENTRY, enter));
    write(RECOVER, &assemble(RECOVER, recover));
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP] {
        // SAFETY: the handler has this signature, and a stack of its own.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
    Some(())
}

/// Runs the program at `before.rip`, which must end in a fault.
pub fn run(before: Registers) -> Ended {
    let mut stack = vec![0_u8; 1 << 16];
    let alternative = libc::stack_t {
        ss_sp: stack.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: stack.len(),
    };
    // SAFETY: the stack lives until the old one is back; the stub is a function of the C ABI that
    // keeps what it must; the shared page is this thread's while the stub runs.
    unsafe {
        let mut old: libc::stack_t = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(&alternative, &mut old), 0);
        (*shared()).before = before;
        (*shared()).count = 0;
        RUNNING.store(true, Ordering::SeqCst);
        let stub: extern "C" fn() = std::mem::transmute(ENTRY as *const ());
        stub();
        RUNNING.store(false, Ordering::SeqCst);
        assert_eq!(libc::sigaltstack(&old, std::ptr::null_mut()), 0);
        let shared = &*shared();
        Ended {
            vector: shared.vector,
            error: shared.error,
            registers: shared.after,
            steps: shared.steps[..shared.count].to_vec(),
        }
    }
}

const GPRS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];
const KEPT: [AsmRegister64; 6] = [rbx, rbp, r12, r13, r14, r15];

/// The field at `offset` of the shared page.
fn field(offset: usize) -> AsmMemoryOperand {
    qword_ptr(SHARED + offset as u64)
}

fn enter(a: &mut CodeAssembler) {
    for r in KEPT {
        a.push(r).unwrap();
    }
    a.mov(field(offset_of!(Shared, stack)), rsp).unwrap();
    a.push(field(offset_of!(Shared, before.flags))).unwrap();
    a.popfq().unwrap();
    for (i, r) in GPRS.into_iter().enumerate() {
        a.mov(r, field(offset_of!(Shared, before.gpr) + 8 * i))
            .unwrap();
    }
    a.jmp(field(offset_of!(Shared, before.rip))).unwrap();
}

fn recover(a: &mut CodeAssembler) {
    a.mov(rsp, field(offset_of!(Shared, stack))).unwrap();
    a.cld().unwrap();
    for r in KEPT.into_iter().rev() {
        a.pop(r).unwrap();
    }
    a.ret().unwrap();
}

/// RAX to R15 in the order of a signal's context.
const CONTEXT: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn handle(signal: c_int, _info: *mut siginfo_t, context: *mut c_void) {
    if !RUNNING.load(Ordering::SeqCst) {
        // A fault of the test itself: it is executed again and ends the process.
        // SAFETY: the default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: the kernel passes a context; the shared page belongs to the thread that runs a
    // program, which is this one.
    let (registers, shared) = unsafe {
        (
            &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs,
            &mut *shared(),
        )
    };
    let rip = registers[libc::REG_RIP as usize] as u64;
    if signal == libc::SIGTRAP && shared.count < STEPS_MAX {
        shared.steps[shared.count] = rip;
        shared.count += 1;
        return;
    }
    shared.after.gpr = CONTEXT.map(|register| registers[register as usize] as u64);
    shared.after.rip = rip;
    shared.after.flags = registers[libc::REG_EFL as usize] as u64;
    shared.vector = registers[libc::REG_TRAPNO as usize] as u64;
    shared.error = registers[libc::REG_ERR as usize] as u64;
    registers[libc::REG_EFL as usize] &= !TF;
    registers[libc::REG_RIP as usize] = RECOVER as i64;
}
