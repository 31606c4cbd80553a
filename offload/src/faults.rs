//! The pages of a restored VM that arrive after its state: by its faults, and in the background.

use crate::connection::Connection;
use crate::error::OffloadError;
use crate::fetch::{Content, fetch};
use crate::frame::{Command, FrameError, MemoryRange, Phase, RANGE_BYTES, Request};
use crate::memory::GuestMemory;
use crate::settings::Settings;
use crate::slots::Slots;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::PageSource;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The largest range of a fault: the largest page of a processor, and Cloud Hypervisor's own limit.
const FAULT_MAX: u64 = 1 << 30;
/// The longest sleep of the filling thread, so that it ends soon after the VM.
const SLEEP: Duration = Duration::from_millis(50);

/// The pages of a running VM.
pub struct Pages<'a> {
    /// Its slots.
    pub slots: &'a Slots,
    /// Its memory files; `None`: the VMM takes the content of pages in responses.
    pub memory: Option<&'a GuestMemory>,
    /// For messages.
    pub settings: &'a Settings,
    /// Answered faults.
    pub faults: AtomicU64,
    /// The VMM needs no page any more.
    pub is_over: AtomicBool,
}

impl Pages<'_> {
    /// Answers the VMM's faults on `connection` from `source`, until the VMM closes it.
    ///
    /// # Errors
    /// The VMM breaks the protocol.
    pub fn serve(
        &self,
        connection: &Connection,
        source: &dyn PageSource,
    ) -> Result<(), OffloadError> {
        let served = self.serve_frames(connection, source);
        if served.is_err() {
            // The VMM may read no more.
            let _ = connection.respond(false, 0);
        }
        connection.close();
        self.is_over.store(true, Ordering::Release);
        served
    }

    fn serve_frames(
        &self,
        connection: &Connection,
        source: &dyn PageSource,
    ) -> Result<(), OffloadError> {
        while let Some(frame) = connection.frame()? {
            let command = Request::parse(&frame)?.command;
            match command {
                Command::PageFault => {}
                Command::Abandon => return connection.respond(true, 0),
                _ => {
                    let when = Phase::Ended;
                    return Err(FrameError::Order { command, when }.into());
                }
            }
            let mut bytes = [0; RANGE_BYTES];
            connection.exact(&mut bytes, "in the middle of PageFault")?;
            match self.provide(MemoryRange::parse(&bytes), source) {
                Ok(content) => {
                    connection.respond(true, content.len() as u64)?;
                    connection.send(&content)?;
                    self.faults.fetch_add(1, Ordering::Relaxed);
                }
                // The VMM decides what becomes of its guest, which gets no zeros instead.
                Err(reason) => {
                    self.settings
                        .say(&format!("a fault of the VM fails: {reason}"));
                    connection.respond(false, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Puts `range` in place, or returns its content if the VM has no memory files.
    fn provide(&self, range: MemoryRange, source: &dyn PageSource) -> Result<Vec<u8>, String> {
        let offset = self.slots.locate(range)?;
        if range.length > FAULT_MAX {
            return Err(format!("it wants {} bytes at once", range.length));
        }
        let first = offset / PAGE_SIZE as u64;
        let pages = first..first + range.length / PAGE_SIZE as u64;
        let Some(memory) = self.memory else {
            let mut content = vec![0; range.length as usize];
            let (all, _) = content.as_chunks_mut::<PAGE_SIZE>();
            fetch(source, pages, |page, arrived| {
                all[(page - first) as usize] = *of_source(page, arrived)?;
                Ok::<_, String>(())
            })?;
            return Ok(content);
        };
        let full = |error: io::Error| format!("the host has no memory for its page: {error}");
        let mut missing = Vec::new();
        for page in pages {
            match memory.is_missing(page) {
                true => missing.push(page),
                false => memory.place_removed(page).map_err(full)?,
            }
        }
        fetch(source, missing.into_iter(), |page, arrived| {
            let content = of_source(page, arrived)?;
            memory.place(page, &content).map_err(full)
        })?;
        Ok(Vec::new())
    }

    /// Puts the missing pages in place, in their order and at most `rate` bytes a second, until all
    /// are there or the VMM needs none. A lost page is left: a fault tries it again.
    pub fn fill(&self, memory: &GuestMemory, source: &dyn PageSource, rate: Option<u64>) {
        let is_over = || self.is_over.load(Ordering::Acquire);
        let began = Instant::now();
        let (mut came, mut is_said) = (0u64, false);
        let pages = (0..memory.pages()).filter(|page| memory.is_missing(*page));
        let filled = fetch(source, pages, |page, arrived| {
            let placed = match of_source(page, arrived) {
                Ok(content) => memory
                    .place(page, &content)
                    .map_err(|error| error.to_string()),
                Err(reason) => Err(reason),
            };
            if let Err(reason) = placed
                && !std::mem::replace(&mut is_said, true)
            {
                let text = format!("a page is not filled in the background: {reason}");
                self.settings.say(&text);
            }
            came += PAGE_SIZE as u64;
            let due = rate.map_or(Duration::ZERO, |rate| {
                Duration::from_secs_f64(came as f64 / rate as f64)
            });
            while let Some(left) = due.checked_sub(began.elapsed())
                && !is_over()
            {
                std::thread::sleep(left.min(SLEEP));
            }
            if is_over() { Err(()) } else { Ok(()) }
        });
        if filled.is_ok() && memory.in_place() == memory.pages() {
            tracing::info!(target: "lacuna::offload", "all of the VM's memory is in place");
        }
    }
}

fn of_source(page: u64, arrived: Content) -> Result<Box<[u8; PAGE_SIZE]>, String> {
    arrived.map_err(|reason| format!("page {page} is lost: {reason}"))
}
