//! Accepts VMs, and serves each on a thread of its own.

use crate::config::Config;
use crate::filler::Filler;
use crate::handshake::{Handshake, HandshakeError};
use crate::image::Image;
use crate::peer_process::PeerProcess;
use crate::regions::Regions;
use crate::served::Served;
use crate::service::serve;
use crate::state::{TakenVm, VmRecord, VmState, path_of, start_time, userfaultfd_inode};
use crate::stats::{PagerCounts, PagerStats, VmStats};
use crate::units::Units;
use crate::vm::Vm;
use lacuna_sync::{Mutex, join, lock, lock_order};
use lacuna_sys::Userfaultfd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
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
    taken_back: AtomicU64,
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
            taken_back: AtomicU64::new(0),
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
    /// With [`Config::state`], it first takes back the VMs that an earlier pager has accepted at a
    /// socket with this path. It reports those that it cannot take back. They wait.
    ///
    /// # Errors
    /// No thread is left; or there is a state folder, and `listener` has no path.
    pub fn serve(&self, listener: UnixListener, image: Image) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let shared = Arc::clone(&self.shared);
        let path = match &shared.config.state {
            Some(_) => path_of(&listener)?,
            None => PathBuf::new(),
        };
        let report = Arc::clone(&shared.config.report);
        let image = Arc::new(Served::new(image, path, report));
        shared.take_back(&image);
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
            taken_back: self.shared.taken_back.load(Ordering::Relaxed),
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
        let (image, name) = (Arc::clone(image), process.to_string());
        let started = self.on_a_thread(move |shared, connection| {
            let name = process.to_string();
            let served = shared.handle(&socket, process, (&image, connection));
            if let Err(refusal) = served {
                shared.refuse(&name, &refusal.to_string());
            }
        });
        if let Err(reason) = started {
            self.refuse(&name, &reason);
        }
    }

    /// Calls `serve` on a thread for one VM. The error is for the user.
    fn on_a_thread(
        self: &Arc<Self>,
        serve: impl FnOnce(&Self, &CountedConnection) + Send + 'static,
    ) -> Result<(), String> {
        let (shared, connection) = (Arc::clone(self), CountedConnection::new(self));
        let named = std::thread::Builder::new().name("lacuna-pager-vm".into());
        let started = named.spawn(move || serve(&shared, &connection));
        let failed = |error| format!("there is no thread for it ({error}): raise `ulimit -u`");
        started.map(drop).map_err(failed)
    }

    /// Takes back the VMs that an earlier pager has accepted at the same socket.
    fn take_back(self: &Arc<Self>, served: &Arc<Served>) {
        let Some(folder) = &self.config.state else {
            return;
        };
        let serve = |taken: TakenVm, record: &VmRecord, state: VmState| {
            let TakenVm {
                uffd,
                socket,
                process,
            } = taken;
            let image = &served.image;
            let refused = |error: HandshakeError| error.to_string();
            process.check(&image.users).map_err(refused)?;
            if record.memory != image.source.memory_id().to_string() {
                let source = image.source.describe();
                return Err(format!(
                    "its pages are not those of {source}: start the pager with the source that \
                     the VM had, and serve this one at another socket"
                ));
            }
            let regions = Regions::new(&record.regions, image.pages).map_err(refused)?;
            if state.units().len() as u64 != regions.units() {
                return Err("its file is damaged: end the VM, and remove the file".into());
            }
            let uffd = Arc::new(uffd);
            let memory = (regions, Arc::clone(&uffd));
            let report = Arc::clone(&self.config.report);
            // The VMM's mapping keeps the dead pager's file: shared units are mapped again from it.
            // This pager cannot fill that file, so other pages are copies.
            let vm = Vm::new(memory, Units::new(state), process, (image, None), report);
            let vm = Arc::new(vm.map_err(|errno| errno.to_string())?);
            vm.take_over();
            let served = Arc::clone(served);
            self.on_a_thread(move |shared, connection| {
                let _share = served.quota.add(vm.bytes());
                shared.serve((&vm, &uffd), &served, (socket.as_ref(), connection));
            })?;
            self.taken_back.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        folder.take_back(&served.path, serve, |text| self.report(text));
    }

    fn report(&self, text: &str) {
        tracing::warn!(target: "lacuna::pager", "{text}");
        (self.config.report)(text);
    }

    fn refuse(&self, name: &str, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.report(&format!("refused the VM of {name}: {reason}"));
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
        let (regions, uffd) = (message.regions, Arc::new(message.uffd));
        let _share = served.quota.share(image, regions.bytes())?;
        let state = match &self.config.state {
            None => VmState::anonymous(regions.units())?,
            Some(folder) => {
                let record = VmRecord {
                    socket: served.path.clone(),
                    user: process.user(),
                    pid: process.pid(),
                    started: process.pid().and_then(start_time),
                    memory: image.source.memory_id().to_string(),
                    userfaultfd: userfaultfd_inode(&uffd)?,
                    regions: message.announced,
                };
                folder.create(&record, regions.units(), (&uffd, socket))?
            }
        };
        let memory = (regions, Arc::clone(&uffd));
        let name = state.name().map(str::to_owned);
        let from = (image, message.shared);
        let report = Arc::clone(&self.config.report);
        let vm = Vm::new(memory, Units::new(state), process, from, report);
        let vm = vm.inspect_err(|_| self.forget(name.as_deref()))?;
        self.serve((&Arc::new(vm), &uffd), served, (Some(socket), connection));
        Ok(())
    }

    /// The next pager finds nothing of the VM with the file `name`.
    fn forget(&self, name: Option<&str>) {
        if let (Some(folder), Some(name)) = (&self.config.state, name) {
            folder.remove(name);
        }
    }

    /// Serves `vm` until it ends.
    fn serve(
        &self,
        (vm, uffd): (&Arc<Vm>, &Userfaultfd),
        served: &Arc<Served>,
        (socket, connection): (Option<&UnixStream>, &CountedConnection),
    ) {
        let (number, pid) = (self.add(vm), vm.pid());
        connection.has_its_message();
        let bytes = vm.bytes();
        tracing::info!(target: "lacuna::pager", number, pid, bytes, "serves a VM");
        let filler = Filler::start(vm, served).unwrap_or_else(|error| {
            vm.say_no_filler(&error);
            None
        });
        let cold = self.config.cold_after.map(|after| vm.watch(after));
        let end = match (socket, vm.process().pidfd()) {
            (Some(socket), _) => (socket.as_fd(), PollFlags::RDHUP),
            (None, Some(pidfd)) => (pidfd, PollFlags::IN),
            // The bell has no such event: the kernel's answer to a placement ends the VM.
            (None, None) => (vm.bell(), PollFlags::empty()),
        };
        serve(vm, (uffd, end), cold);
        drop(filler);
        vm.end();
        self.forget(vm.state().name());
        if let Some(record) = served.image.record.as_ref().filter(|_| vm.is_recorded()) {
            let saved = record.save();
            saved.unwrap_or_else(|error| (self.config.report)(&error.to_string()));
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
