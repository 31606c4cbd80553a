//! The serial line of a guest.

use super::lines::Lines;
use super::pl011::Pl011;
use crate::Arch;
use std::convert::Infallible;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

/// No interrupt is raised.
pub(super) struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The serial line of each architecture.
pub(super) enum Uart {
    Com1(Serial<NoInterrupt, NoEvents, Lines>),
    Pl011(Pl011<Lines>),
}

impl Uart {
    /// The UART of guests for `arch`.
    pub(super) fn new(arch: Arch, lines: Lines) -> Self {
        match arch {
            Arch::X86_64 => Self::Com1(Serial::new(NoInterrupt, lines)),
            Arch::Arm64 => Self::Pl011(Pl011::new(lines)),
        }
    }

    /// The writer of its bytes.
    pub(super) fn lines(&mut self) -> &mut Lines {
        match self {
            Self::Com1(serial) => serial.writer_mut(),
            Self::Pl011(line) => line.out(),
        }
    }

    /// The UART after power-on. An unfinished line stays.
    pub(super) fn reset(&mut self, arch: Arch) {
        *self = Self::new(arch, self.take_lines(arch));
    }

    /// Takes the writer away. Bytes written before it is put back are lost.
    pub(super) fn take_lines(&mut self, arch: Arch) -> Lines {
        let nowhere = Self::new(arch, Lines::new(|_: &str| {}));
        match std::mem::replace(self, nowhere) {
            Self::Com1(serial) => serial.into_writer(),
            Self::Pl011(line) => line.into_out(),
        }
    }
}
