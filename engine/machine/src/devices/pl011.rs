//! The serial line of AArch64 guests: Arm's PL011 (DDI 0183, chapter 3), transmit only.
//!
//! Each byte is output at once, so the transmit FIFO is always empty. There is no input, and the
//! interrupt line is not connected, but the interrupt registers behave as if it were. No rust-vmm
//! crate has a PL011.

use crate::Width;
use std::io::Write;

const DATA: u64 = 0x000;
const FLAGS: u64 = 0x018;
const INTEGER_BAUD_RATE: u64 = 0x024;
const FRACTIONAL_BAUD_RATE: u64 = 0x028;
const LINE_CONTROL: u64 = 0x02c;
const CONTROL: u64 = 0x030;
const FIFO_LEVELS: u64 = 0x034;
const INTERRUPT_MASK: u64 = 0x038;
const RAW_INTERRUPTS: u64 = 0x03c;
const INTERRUPTS: u64 = 0x040;
const CLEAR_INTERRUPTS: u64 = 0x044;
const DMA_CONTROL: u64 = 0x048;
/// PeriphID0 to 3, then PCellID0 to 3: one byte in each word. Part 0x011, designer Arm, r1p5.
const ID: u64 = 0xfe0;
const IDS: [u8; 8] = [0x11, 0x10, 0x34, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

/// FR: the transmit FIFO and the receive FIFO are empty.
const EMPTY: u32 = 1 << 7 | 1 << 4;
/// The transmit interrupt.
const TRANSMIT: u32 = 1 << 5;
const ALL_INTERRUPTS: u32 = 0x7ff;

/// A PL011 that writes to `W`.
pub(super) struct Pl011<W> {
    out: W,
    baud_rate: [u32; 2],
    line_control: u32,
    control: u32,
    fifo_levels: u32,
    mask: u32,
    raw: u32,
    dma_control: u32,
}

impl<W: Write> Pl011<W> {
    /// The state after a reset.
    pub(super) fn new(out: W) -> Self {
        Self {
            out,
            baud_rate: [0; 2],
            line_control: 0,
            // Transmit and receive are enabled.
            control: 0x300,
            fifo_levels: 0x12,
            mask: 0,
            raw: 0,
            dma_control: 0,
        }
    }

    /// The writer of its bytes.
    pub(super) fn out(&mut self) -> &mut W {
        &mut self.out
    }

    pub(super) fn into_out(self) -> W {
        self.out
    }

    /// IBRD, FBRD, LCR_H, CR, IFLS, IMSC, RIS, DMACR.
    pub(super) fn registers(&self) -> [u32; 8] {
        let [integer, fraction] = self.baud_rate;
        [
            integer,
            fraction,
            self.line_control,
            self.control,
            self.fifo_levels,
            self.mask,
            self.raw,
            self.dma_control,
        ]
    }

    /// A PL011 with these registers. Bits that a register lacks are dropped.
    pub(super) fn with_registers(out: W, registers: &[u32; 8]) -> Self {
        let mut line = Self::new(out);
        let at = [
            INTEGER_BAUD_RATE,
            FRACTIONAL_BAUD_RATE,
            LINE_CONTROL,
            CONTROL,
            FIFO_LEVELS,
            INTERRUPT_MASK,
        ];
        for (at, value) in at.into_iter().zip(registers) {
            line.write(at, u64::from(*value));
        }
        line.raw = registers[6] & ALL_INTERRUPTS;
        line.write(DMA_CONTROL, u64::from(registers[7]));
        line
    }

    /// A read `offset` bytes from its beginning. The registers have 32 bits; a narrower read gets
    /// their low bits, and a wider one zeros above.
    pub(super) fn read(&self, offset: u64, width: Width) -> u64 {
        let value = match offset {
            FLAGS => EMPTY,
            INTEGER_BAUD_RATE => self.baud_rate[0],
            FRACTIONAL_BAUD_RATE => self.baud_rate[1],
            LINE_CONTROL => self.line_control,
            CONTROL => self.control,
            FIFO_LEVELS => self.fifo_levels,
            INTERRUPT_MASK => self.mask,
            RAW_INTERRUPTS => self.raw,
            INTERRUPTS => self.raw & self.mask,
            DMA_CONTROL => self.dma_control,
            _ => match offset.checked_sub(ID).map(|at| (at / 4, at % 4)) {
                Some((index, 0)) => u32::from(IDS.get(index as usize).copied().unwrap_or(0)),
                _ => 0,
            },
        };
        u64::from(value) & width.ones()
    }

    /// A write `offset` bytes from its beginning. Writes to other registers have no effect.
    pub(super) fn write(&mut self, offset: u64, value: u64) {
        let value = value as u32;
        match offset {
            DATA => {
                // No error is possible: the writer keeps the bytes in memory.
                let _ = self.out.write(&[value as u8]);
                self.raw |= TRANSMIT;
            }
            INTEGER_BAUD_RATE => self.baud_rate[0] = value & 0xffff,
            FRACTIONAL_BAUD_RATE => self.baud_rate[1] = value & 0x3f,
            LINE_CONTROL => self.line_control = value & 0xff,
            CONTROL => self.control = value & 0xffff,
            FIFO_LEVELS => self.fifo_levels = value & 0x3f,
            INTERRUPT_MASK => self.mask = value & ALL_INTERRUPTS,
            CLEAR_INTERRUPTS => self.raw &= !value,
            DMA_CONTROL => self.dma_control = value & 7,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_and_the_line_is_always_ready() {
        let mut line = Pl011::new(Vec::new());
        for byte in b"hello" {
            assert_eq!(line.read(FLAGS, Width::Long) & (1 << 5 | 1 << 3), 0);
            line.write(DATA, u64::from(*byte) | 0xf00);
        }
        assert_eq!(line.out(), b"hello");
    }

    #[test]
    fn transmit_interrupts_are_masked_and_cleared() {
        let mut line = Pl011::new(Vec::new());
        line.write(DATA, 1);
        assert_eq!(line.read(RAW_INTERRUPTS, Width::Long), TRANSMIT.into());
        assert_eq!(line.read(INTERRUPTS, Width::Long), 0);
        line.write(INTERRUPT_MASK, u64::MAX);
        assert_eq!(line.read(INTERRUPT_MASK, Width::Long), 0x7ff);
        assert_eq!(line.read(INTERRUPTS, Width::Word), TRANSMIT.into());
        line.write(CLEAR_INTERRUPTS, TRANSMIT.into());
        assert_eq!(line.read(INTERRUPTS, Width::Long), 0);
    }

    /// A kernel finds its driver by these registers (DDI 0183, 3.3.20 to 3.3.27).
    #[test]
    fn its_identification() {
        let line = Pl011::new(Vec::new());
        let id = |first: u64| {
            (0..4).fold(0, |id, n| {
                id | line.read(first + 4 * n, Width::Long) << (8 * n)
            })
        };
        assert_eq!(id(0xfe0) & 0xf_ffff, 0x4_1011);
        assert_eq!(id(0xff0), 0xb105_f00d);
        assert_eq!(line.read(0xfe1, Width::Byte), 0);
        assert_eq!(line.read(0x1000, Width::Long), 0);
    }
}
