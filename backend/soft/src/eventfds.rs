//! A VM's interrupt controller, and eventfds as its inputs.
//!
//! ```text
//! write (any process) -> eventfd <- poll: the VM's thread -+-> Watched::deliver: under one lock,
//!                                     save_shared ---------'   reads each eventfd, interrupts
//! ```
//! One thread watches all eventfds of a VM: a write cannot enter this process by itself. It starts
//! with the first of them and ends with the VM.

#[cfg(feature = "arm64")]
use lacuna_arm64::gic;
use lacuna_machine::{Input, InterruptError};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{ReadWriteFlags, preadv2, write};
use std::fmt;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// The interrupt controller of a VM. It does not keep the VM.
#[derive(Clone)]
pub(crate) enum Controller {
    X86(Arc<lacuna_x86::ApicBus>),
    #[cfg(feature = "arm64")]
    Arm64(Arc<lacuna_arm64::Fabric>),
}

impl Controller {
    pub(crate) fn set_line(&self, number: u32, level: bool) {
        match self {
            Self::X86(bus) => bus.set_pin(number as usize, level),
            #[cfg(feature = "arm64")]
            Self::Arm64(fabric) => {
                let line = if level {
                    gic::Line::High
                } else {
                    gic::Line::Low
                };
                fabric.gic.set_spi(number, line);
            }
        }
    }

    /// One interrupt. A GIC gets no messages.
    pub(crate) fn signal(&self, input: Input) {
        match (input, self) {
            (Input::Line(number), _) => [true, false]
                .into_iter()
                .for_each(|level| self.set_line(number, level)),
            (Input::Msi(msi), Self::X86(bus)) => bus.signal_msi(msi.address as u32, msi.data),
            #[cfg(feature = "arm64")]
            (Input::Msi(_), Self::Arm64(_)) => {}
        }
    }
}

/// The eventfds of one VM.
#[derive(Default)]
pub(crate) struct EventFds(Arc<Mutex<Watched, lock_order::EventFds>>);

#[derive(Default)]
struct Watched {
    eventfds: Vec<(Arc<OwnedFd>, Input)>,
    thread: Option<Watcher>,
    is_over: bool,
}

struct Watcher {
    controller: Controller,
    /// Ends a poll.
    bell: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

fn host<E: fmt::Display>(step: &'static str) -> impl Fn(E) -> InterruptError {
    move |error| InterruptError::Host {
        step,
        cause: error.to_string(),
    }
}

fn make() -> Result<Arc<OwnedFd>, InterruptError> {
    let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    made.map(Arc::new).map_err(host("make an eventfd"))
}

fn ring(bell: &OwnedFd) {
    let rung = write(bell, &1_u64.to_ne_bytes());
    debug_assert!(rung.is_ok(), "an eventfd is never full of ones");
}

/// Whether there was a write since the last call. The descriptor's flags are shared with the
/// process that writes, which may have made it a blocking one.
fn take(eventfd: &OwnedFd) -> bool {
    let mut count = [0; 8];
    let count = &mut [IoSliceMut::new(&mut count)];
    preadv2(eventfd, count, u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
}

impl Watched {
    /// Interrupts for each eventfd with a write. The lock is held, so after it no interrupt is on
    /// its way between an eventfd and the controller.
    fn deliver(&self, controller: &Controller) {
        for (eventfd, input) in &self.eventfds {
            if take(eventfd) {
                controller.signal(*input);
            }
        }
    }
}

impl EventFds {
    /// Makes an eventfd for `input`.
    pub(crate) fn connect(
        &self,
        controller: impl FnOnce() -> Controller,
        input: Input,
    ) -> Result<Arc<OwnedFd>, InterruptError> {
        let made = make()?;
        let mut watched = self.lock();
        let bell = match &watched.thread {
            Some(watcher) => Arc::clone(&watcher.bell),
            None => self.start(&mut watched, controller())?,
        };
        watched.eventfds.push((Arc::clone(&made), input));
        ring(&bell);
        Ok(made)
    }

    fn start(
        &self,
        watched: &mut Watched,
        controller: Controller,
    ) -> Result<Arc<OwnedFd>, InterruptError> {
        let bell = make()?;
        let (all, rings, its) = (Self(self.0.clone()), bell.clone(), controller.clone());
        let named = thread::Builder::new().name("lacuna-eventfds".into());
        let thread = named.spawn(move || all.watch(&rings, &its));
        watched.thread = Some(Watcher {
            controller,
            bell: Arc::clone(&bell),
            thread: thread.map_err(host("start a thread for eventfds"))?,
        });
        Ok(bell)
    }

    /// Ends the effect of an eventfd.
    pub(crate) fn disconnect(&self, gone: &Arc<OwnedFd>) {
        let mut watched = self.lock();
        watched.eventfds.retain(|(it, _)| !Arc::ptr_eq(it, gone));
    }

    /// Interrupts for all writes before the call.
    pub(crate) fn settle(&self) {
        let watched = self.lock();
        if let Some(watcher) = &watched.thread {
            watched.deliver(&watcher.controller);
        }
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        let mut watched = self.lock();
        watched.is_over = true;
        let watcher = watched.thread.take();
        drop(watched);
        if let Some(watcher) = watcher {
            ring(&watcher.bell);
            watcher.thread.join().expect("no panic in this thread");
        }
    }

    fn watch(&self, bell: &OwnedFd, controller: &Controller) {
        loop {
            let watched = self.lock();
            if watched.is_over {
                return;
            }
            let eventfds = watched.eventfds.clone();
            drop(watched);
            let eventfds = eventfds.iter().map(|(eventfd, _)| &**eventfd);
            let all = std::iter::once(bell).chain(eventfds);
            let mut all: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            // A failure is a signal, or the host is short of memory: the next poll is the remedy.
            let _ = poll(&mut all, None);
            take(bell);
            self.lock().deliver(controller);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().expect("no panic under this lock")
    }
}
