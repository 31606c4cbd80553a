//! The load of a touch, which a signal handler can leave.

pub use host::{SUPPORTED, leave_touch, touch};

#[cfg(target_arch = "x86_64")]
mod host {
    use std::arch::global_asm;

    /// Whether the touch is implemented.
    pub const SUPPORTED: bool = true;

    // A thread interrupted before the second label has not loaded the byte, and continues at the
    // third. Nothing is on the stack, so there is nothing to clean up.
    global_asm!(
        ".pushsection .text.lacuna_touch, \"ax\", @progbits",
        ".p2align 4",
        ".globl lacuna_touch",
        ".hidden lacuna_touch",
        ".globl lacuna_touch_end",
        ".hidden lacuna_touch_end",
        ".globl lacuna_touch_out",
        ".hidden lacuna_touch_out",
        "lacuna_touch:",
        "cmp byte ptr [rdi], 0",
        "jne lacuna_touch_out",
        "mov al, byte ptr [rsi]",
        "lacuna_touch_end:",
        "xor eax, eax",
        "ret",
        "lacuna_touch_out:",
        "mov eax, 1",
        "ret",
        ".popsection",
    );

    unsafe extern "C" {
        /// 0 after it has loaded the byte at `address`; 1 if `interrupt` is set, or the handler has
        /// ended it.
        fn lacuna_touch(interrupt: *const bool, address: u64) -> u32;
        static lacuna_touch_end: u8;
        static lacuna_touch_out: u8;
    }

    /// # Safety
    /// `interrupt` is valid, and `address` is mapped, until the call returns.
    pub unsafe fn touch(interrupt: *const bool, address: u64) -> u32 {
        // SAFETY: 1. both addresses are valid by the contract; the function reads a byte of each.
        unsafe { lacuna_touch(interrupt, address) }
    }

    /// If the interrupted thread is inside the touch, it leaves the touch when the handler returns.
    pub fn leave_touch(context: &mut libc::ucontext_t) {
        let at = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        let begin = lacuna_touch as *const () as i64;
        let (end, out) = (&raw const lacuna_touch_end, &raw const lacuna_touch_out);
        if (begin..end as i64).contains(at) {
            *at = out as i64;
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod host {
    /// Whether the touch is implemented.
    pub const SUPPORTED: bool = false;

    /// # Safety
    /// It is not called, because [`super::super::Toucher::check`] fails.
    pub unsafe fn touch(_: *const bool, _: u64) -> u32 {
        unreachable!("no touch on this processor")
    }

    /// Changes nothing.
    pub const fn leave_touch(_: &mut libc::ucontext_t) {}
}
