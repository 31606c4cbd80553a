//! The thread that fills one VM's memory before the VM needs it.
//!
//! ```text
//! filling thread ──asks for up to WINDOW pages──► the fill's own source
//!       ▲                                            │ gathers each unit, on its threads
//!       └──────────────── whole units ◄──────────────┘
//!       └─► Vm::fill: one unit under the VM's shared lock
//! ```
//! A unit stays Missing while the fill asks for it. So a fault asks the VM's own source for it, and
//! the first content wins: a slow fill delays no fault.

use crate::image::Fill;
use crate::regions::Unit;
use crate::served::Served;
use crate::vm::Vm;
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_source::{
    Answer, Failure, Gathered, Gathering, PageRequest, PageRequester, Pages, SourcePage, Touches,
};
use lacuna_sync::{Mutex, join, lock, lock_order};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most pages that a VM's fill has asked for and not placed, apart from one unit.
const WINDOW: u64 = 256;
/// How long the fill asks for nothing while placements of the VM wait, as for memory of the host.
const PAUSE: Duration = Duration::from_millis(10);

/// A filling thread. Dropping it ends the thread.
pub struct Filler {
    to: Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

enum Message {
    /// The source's answer for a whole unit; why there is no content.
    Answer(Wanted, Result<Box<Pages>, String>),
    Stop,
}

/// A unit that the fill wants.
#[derive(Clone, Copy)]
struct Wanted {
    unit: Unit,
    is_of_working_set: bool,
}

impl Filler {
    /// Starts to fill `vm`, if `image` says so. A recorded VM is not filled: the record would lack
    /// the filled pages.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(vm: &Arc<Vm>, image: &Arc<Served>) -> io::Result<Option<Self>> {
        if image.image.fill.is_none() || vm.is_recorded() {
            return Ok(None);
        }
        let (to, answers) = channel();
        let (vm, image, sender) = (Arc::clone(vm), Arc::clone(image), to.clone());
        let named = std::thread::Builder::new().name("lacuna-pager-fill".into());
        let thread = named.spawn(move || {
            let fill = image.image.fill.as_ref().expect("the image has a fill");
            FillJob::new(&vm, fill, sender).run(&answers);
        })?;
        let thread = Some(thread);
        Ok(Some(Self { to, thread }))
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // It fails if the thread has ended.
        let _ = self.to.send(Message::Stop);
        self.thread.take().into_iter().for_each(join);
    }
}

/// The fill of one VM.
struct FillJob<'a> {
    vm: &'a Vm,
    fill: &'a Fill,
    to: Sender<Message>,
    /// Whether each unit was asked for.
    asked: Vec<bool>,
    /// Pages that were asked for and are not placed.
    in_flight: u64,
    /// The fill's rate allows no request before this time.
    next: Instant,
}

impl<'a> FillJob<'a> {
    fn new(vm: &'a Vm, fill: &'a Fill, to: Sender<Message>) -> Self {
        Self {
            vm,
            fill,
            to,
            asked: vec![false; vm.regions().units() as usize],
            in_flight: 0,
            next: Instant::now(),
        }
    }

    /// Fills until all is in place, or the VM ends.
    fn run(mut self, answers: &Receiver<Message>) {
        let regions = self.vm.regions();
        let pages = self.fill.working_set.iter().flat_map(Touches::pages);
        let of_working_set = pages.flat_map(|page| regions.holding(*page));
        let others = 0..if self.fill.is_whole {
            regions.units()
        } else {
            0
        };
        let mut order = of_working_set
            .map(|unit| (unit, true))
            .chain(others.map(|number| (regions.unit(number), false)));
        loop {
            let pause = self.ask(&mut order);
            if pause.is_none() && self.in_flight == 0 {
                return self.vm.end_fill();
            }
            let message = match pause {
                Some(pause) => answers.recv_timeout(pause),
                None => answers.recv().map_err(RecvTimeoutError::from),
            };
            match message {
                Ok(Message::Answer(wanted, content)) => self.place(wanted, content),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Asks for units as long as it may. Returns how long it asks for nothing; `None` if it waits
    /// for an answer, or has asked for all.
    fn ask(&mut self, order: &mut impl Iterator<Item = (Unit, bool)>) -> Option<Duration> {
        while self.in_flight < WINDOW {
            let early = self.next.saturating_duration_since(Instant::now());
            if !early.is_zero() {
                return Some(early);
            }
            if self.vm.has_waiting_placements() {
                return Some(PAUSE);
            }
            let (unit, is_of_working_set) = order.next()?;
            let was_asked = std::mem::replace(&mut self.asked[unit.number as usize], true);
            if was_asked || !self.vm.is_missing(&unit) {
                continue;
            }
            let pages = unit.memory.pages();
            self.in_flight += pages;
            if let Some(rate) = &self.fill.rate {
                self.next = rate.take(PageCount::new(pages).bytes());
            }
            let requester = Arc::new(UnitRequester {
                wanted: Wanted {
                    unit,
                    is_of_working_set,
                },
                gathering: Mutex::default(),
                to: self.to.clone(),
            });
            for page in 0..pages {
                let requester = Arc::clone(&requester) as Arc<dyn PageRequester>;
                let request = PageRequest::new(requester, page, SourcePage(unit.first.0 + page));
                request.send(&self.fill.source);
            }
        }
        None
    }

    fn place(&mut self, wanted: Wanted, content: Result<Box<Pages>, String>) {
        let unit = wanted.unit;
        self.in_flight -= unit.memory.pages();
        match content {
            Ok(pages) => self.vm.fill(&unit, pages.all(), wanted.is_of_working_set),
            Err(reason) => self.vm.say_not_filled(&unit, &reason),
        }
    }
}

/// Gathers the pages of one unit, and sends one message.
struct UnitRequester {
    wanted: Wanted,
    gathering: Mutex<Gathering, lock_order::PagerFill>,
    to: Sender<Message>,
}

impl PageRequester for UnitRequester {
    fn answer(&self, page: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let pages = self.wanted.unit.memory.pages() as usize;
        let done = {
            let mut gathering = lock(&self.gathering);
            match content {
                // The end of a request calls this with a failure, also after an answer.
                Err(_) if gathering.has(page as usize) => return Answer::Late,
                Err(failure) => {
                    *gathering = Gathering::Over;
                    Err(failure.reason.to_owned())
                }
                Ok(content) => match gathering.add((page as usize, pages), content) {
                    Gathered::Late => return Answer::Late,
                    Gathered::Partly => return Answer::Taken,
                    Gathered::Wholly(pages) => Ok(pages),
                },
            }
        };
        match self.to.send(Message::Answer(self.wanted, done)) {
            Ok(()) => Answer::Taken,
            // The thread has ended.
            Err(_) => Answer::Late,
        }
    }
}
