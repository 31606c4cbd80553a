//! Accepts VMs, and serves each on a thread of its own.

use crate::config::Config;
use crate::filler::Filler;
use crate::handshake::{Handshake, HandshakeError};
use crate::image::Image;
use crate::peer_process::PeerProcess;
use crate::served::Served;
use crate::service::serve;
use crate::stats::{PagerCounts, PagerStats, VmStats};
use crate::vm::Vm;
use lacuna_sync::{Mutex, join, lock, lock_order};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The most connections whose message has not been handled. Later ones wait in the socket's queue.
const HANDSHAKES: u64 = 64;
/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(10);

/// Serves VMs. Dropping it ends the acceptance of VMs. The served ones are served until they end,
/// on threads of their own, because nothing but their end makes it safe to close their
/// userfaultfds.
pub struct Pager {
    shared: Arc<PagerShared>,
    /// One for each socket.
    threads: Mutex<Vec<JoinHandle<()>>, lock_order::PagerThread>,
}

struct PagerShared {
    config: Config,
    /// Wakes the accepting threads at the end.
    bell: OwnedFd,
    stop: AtomicBool,
    accepted: AtomicU64,
    refused: AtomicU64,
    /// Accepted connections that are neither refused nor ended.
    connections: AtomicU64,
    /// Those of them whose message has not been handled.
    handshakes: AtomicU64,
    vms: Mutex<Vms, lock_order::PagerVms>,
}

#[derive(Default)]
struct Vms {
    next: u64,
    all: BTreeMap<u64, Arc<Vm>>,
    /// The counters of the ended VMs.
    ended: PagerCounts,
}

impl Pager {
    /// A pager without a socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(config: Config) -> io::Result<Self> {
        let shared = Arc::new(PagerShared {
            config,
            bell: eventfd(0, EventfdFlags::CLOEXEC)?,
            stop: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            handshakes: AtomicU64::new(0),
            vms: Mutex::default(),
        });
        Ok(Self {
            shared,
            threads: Mutex::default(),
        })
    }

    /// Serves each VM that connects to `listener` with `image`. A handshake does not say which
    /// image a VM needs, so each image has a socket of its own.
    ///
    /// # Errors
    /// No thread is left.
    pub fn serve(&self, listener: UnixListener, image: Image) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let shared = Arc::clone(&self.shared);
        let served = Served::new(image, Arc::clone(&shared.config.report));
        let image = Arc::new(served);
        let named = std::thread::Builder::new().name("lacuna-pager".into());
        let thread = named.spawn(move || shared.accept(&listener, &image))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// Accepts no VM any more, and closes the sockets. Waits until that is so: afterwards
    /// [`Pager::connections`] only falls. A later [`Pager::serve`] accepts none.
    pub fn stop_accepting(&self) {
        self.shared.stop.store(true, Ordering::Release);
        // It fails only if the counter is full: then the threads wake up anyway.
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.into_iter().for_each(join);
    }

    /// VMs that need this pager: the served ones, and accepted ones whose message has not been
    /// handled.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Acquire)
    }

    /// Its counters now.
    pub fn stats(&self) -> PagerStats {
        let vms = lock(&self.shared.vms);
        let mut counts = vms.ended;
        let all: Vec<_> = vms.all.values().cloned().collect();
        drop(vms);
        all.iter().for_each(|vm| counts.merge(&vm.counts()));
        PagerStats {
            vms: all.len() as u64,
            accepted: self.shared.accepted.load(Ordering::Relaxed),
            refused: self.shared.refused.load(Ordering::Relaxed),
            counts,
        }
    }

    /// The VMs served now, in the order of their connections.
    pub fn vms(&self) -> Vec<VmStats> {
        let all = lock(&self.shared.vms).all.clone();
        all.iter().map(|(number, vm)| vm.stats(*number)).collect()
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

impl PagerShared {
    fn accept(self: &Arc<Self>, listener: &UnixListener, image: &Arc<Served>) {
        while !self.stop.load(Ordering::Acquire) {
            let mut fds = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            // After an interruption the loop continues, as without a connection.
            let _ = poll(&mut fds, None);
            if self.handshakes.load(Ordering::Acquire) >= HANDSHAKES {
                std::thread::sleep(PAUSE);
                continue;
            }
            match listener.accept() {
                Ok((socket, _)) => self.start(socket, image),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No descriptor is left: another one may be closed meanwhile.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn start(self: &Arc<Self>, socket: UnixStream, image: &Arc<Served>) {
        let process = match PeerProcess::of(&socket) {
            Ok(process) => process,
            Err(errno) => {
                return self.refuse("a process", &HandshakeError::from(errno).to_string());
            }
        };
        let (shared, image, name) = (Arc::clone(self), Arc::clone(image), process.to_string());
        let connection = CountedConnection::new(self);
        let named = std::thread::Builder::new().name("lacuna-pager-vm".into());
        let started = named.spawn(move || {
            let name = process.to_string();
            if let Err(refusal) = shared.handle(&socket, process, (&image, &connection)) {
                shared.refuse(&name, &refusal.to_string());
            }
        });
        if let Err(error) = started {
            let reason = format!("there is no thread for it ({error}): raise `ulimit -u`");
            self.refuse(&name, &reason);
        }
    }

    fn refuse(&self, name: &str, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let text = format!("refused the VM of {name}: {reason}");
        tracing::warn!(target: "lacuna::pager", "{text}");
        (self.config.report)(&text);
    }

    /// Serves the VM behind `socket` until it ends.
    fn handle(
        &self,
        socket: &UnixStream,
        process: PeerProcess,
        (served, connection): (&Arc<Served>, &CountedConnection),
    ) -> Result<(), HandshakeError> {
        let image = &served.image;
        process.check(&image.users)?;
        let message = Handshake::receive(socket, served, self.config.patience)?;
        let _share = served.quota.share(image, message.regions.bytes())?;
        let uffd = Arc::new(message.uffd);
        let memory = (message.regions, Arc::clone(&uffd));
        let report = Arc::clone(&self.config.report);
        let from = (image, message.shared);
        let vm = Arc::new(Vm::new(memory, process, from, report)?);
        let (number, pid) = (self.add(&vm), vm.pid());
        connection.has_its_message();
        let bytes = vm.bytes();
        tracing::info!(target: "lacuna::pager", number, pid, bytes, "serves a VM");
        let filler = Filler::start(&vm, served).unwrap_or_else(|error| {
            vm.say_no_filler(&error);
            None
        });
        let cold = self.config.cold_after.map(|after| vm.watch(after));
        serve(&vm, (&uffd, socket), cold);
        drop(filler);
        vm.end();
        if let Some(record) = image.record.as_ref().filter(|_| vm.is_recorded()) {
            record
                .save()
                .unwrap_or_else(|error| (self.config.report)(&error.to_string()));
        }
        let counts = vm.counts();
        self.remove(number, &counts);
        let PagerCounts {
            faults,
            placed,
            zeros,
            lost,
            ..
        } = counts;
        tracing::info!(
            target: "lacuna::pager", number, pid, faults, placed, zeros, lost, "the VM has ended"
        );
        Ok(())
    }

    fn add(&self, vm: &Arc<Vm>) -> u64 {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let mut vms = lock(&self.vms);
        let number = vms.next;
        vms.next += 1;
        vms.all.insert(number, Arc::clone(vm));
        number
    }

    fn remove(&self, number: u64, counts: &PagerCounts) {
        let mut vms = lock(&self.vms);
        vms.ended.merge(counts);
        let ended = vms.all.remove(&number);
        drop(vms);
        drop(ended);
    }
}

/// An accepted connection, as long as it needs the pager.
struct CountedConnection {
    shared: Arc<PagerShared>,
    is_in_handshake: AtomicBool,
}

impl CountedConnection {
    fn new(shared: &Arc<PagerShared>) -> Self {
        shared.connections.fetch_add(1, Ordering::AcqRel);
        shared.handshakes.fetch_add(1, Ordering::AcqRel);
        Self {
            shared: Arc::clone(shared),
            is_in_handshake: AtomicBool::new(true),
        }
    }

    fn has_its_message(&self) {
        if self.is_in_handshake.swap(false, Ordering::AcqRel) {
            self.shared.handshakes.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.has_its_message();
        self.shared.connections.fetch_sub(1, Ordering::AcqRel);
    }
}
