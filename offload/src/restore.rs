//! The restore daemon: the sender of a migration, which takes the VM from a snapshot.

use crate::connection::{Connection, LOOK};
use crate::error::OffloadError;
use crate::faults::Pages;
use crate::fetch::fetch;
use crate::frame::{Command, ROLE_FAULT};
use crate::memory::{GuestMemory, HUGE_PAGES, check_page_size};
use crate::settings::Settings;
use crate::snapshot::{CONFIG, STATE, Snapshot};
use crate::sparse::CHUNK;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::PageSource;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// When a VM's memory is put in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Before the VM resumes.
    Before,
    /// When the VM needs it, and in the background.
    OnDemand {
        /// The most bytes a second in the background. `None`: no limit; 0: none.
        fill: Option<u64>,
    },
}

/// The page sources of a restore.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// Answers faults.
    pub faults: &'a dyn PageSource,
    /// Fills memory that no fault needs. It is another handle than `faults`, so that no fault waits
    /// behind its requests.
    pub fill: &'a dyn PageSource,
}

/// A restored VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Pages of its memory.
    pub pages: u64,
    /// Pages that were put in place. Pages in responses are not counted, nor are zeros that are in
    /// place before the VM resumes.
    pub in_place: u64,
    /// Answered faults.
    pub faults: u64,
    /// Whether it runs.
    pub is_running: bool,
}

/// Restores `snapshot` in the VMM that listens at `socket` for a migration. The VM runs afterwards
/// if it ran when it was saved. With [`When::OnDemand`] this returns when the VMM needs no page any
/// more, and a wish to end ([`Settings::stop`]) waits for that too.
///
/// # Errors
/// A page is lost before the VM resumes; the VMM breaks the protocol, refuses the VM or ends.
pub fn restore(
    snapshot: &Snapshot,
    socket: &Path,
    sources: Sources<'_>,
    when: When,
    settings: &Settings,
) -> Result<Restored, OffloadError> {
    // A VMM takes memory files for memory of any kind. But it registers memory of its own kind for
    // faults, so a VM whose memory was not shared gets its late pages in responses.
    let memory = match snapshot.manifest.has_memory_files || when == When::Before {
        true => Some(GuestMemory::new(snapshot.slots())?),
        false => None,
    };
    let all = &settings.progress.all;
    all.store(snapshot.slots().bytes(), Ordering::Relaxed);
    let pages = Pages {
        slots: snapshot.slots(),
        memory: memory.as_ref(),
        settings,
        faults: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    };
    let sender = Sender {
        snapshot,
        socket,
        sources,
        settings,
        pages: &pages,
    };
    match when {
        When::Before => sender.before()?,
        When::OnDemand { fill } => sender.on_demand(fill)?,
    }
    Ok(Restored {
        pages: snapshot.slots().bytes() / PAGE_SIZE as u64,
        in_place: memory.as_ref().map_or(0, GuestMemory::in_place),
        faults: pages.faults.load(Ordering::Relaxed),
        is_running: snapshot.manifest.was_running,
    })
}

/// One migration.
struct Sender<'a> {
    snapshot: &'a Snapshot,
    socket: &'a Path,
    sources: Sources<'a>,
    settings: &'a Settings,
    pages: &'a Pages<'a>,
}

impl Sender<'_> {
    /// The memory first. The daemon connects to the VMM when no page can be lost any more.
    fn before(&self) -> Result<(), OffloadError> {
        if let Some(memory) = self.pages.memory {
            self.fill_before(memory)?;
        }
        self.finish(self.begin()?)
    }

    fn fill_before(&self, memory: &GuestMemory) -> Result<(), OffloadError> {
        fetch(self.sources.fill, 0..memory.pages(), |page, arrived| {
            let content = self.content(page, arrived)?;
            let done = &self.settings.progress.done;
            done.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
            // The guest reads zeros from a hole, and a page of zeros costs the host memory.
            match *content == [0; PAGE_SIZE] {
                true => Ok(()),
                false => memory
                    .place(page, &content)
                    .map_err(OffloadError::file("the guest's memory".as_ref())),
            }
        })
    }

    fn content(
        &self,
        page: u64,
        arrived: crate::fetch::Content,
    ) -> Result<Box<[u8; PAGE_SIZE]>, OffloadError> {
        if self.settings.stop.load(Ordering::Relaxed) {
            return Err(OffloadError::Interrupted);
        }
        arrived.map_err(|reason| OffloadError::Lost { page, reason })
    }

    /// Faults are served from before the state on: restoring devices reads memory.
    fn on_demand(&self, fill: Option<u64>) -> Result<(), OffloadError> {
        if self.pages.memory.is_some() {
            check_page_size(HUGE_PAGES.as_ref())?;
        }
        let main = self.begin()?;
        let never = Arc::new(AtomicBool::new(false));
        // A guest may need no page for days, and its VMM may be frozen in the middle of a message.
        let faults = self.connect(None, &never)?;
        faults.send(&ROLE_FAULT.to_le_bytes())?;
        thread::scope(|scope| {
            let pages = self.pages;
            let serving = scope.spawn(|| pages.serve(&faults, self.sources.faults));
            let finished = self.finish(main);
            match (&finished, pages.memory) {
                (Ok(()), Some(memory)) if fill != Some(0) => {
                    scope.spawn(move || pages.fill(memory, self.sources.fill, fill));
                }
                (Ok(()), _) => {}
                // The VMM may run the VM, and closes the connection if it does not.
                (Err(error @ OffloadError::Silent(_)), _) => {
                    let text = format!("{error}; the VM's faults are served meanwhile");
                    self.settings.say(&text);
                }
                (Err(_), _) => never.store(true, Ordering::Relaxed),
            }
            let mut is_said = false;
            while !serving.is_finished() {
                let in_place = pages.memory.map_or(0, GuestMemory::in_place);
                let done = &self.settings.progress.done;
                done.store(in_place * PAGE_SIZE as u64, Ordering::Relaxed);
                let stop =
                    self.settings.stop.load(Ordering::Relaxed) && !never.load(Ordering::Relaxed);
                if stop && !std::mem::replace(&mut is_said, true) {
                    self.settings.say(
                        "the VM needs this daemon for its memory: it ends with the VM; another \
                         signal ends it now, and the VM loses the rest of its memory",
                    );
                }
                thread::sleep(LOOK / 10);
            }
            let served = serving
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            finished.and(served)
        })
    }

    fn connect(
        &self,
        patience: Option<Duration>,
        stop: &Arc<AtomicBool>,
    ) -> Result<Connection, OffloadError> {
        let socket = UnixStream::connect(self.socket);
        let socket = socket.map_err(|error| OffloadError::Connect {
            socket: self.socket.to_owned(),
            error,
        })?;
        Connection::new(socket, patience, stop)
    }

    /// Until the VMM has the configuration.
    fn begin(&self) -> Result<Connection, OffloadError> {
        let connection = self.connect(Some(self.settings.patience), &self.settings.stop)?;
        connection.request(Command::Start, 0, |_| Ok(()))?;
        let files = self.pages.memory.map_or(&[][..], GuestMemory::slots);
        for (slot, file) in files {
            let payload = |to: &Connection| to.send_descriptor(slot.slot, file.as_fd());
            connection.request(Command::MemoryFd, 4, payload)?;
        }
        self.send_file(&connection, Command::Config, CONFIG)?;
        Ok(connection)
    }

    /// The state, and the end of the migration.
    fn finish(&self, connection: Connection) -> Result<(), OffloadError> {
        self.send_file(&connection, Command::State, STATE)?;
        let end = match self.snapshot.manifest.was_running {
            true => Command::Complete,
            false => Command::CompletePaused,
        };
        // From here on the VMM may run the VM.
        connection.unstoppable().request(end, 0, |_| Ok(()))
    }

    fn send_file(
        &self,
        connection: &Connection,
        command: Command,
        name: &str,
    ) -> Result<(), OffloadError> {
        let path = self.snapshot.path(name);
        let failed = || OffloadError::file(&path);
        let mut file = File::open(&path).map_err(failed())?;
        let length = file.metadata().map_err(failed())?.len();
        connection.request(command, length, |to| {
            let (mut chunk, mut left) = (vec![0; CHUNK], length);
            while left > 0 {
                let now = &mut chunk[..CHUNK.min(left as usize)];
                file.read_exact(now).map_err(failed())?;
                to.send(now)?;
                left -= now.len() as u64;
            }
            Ok(())
        })
    }
}
