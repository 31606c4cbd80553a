//! The console device (virtio 1.2, 5.3) with one port.

use crate::device::{Answer, VirtioDevice};
use crate::guest::{Fault, Guest};
use crate::mmio::Mmio;
use crate::queue::Chain;
use lacuna_machine::StateError;
use lacuna_sync::{Mutex, lock, lock_order};
use std::collections::VecDeque;
use std::fmt;
use std::io::Write;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

/// The queue with the driver's buffers for input. The other one has its output.
const RECEIVE: usize = 0;
/// The most output of one request.
const OUTPUT_MAX: u64 = 1 << 20;
/// Output moves by so many bytes.
const STEP: usize = 4096;

/// A console: the guest's output goes to a writer, and [`Mmio::input`] is its input.
pub struct Console {
    /// `None` while the worker writes: no lock is held then.
    output: Mutex<Option<Box<dyn Write + Send>>, lock_order::VirtioOutput>,
    input: Mutex<VecDeque<u8>, lock_order::VirtioInput>,
}

impl Console {
    /// The most bytes of input that wait for the driver's buffers.
    pub const INPUT_MAX: usize = 64 << 10;

    /// A console whose output goes to `output`. While a call of it blocks, the guest's further
    /// output waits, and so does a pause or reset of the device. Output that `output` refuses is
    /// lost.
    pub fn new(output: impl Write + Send + 'static) -> Self {
        Self {
            output: Mutex::new(Some(Box::new(output))),
            input: Mutex::default(),
        }
    }

    fn receive(&self, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let wanted = chain.writable.bytes().min(Self::INPUT_MAX as u64) as usize;
        if wanted == 0 {
            return Err(Fault::Driver("a request for console input has no buffer"));
        }
        let next: Vec<u8> = lock(&self.input).iter().take(wanted).copied().collect();
        if next.is_empty() {
            return Ok(Answer::Later);
        }
        chain.writable.write(guest, 0, &next)?;
        // Only the worker removes bytes.
        lock(&self.input).drain(..next.len());
        Ok(Answer::Used(next.len() as u32))
    }

    fn transmit(&self, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        let Some(mut output) = lock(&self.output).take() else {
            // The writer panicked.
            return Ok(Answer::Used(0));
        };
        let sent = transmit(&mut output, chain, guest);
        *lock(&self.output) = Some(output);
        sent.map(|()| Answer::Used(0))
    }
}

fn transmit(output: &mut dyn Write, chain: &Chain, guest: &Guest<'_>) -> Result<(), Fault> {
    let mut buffer = [0; STEP];
    let bytes = chain.readable.bytes();
    if bytes > OUTPUT_MAX {
        return Err(Fault::Driver(
            "a request has more than 1 MiB of console output",
        ));
    }
    for from in (0..bytes).step_by(STEP) {
        let part = &mut buffer[..(bytes - from).min(STEP as u64) as usize];
        chain.readable.read(guest, from, part)?;
        // A reader that has gone must not stop the guest.
        let _ = output.write_all(part);
    }
    let _ = output.flush();
    Ok(())
}

impl VirtioDevice for Console {
    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn queues(&self) -> usize {
        2
    }

    fn handle(&self, queue: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        match queue {
            RECEIVE => self.receive(chain, guest),
            _ => self.transmit(chain, guest),
        }
    }

    /// The input that waits.
    fn save(&self) -> Vec<u8> {
        lock(&self.input).iter().copied().collect()
    }

    fn restore(&self, state: &[u8]) -> Result<(), StateError> {
        if state.len() > Self::INPUT_MAX {
            return Err(StateError::Invalid {
                field: "virtio.own",
                value: state.len() as u64,
            });
        }
        *lock(&self.input) = state.to_vec().into();
        Ok(())
    }
}

impl Mmio<Console> {
    /// Gives the guest input. Returns how many bytes were taken: fewer than given if
    /// [`Console::INPUT_MAX`] bytes wait for the driver. Does not wait.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut input = lock(&self.device().input);
        let taken = bytes.len().min(Console::INPUT_MAX - input.len());
        input.extend(&bytes[..taken]);
        drop(input);
        let mut control = self.shared.lock();
        self.shared.notify(&mut control, 1 << RECEIVE);
        taken
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}
