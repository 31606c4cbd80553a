//! Interrupts of devices: lines to the interrupt controller of a VM, and messages.
//!
//! ```text
//! Line::raise, lower (any thread)                                     Interrupts::signal_msi
//!   -> InterruptLines: how many handles raise the line                        |
//!   -> InterruptController::set_line: the level is their OR                   |
//!        soft: I/O APIC or GIC of the VM    kvm: KVM_IRQ_LINE                 v
//!   -> the vCPU's local APIC or CPU interface  <------ InterruptController::send_msi
//! ```
//! An eventfd ([`Interrupts::eventfd`]) does the same from any process:
//! ```text
//! write -> kvm: KVM_IRQFD    soft: a thread of the VM, or save_shared -> the interrupt controller
//! ```
//! A handle refers to its VM weakly. So a device that a VM's owner keeps beside the VM does not
//! keep the VM's memory, and after the VM's end its interrupts go nowhere.

use crate::{Arch, ErrorKind};
use lacuna_sync::{Mutex, lock_order};
use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};

/// The numbers of the lines: pins of the I/O APIC, or INTIDs of the GIC's shared peripheral
/// interrupts.
const fn numbers(arch: Arch) -> RangeInclusive<u32> {
    match arch {
        Arch::X86_64 => 0..=23,
        Arch::Arm64 => 32..=127,
    }
}

/// The addresses of x86 interrupt messages.
const MESSAGES: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// A message-signalled interrupt: a device's write of `data` to `address`.
///
/// On x86-64 the address has the destination in bits 19:12, the redirection hint in bit 3 and the
/// destination mode in bit 2. The data has the vector in bits 7:0, the delivery mode in bits 10:8
/// (fixed, lowest priority, or NMI without a vector) and the trigger mode in bit 15.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Msi {
    /// Where the device writes: 0xfee0_0000 to 0xfeef_ffff on x86-64.
    pub address: u64,
    /// What it writes.
    pub data: u32,
}

/// An input of an interrupt controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// An edge of the line with this number.
    Line(u32),
    /// A message.
    Msi(Msi),
}

/// Why a VM has no such interrupt.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterruptError {
    /// The interrupt controller has no such input.
    #[error("no interrupt line {line}: an {arch} guest has the lines {first} to {last}")]
    NoLine {
        /// The requested number.
        line: u32,
        /// The architecture of the guest.
        arch: Arch,
        /// The first line.
        first: u32,
        /// The last line.
        last: u32,
    },
    /// An eventfd shares its line with no handle and no other eventfd.
    #[error("interrupt line {0} is in use: an eventfd has its line alone")]
    InUse(u32),
    /// The VM has ended.
    #[error("the VM has ended")]
    Ended,
    /// No local APIC gets writes to this address.
    #[error("no interrupt message goes to {0:#x}: write it to 0xfee00000 to 0xfeefffff")]
    Address(u64),
    /// The interrupt controller takes no messages.
    #[error("the interrupt controller of an {0} guest takes no messages: use a line")]
    NoMessages(Arch),
    /// The hypervisor below refused.
    #[error("cannot {step}: {cause}")]
    Host {
        /// The refused step.
        step: &'static str,
        /// The message of the hypervisor.
        cause: String,
    },
}

impl InterruptError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoLine { .. }
            | Self::InUse(_)
            | Self::Ended
            | Self::Address(_)
            | Self::NoMessages(_) => ErrorKind::Request,
            Self::Host { .. } => ErrorKind::Host,
        }
    }
}

/// The users of a line.
#[derive(Default)]
struct Users {
    handles: u32,
    /// How many handles raise the line.
    raised: u32,
    has_eventfd: bool,
}

/// The users of each line of a VM. The lock is held while the controller gets the level, so the
/// controller's last level is the level of the last change.
pub struct InterruptLines {
    arch: Arch,
    users: Mutex<Box<[Users]>, lock_order::InterruptLines>,
}

impl InterruptLines {
    /// The lines of a new VM: all are low.
    pub fn new(arch: Arch) -> Self {
        Self {
            arch,
            users: Mutex::new(numbers(arch).map(|_| Users::default()).collect()),
        }
    }

    /// Reads or changes the users of an existing line.
    fn with<R>(&self, number: u32, change: impl FnOnce(&mut Users) -> R) -> R {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut users[(number - numbers(self.arch).start()) as usize])
    }
}

impl fmt::Debug for InterruptLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterruptLines")
            .field("arch", &self.arch)
            .finish_non_exhaustive()
    }
}

/// A backend's part of [`Interrupts`]: the inputs of a VM's interrupt controller. Any thread may
/// call it.
pub trait InterruptController: Send + Sync {
    /// The lines of the VM.
    fn interrupt_lines(&self) -> &InterruptLines;

    /// Sets the level of an existing line, which may have had the same level.
    fn set_line(&self, number: u32, level: bool);

    /// Sends a message to an address of interrupt messages. If no vCPU takes it, it is lost.
    ///
    /// # Errors
    /// [`InterruptError::NoMessages`], or the hypervisor below refuses.
    fn send_msi(&self, msi: Msi) -> Result<(), InterruptError>;

    /// Makes an eventfd whose writes go to `input`, which exists and, if it is a line, has no other
    /// user. [`Vm::save_shared`](crate::Vm::save_shared) saves the effects of all earlier writes.
    ///
    /// # Errors
    /// [`InterruptError::NoMessages`], or the host refuses.
    fn connect(&self, input: Input) -> Result<Arc<OwnedFd>, InterruptError>;

    /// Ends the effect of an eventfd from [`InterruptController::connect`].
    fn disconnect(&self, eventfd: &Arc<OwnedFd>);
}

/// The interrupts of a VM, for its devices: [`Vm::interrupts`](crate::Vm::interrupts).
#[derive(Clone)]
pub struct Interrupts {
    arch: Arch,
    vm: Weak<dyn InterruptController>,
}

impl Interrupts {
    pub(crate) fn of<V: InterruptController + 'static>(vm: &Arc<V>) -> Self {
        let arch = vm.interrupt_lines().arch;
        let vm = Arc::downgrade(vm) as Weak<dyn InterruptController>;
        Self { arch, vm }
    }

    /// A handle of the line `number`, which does not raise it yet. x86-64 guests have lines 0 to
    /// 23: the pins of the I/O APIC, which are the global system interrupts (GSI) of the same
    /// numbers. No timer and no PIC is connected, so every pin is free. AArch64 guests have lines
    /// 32 to 127: the INTIDs of shared peripheral interrupts.
    ///
    /// # Errors
    /// [`InterruptError::NoLine`], or an eventfd has the line.
    pub fn line(&self, number: u32) -> Result<Line, InterruptError> {
        self.check(Input::Line(number))?;
        if let Some(vm) = self.vm.upgrade() {
            vm.interrupt_lines().with(number, |line| {
                line.handles += u32::from(!line.has_eventfd);
                match line.has_eventfd {
                    true => Err(InterruptError::InUse(number)),
                    false => Ok(()),
                }
            })?;
        }
        Ok(Line {
            vm: Weak::clone(&self.vm),
            number,
            raised: AtomicBool::new(false),
        })
    }

    /// An eventfd for a device in another process (vhost-user) or in the kernel (VFIO): each write
    /// is one edge of a line, or sends a message. Writes in quick succession may be one interrupt.
    ///
    /// The eventfd has its line alone, because it leaves it low. There is no eventfd for the level
    /// of a line: program the line as edge-triggered, or use a message.
    ///
    /// A saved state has the interrupts of writes before the save. Stop the device before: a later
    /// write goes to this VM alone.
    ///
    /// # Errors
    /// As [`Interrupts::line`] and [`Interrupts::signal_msi`]; the line has handles; the VM has
    /// ended.
    pub fn eventfd(&self, input: Input) -> Result<EventFd, InterruptError> {
        self.check(input)?;
        let vm = self.vm.upgrade().ok_or(InterruptError::Ended)?;
        if let Input::Line(number) = input {
            vm.interrupt_lines().with(number, |line| {
                if line.handles > 0 || line.has_eventfd {
                    return Err(InterruptError::InUse(number));
                }
                line.has_eventfd = true;
                Ok(())
            })?;
        }
        let connected = vm.connect(input);
        if connected.is_err() {
            release(&*vm, input);
        }
        Ok(EventFd {
            vm: Weak::clone(&self.vm),
            input,
            fd: connected?,
        })
    }

    fn check(&self, input: Input) -> Result<(), InterruptError> {
        let lines = numbers(self.arch);
        match input {
            Input::Line(line) if !lines.contains(&line) => Err(InterruptError::NoLine {
                line,
                arch: self.arch,
                first: *lines.start(),
                last: *lines.end(),
            }),
            Input::Msi(Msi { address, .. })
                if self.arch == Arch::X86_64 && !MESSAGES.contains(&address) =>
            {
                Err(InterruptError::Address(address))
            }
            _ => Ok(()),
        }
    }

    /// Sends a message-signalled interrupt. If no vCPU takes it, or the VM has ended, it is lost.
    ///
    /// # Errors
    /// [`InterruptError::Address`], [`InterruptError::NoMessages`], or the hypervisor below
    /// refuses.
    pub fn signal_msi(&self, msi: Msi) -> Result<(), InterruptError> {
        self.check(Input::Msi(msi))?;
        self.vm.upgrade().map_or(Ok(()), |vm| vm.send_msi(msi))
    }
}

impl fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interrupts")
            .field("arch", &self.arch)
            .finish_non_exhaustive()
    }
}

/// A device's handle of an interrupt line. Any thread may use it, also a vCPU's thread inside
/// [`Device::write`](crate::Device::write).
///
/// A line is high while at least one of its handles raises it. A guest that has programmed the line
/// as edge-triggered gets an interrupt when the line becomes high, and none if it has masked the
/// line then. If the line is level-triggered, the guest gets an interrupt again and again while the
/// line is high.
///
/// A saved state has the level of the line, not the handles. After a restore the device calls
/// [`Line::raise`] or [`Line::lower`] once: either sets the level, whatever this handle did before.
pub struct Line {
    vm: Weak<dyn InterruptController>,
    number: u32,
    /// Whether this handle raises the line. Changed under the lock of [`InterruptLines`].
    raised: AtomicBool,
}

impl Line {
    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Makes the line high.
    pub fn raise(&self) {
        self.set(true);
    }

    /// Makes the line low, unless another handle raises it.
    pub fn lower(&self) {
        self.set(false);
    }

    /// [`Line::raise`], then [`Line::lower`]: one edge-triggered interrupt.
    pub fn pulse(&self) {
        self.raise();
        self.lower();
    }

    fn set(&self, raise: bool) {
        let Some(vm) = self.vm.upgrade() else {
            return;
        };
        vm.interrupt_lines().with(self.number, |line| {
            match (self.raised.swap(raise, Ordering::Relaxed), raise) {
                (false, true) => line.raised += 1,
                (true, false) => line.raised -= 1,
                _ => {}
            }
            vm.set_line(self.number, line.raised > 0);
        });
    }
}

impl Drop for Line {
    /// Ends this handle's part of the level.
    fn drop(&mut self) {
        if *self.raised.get_mut() {
            self.lower();
        }
        if let Some(vm) = self.vm.upgrade() {
            vm.interrupt_lines()
                .with(self.number, |line| line.handles -= 1);
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("number", &self.number)
            .field("raised", &self.raised)
            .finish_non_exhaustive()
    }
}

/// An eventfd from [`Interrupts::eventfd`]. A dropped one has no further effect, also if another
/// process still writes to it.
pub struct EventFd {
    vm: Weak<dyn InterruptController>,
    input: Input,
    fd: Arc<OwnedFd>,
}

/// Ends the use of a line by an eventfd.
fn release(vm: &dyn InterruptController, input: Input) {
    if let Input::Line(number) = input {
        vm.interrupt_lines()
            .with(number, |line| line.has_eventfd = false);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.upgrade() {
            vm.disconnect(&self.fd);
            release(&*vm, self.input);
        }
    }
}

impl fmt::Debug for EventFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventFd")
            .field("input", &self.input)
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Board(
        InterruptLines,
        Mutex<Vec<(u32, bool)>, lock_order::RunPause>,
    );

    impl Board {
        fn new(arch: Arch) -> Arc<Self> {
            Arc::new(Self(InterruptLines::new(arch), Mutex::new(Vec::new())))
        }

        fn taken(&self) -> Vec<(u32, bool)> {
            std::mem::take(&mut self.1.lock().unwrap())
        }
    }

    impl InterruptController for Board {
        fn interrupt_lines(&self) -> &InterruptLines {
            &self.0
        }

        fn set_line(&self, number: u32, level: bool) {
            self.1.lock().unwrap().push((number, level));
        }

        fn send_msi(&self, _: Msi) -> Result<(), InterruptError> {
            Ok(())
        }

        fn connect(&self, input: Input) -> Result<Arc<OwnedFd>, InterruptError> {
            match input {
                Input::Line(_) => Ok(Arc::new(std::fs::File::open("/dev/null").unwrap().into())),
                Input::Msi(_) => Err(InterruptError::NoMessages(self.0.arch)),
            }
        }

        fn disconnect(&self, _: &Arc<OwnedFd>) {}
    }

    #[test]
    fn a_line_is_the_or_of_its_handles() {
        let board = Board::new(Arch::X86_64);
        let interrupts = Interrupts::of(&board);
        let (one, two) = (interrupts.line(5).unwrap(), interrupts.line(5).unwrap());
        one.raise();
        two.raise();
        one.lower();
        one.lower();
        assert_eq!(board.taken(), [(5, true); 4]);
        drop(two);
        one.pulse();
        assert_eq!(board.taken(), [(5, false), (5, true), (5, false)]);
        drop(one);
        assert_eq!(board.taken(), [], "it did not raise the line");
    }

    #[test]
    fn a_handle_outlives_its_vm() {
        let board = Board::new(Arch::Arm64);
        let interrupts = Interrupts::of(&board);
        let line = interrupts.line(127).unwrap();
        line.raise();
        assert_eq!(Arc::strong_count(&board), 1);
        drop(board);
        line.lower();
        let msi = Msi {
            address: 0,
            data: 0,
        };
        assert_eq!(interrupts.signal_msi(msi), Ok(()));
    }

    #[test]
    fn lines_and_addresses_that_do_not_exist_are_refused() {
        let interrupts = Interrupts::of(&Board::new(Arch::X86_64));
        let refused = interrupts.line(24).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "no interrupt line 24: an x86-64 guest has the lines 0 to 23"
        );
        for address in [0xfedf_ffff, 0xfef0_0000, 0x1_fee0_0000] {
            let msi = Msi {
                address,
                data: 0x40,
            };
            assert_eq!(
                interrupts.signal_msi(msi),
                Err(InterruptError::Address(address))
            );
        }
        let interrupts = Interrupts::of(&Board::new(Arch::Arm64));
        assert!(interrupts.line(31).is_err());
    }

    #[test]
    fn an_eventfd_has_its_line_alone() {
        let board = Board::new(Arch::X86_64);
        let interrupts = Interrupts::of(&board);
        let in_use = Some(InterruptError::InUse(5));
        let handle = interrupts.line(5).unwrap();
        assert_eq!(interrupts.eventfd(Input::Line(5)).err(), in_use);
        drop(handle);
        let eventfd = interrupts.eventfd(Input::Line(5)).unwrap();
        assert_eq!(interrupts.line(5).err(), in_use);
        assert_eq!(interrupts.eventfd(Input::Line(5)).err(), in_use);
        drop(eventfd);
        let _handle = interrupts.line(5).unwrap();
        drop(board);
        let ended = interrupts.eventfd(Input::Line(5)).err();
        assert_eq!(ended, Some(InterruptError::Ended));
    }
}
