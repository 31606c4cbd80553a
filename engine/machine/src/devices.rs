//! The devices that a guest sees.
//!
//! | port | width | meaning |
//! |---|---|---|
//! | 0x3f8..=0x3ff | byte | 16550A serial line, output only |
//! | 0xf4 | any | end of the run; the value is the exit code (QEMU's `isa-debug-exit`) |
//! | 0x5c0 | long | frame number of the guest's status page (`lacuna-guest::status`) |
//!
//! Every other port reads as ones and ignores writes, as does device memory: a bus with nothing on
//! it.

use crate::{Kick, VcpuError, Width};
use lacuna_addr::Gfn;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_superio::{Serial, Trigger};

/// Port numbers.
pub mod port {
    /// COM1's first port.
    pub const SERIAL: u16 = 0x3f8;
    /// COM1's last port.
    pub const SERIAL_LAST: u16 = 0x3ff;
    /// Exit code.
    pub const EXIT: u16 = 0xf4;
    /// Status page frame number.
    pub const STATUS: u16 = 0x5c0;
}

/// Receives what the guest prints, in whole lines or at the end of the run.
pub trait Console: Send {
    /// One line without its newline; invalid UTF-8 replaced.
    fn line(&mut self, text: &str);
}

impl<F: FnMut(&str) + Send> Console for F {
    fn line(&mut self, text: &str) {
        self(text)
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Ending {
    /// The guest wrote its exit code.
    Exited(u32),
    /// A vCPU shut down; the text says where.
    Shutdown(String),
    /// A vCPU could not go on.
    Failed(VcpuError),
    /// The VMM stopped it.
    Stopped,
}

struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Longest line kept before it is passed on unfinished: a guest that never ends its line must not
/// grow the VMM.
const LINE_MAX: usize = 4096;

struct Lines {
    console: Box<dyn Console>,
    partial: Vec<u8>,
}

impl Lines {
    fn flush(&mut self) {
        if !self.partial.is_empty() {
            self.console.line(&String::from_utf8_lossy(&self.partial));
            self.partial.clear();
        }
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for &byte in bytes {
            match byte {
                b'\n' if self.partial.is_empty() => self.console.line(""),
                b'\n' => self.flush(),
                b'\r' => {}
                _ => self.partial.push(byte),
            }
            if self.partial.len() >= LINE_MAX {
                self.flush();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const NO_STATUS: u64 = u64::MAX;

/// The guest's devices, shared by its vCPU threads.
pub struct PlatformDevices {
    serial: Mutex<Serial<NoInterrupt, vm_superio::serial::NoEvents, Lines>>,
    status: AtomicU64,
    ending: Mutex<Option<Ending>>,
}

impl PlatformDevices {
    /// Devices that print to `console`.
    pub fn new(console: impl Console + 'static) -> Self {
        let lines = Lines {
            console: Box::new(console),
            partial: Vec::new(),
        };
        Self {
            serial: Mutex::new(Serial::new(NoInterrupt, lines)),
            status: AtomicU64::new(NO_STATUS),
            ending: Mutex::new(None),
        }
    }

    /// A port write.
    pub fn write(&self, port: u16, width: Width, value: u32, kick: &impl Kick) {
        match port {
            port::SERIAL..=port::SERIAL_LAST if width == Width::Byte => {
                let mut serial = self.serial.lock().expect("no panic under this lock");
                // Errors: none. The sink above never fails, and there is no interrupt to trigger.
                let _ = serial.write((port - port::SERIAL) as u8, value as u8);
            }
            port::EXIT => self.end(Ending::Exited(value), kick),
            port::STATUS if width == Width::Long => {
                self.status.store(u64::from(value), Ordering::Release);
            }
            _ => {}
        }
    }

    /// A port read.
    pub fn read(&self, port: u16, width: Width) -> u64 {
        match port {
            port::SERIAL..=port::SERIAL_LAST if width == Width::Byte => {
                let mut serial = self.serial.lock().expect("no panic under this lock");
                u64::from(serial.read((port - port::SERIAL) as u8))
            }
            _ => width.ones(),
        }
    }

    /// The status page the guest announced last.
    pub fn status_page(&self) -> Option<Gfn> {
        match self.status.load(Ordering::Acquire) {
            NO_STATUS => None,
            gfn => Gfn::new(gfn),
        }
    }

    /// Ends the run; the first ending counts.
    pub fn end(&self, ending: Ending, kick: &impl Kick) {
        self.ending
            .lock()
            .expect("no panic under this lock")
            .get_or_insert(ending);
        kick.kick_all();
    }

    /// How the run ended, once it has.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
            .lock()
            .expect("no panic under this lock")
            .clone()
    }

    /// Passes on an unfinished last line.
    pub fn flush(&self) {
        self.serial
            .lock()
            .expect("no panic under this lock")
            .writer_mut()
            .flush();
    }
}
