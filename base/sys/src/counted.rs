//! Ioctls that return a count. `rustix` has types only for ioctls that return nothing, or that
//! write their result through their argument.
//!
//! UNSAFETY: the trait asks for promises about the pointer that goes to the kernel. The caller of
//! [`Counted::new`] makes them.

use rustix::io;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::ptr;

/// The ioctl `OPCODE` on one `T`. It returns a count.
pub struct Counted<'a, const OPCODE: Opcode, T>(&'a mut T);

impl<'a, const OPCODE: Opcode, T> Counted<'a, OPCODE, T> {
    /// # Safety
    /// `OPCODE` takes a pointer to one `T`, or ignores it, and its effects are allowed.
    pub unsafe fn new(argument: &'a mut T) -> Self {
        Self(argument)
    }
}

// SAFETY: 1. the opcode takes this pointer, by the contract of `new`. 2. It may write there, which
// `IS_MUTATING` says. 3. The result is an integer; reading it reads no memory.
unsafe impl<const OPCODE: Opcode, T> Ioctl for Counted<'_, OPCODE, T> {
    type Output = usize;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> io::Result<usize> {
        Ok(usize::try_from(out).expect("what is negative is an error"))
    }
}
