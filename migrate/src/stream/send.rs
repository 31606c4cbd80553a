//! The source of a migration, until the destination may run the guest.

use super::connection::Connections;
use super::frame::Kind;
use super::frames::Frames;
use super::give::{OutgoingGuest, Sent};
use super::lanes::{Lane, There};
use super::left::{Links, Reached, RemainingPages};
use super::packing::Carriage;
use super::{Compression, Departure, Hello, MigrationId, Role, STREAMS_MAX, VERSION, Welcome};
use crate::bandwidth::Bandwidth;
use crate::changes::Changes;
use crate::guest::{self, PausedGuest};
use crate::rounds::{Budget, Copied, OnProgress, Pace, Throttle, copy_live};
use crate::{MachineConfig, MemoryLayout, MigrateError};
use lacuna_machine::{Running, Vm};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;
use std::sync::Arc;
use tracing::{debug, info_span};

/// The most pages that are missing together: a huge page of 1 GiB.
const UNIT_MAX: u64 = 1 << 18;

/// When the guest goes to the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// After its memory. A guest that writes as fast as its pages are sent is slowed down, step by
    /// step. If that does not help, its pause is longer than the budget.
    #[default]
    PreCopy,
    /// Before its memory.
    PostCopy,
    /// After the memory that it does not write again. If the rest takes longer than the budget, the
    /// guest goes first.
    Hybrid,
}

/// How a guest is moved.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// When the guest goes.
    pub mode: Mode,
    /// The limit of its downtime and of its rounds.
    pub budget: Budget,
    /// Connections that take pages before the guest goes, at the same time and each with a thread
    /// on both sides: 1 to [`STREAMS_MAX`]. A network that is faster than one processor needs
    /// several.
    pub streams: u32,
    /// How pages are compressed, except requested pages.
    pub compression: Compression,
    /// The most bytes a second that are sent on the connections for pages, before TLS and TCP:
    /// frames of the stream, with their pages as compressed. It holds while the guest runs, here or
    /// there. The last pages of a paused guest are sent without it, and so are requested pages,
    /// which have a connection of their own. The mean stays under it; up to 60 ms of it are sent at
    /// once. A limit is shared by one connection for each MiB a second of it, and by no more.
    pub bandwidth: Option<NonZeroU64>,
}

impl Plan {
    /// The most connections that it takes, if none is cut.
    pub(crate) fn connections(&self) -> u32 {
        let after_the_guest = match self.mode {
            Mode::PreCopy => 0,
            Mode::PostCopy | Mode::Hybrid => 2,
        };
        self.streams + after_the_guest
    }
}

impl Default for Plan {
    /// A pre-copy over one connection, without compression and limit.
    fn default() -> Self {
        Mode::default().into()
    }
}

impl From<Mode> for Plan {
    /// This mode, over one connection, without compression and limit.
    fn from(mode: Mode) -> Self {
        Self {
            mode,
            budget: Budget::default(),
            streams: 1,
            compression: Compression::default(),
            bandwidth: None,
        }
    }
}

/// Moves `guest` to the other side of `connections`. It runs meanwhile, except for the end.
///
/// Writes are logged meanwhile ([`DirtyTracking`](lacuna_machine::DirtyTracking)), except in
/// [`Mode::PostCopy`]. A VMM that uses the log itself leaves it on and does not harvest it
/// meanwhile. If the guest resumes here, the VMM finds there all written pages, unless its VM
/// delivers by rings alone.
///
/// `progress` can end the rounds ([`Stop::Pause`](crate::Stop::Pause)). It can cancel the migration
/// before the destination may run the guest. The first call with round 0 is the last chance. After
/// it, [`Stop::Cancel`](crate::Stop::Cancel) ends this with [`Sent::Cut`].
///
/// # Errors
/// [`MigrateError`]. The guest keeps running here, and the destination does not run it.
pub fn send<'a, V: Vm>(
    guest: &'a Running<V>,
    connections: &dyn Connections,
    plan: &Plan,
    progress: OnProgress<'_>,
) -> Result<Sent<'a, V>, MigrateError> {
    if !(1..=STREAMS_MAX).contains(&plan.streams) {
        return Err(MigrateError::Streams(plan.streams));
    }
    let mut sender = Sender::new(guest, connections, plan)?;
    let id = &*sender.id.0;
    let _span = info_span!(target: "lacuna::migration", "send", id, mode = ?plan.mode).entered();
    let begun = sender.until_state(guest, connections, progress);
    begun
        .and_then(|(outgoing, left)| sender.hand_over(outgoing, left, progress))
        .map_err(|why| sender.give_up(why))
}

impl MigrationId {
    fn new() -> Result<Self, MigrateError> {
        Ok(Self(format!("{:032x}", u128::from_ne_bytes(random()?))))
    }
}

/// Bytes that no guest and no peer can predict.
fn random<const N: usize>() -> Result<[u8; N], MigrateError> {
    let mut bytes = [0; N];
    let got = getrandom(&mut bytes, GetRandomFlags::empty());
    got.map_err(|errno| MigrateError::Random(errno.into()))?;
    Ok(bytes)
}

struct Sender<'p> {
    plan: &'p Plan,
    carriage: Carriage,
    id: MigrationId,
    /// The first one also carries everything else.
    lanes: Vec<Lane>,
    /// For pages after the guest. A hybrid may not need them.
    links: Option<Links>,
    there: Arc<There>,
}

impl<'p> Sender<'p> {
    fn new<V: Vm>(
        guest: &Running<V>,
        connections: &dyn Connections,
        plan: &'p Plan,
    ) -> Result<Self, MigrateError> {
        let mut main = Frames::open(connections)?;
        let carriage = Carriage {
            compression: plan.compression,
            limit: plan.bandwidth.map(|limit| Arc::new(Bandwidth::new(limit))),
        };
        main.carry(&carriage)?;
        let there = There::new(
            MemoryLayout::of(&**guest.vm()).pages(),
            u64::from_ne_bytes(random()?),
        );
        Ok(Self {
            plan,
            carriage,
            id: MigrationId::new()?,
            lanes: vec![Lane::new(main, Arc::clone(&there))],
            links: None,
            there,
        })
    }

    fn main(&mut self) -> &mut Frames {
        &mut self.lanes[0].frames
    }

    /// Sends `why` to the destination, if it is there. If the destination has sent a reason for a
    /// cut, on any connection, returns that instead.
    fn give_up(&mut self, why: MigrateError) -> MigrateError {
        match why {
            MigrateError::Refused(_) => why,
            MigrateError::Cut(_) => {
                let (main, others) = self.lanes.split_first_mut().expect("the first one");
                // The reason is the destination's last message on an ended connection. This does
                // not wait on the others.
                let mut why = why;
                for lane in others {
                    why = lane.frames.last_words(why);
                }
                if let MigrateError::Refused(_) = why {
                    return why;
                }
                // The destination may wait for more on this connection.
                main.frames.refuse(&why);
                main.frames.reason(why)
            }
            why => {
                self.main().refuse(&why);
                why
            }
        }
    }

    /// Sends everything up to the state of the paused guest. Returns the guest, and the pages that
    /// the destination then lacks.
    fn until_state<'a, V: Vm>(
        &mut self,
        guest: &'a Running<V>,
        connections: &dyn Connections,
        progress: OnProgress<'_>,
    ) -> Result<(OutgoingGuest<'a, V>, RemainingPages<'a, V>), MigrateError> {
        let layout = MemoryLayout::of(&**guest.vm());
        let plan = self.plan;
        let unit = self.introduce(guest, &layout)?;
        self.open_others(connections)?;
        let lanes = &mut self.lanes[..];
        let (copied, changes) = match plan.mode {
            Mode::PostCopy => {
                let paused = PausedGuest::pause(guest)?;
                debug!(target: "lacuna::migration", "guest is paused");
                (Copied::nothing(paused, layout.pages()), None)
            }
            mode => {
                let mut changes = Changes::log(&**guest.vm())?;
                let budget = &plan.budget;
                // A hybrid sends the guest early instead.
                let throttle = match mode {
                    Mode::PreCopy => Throttle::LAST_RESORT,
                    Mode::PostCopy | Mode::Hybrid => Throttle::Never,
                };
                let pace = Pace {
                    budget,
                    throttle,
                    limit: self.carriage.limit.as_deref(),
                };
                let mut copied = copy_live(guest, &mut changes, pace, lanes, progress)?;
                if mode == Mode::PreCopy || copied.fits(budget) {
                    copied.copy_rest(&**guest.vm(), &layout, lanes, progress)?;
                }
                (copied, Some(changes))
            }
        };
        let Copied {
            paused,
            rounds,
            mut left,
            ..
        } = copied;
        left.widen(unit);
        // Fails if slots were added or removed since the first message.
        if MemoryLayout::of(&**guest.vm()) != layout {
            return Err(MigrateError::SlotsChanged);
        }
        for lane in &mut self.lanes[1..] {
            lane.frames.signal(Kind::End)?;
        }
        self.lanes.truncate(1);
        self.main().write_set(&left)?;
        let machine = MachineConfig::saved(&**guest.vm(), layout.clone(), &paused.state().vcpus);
        let departure = Departure {
            paused_us: paused.since().elapsed().as_micros() as u64,
            rounds: rounds.iter().map(|round| round.pages).collect(),
        };
        self.main()
            .write_json(Kind::State, &(machine, paused.state(), departure))?;
        let left = RemainingPages::new(&**guest.vm(), layout, left, self.carriage.clone());
        let id = self.id.clone();
        let log = (rounds, changes);
        Ok((
            OutgoingGuest::new(guest, paused, id, log, &self.there),
            left,
        ))
    }

    /// The first messages. Returns how many pages are missing together at the destination.
    fn introduce<V: Vm>(
        &mut self,
        guest: &Running<V>,
        layout: &MemoryLayout,
    ) -> Result<u64, MigrateError> {
        // The destination's VM needs the frequency of the vCPUs' TSC, which is in their state.
        let vcpus = guest::vcpus(guest)?;
        let machine = MachineConfig::saved(&**guest.vm(), layout.clone(), &vcpus);
        let processor = vcpus.first().ok_or(MigrateError::NotRunning)?.features();
        let devices = guest.devices().versions();
        // After a panic of a device, the run has an ending, and running vCPUs do not see it.
        let devices = devices.inspect_err(|_| guest.vm().kick_all())?;
        let (version, id) = (VERSION, self.id.clone());
        let hello = Hello {
            version,
            id,
            mode: self.plan.mode,
            streams: self.streams(),
            machine,
            devices,
            processor,
            compression: self.carriage.compression,
        };
        let main = self.main();
        main.write_json(Kind::Hello, &hello)?;
        main.expect(Kind::Welcome)?;
        main.check_version()?;
        let welcome: Welcome = main.json()?;
        match welcome.unit.unwrap_or(1) {
            unit if unit.is_power_of_two() && unit <= UNIT_MAX => Ok(unit),
            unit => Err(MigrateError::stream(format!(
                "a Welcome with units of {unit} pages"
            ))),
        }
    }

    /// A post-copy has no pages for them. Under a low limit, a connection without a page would be
    /// silent for so long that it counts as cut.
    fn streams(&self) -> u32 {
        let most = |limit: NonZeroU64| (limit.get() >> 20).clamp(1, u64::from(STREAMS_MAX)) as u32;
        match self.plan.mode {
            Mode::PostCopy => 1,
            Mode::PreCopy | Mode::Hybrid => self
                .plan
                .streams
                .min(self.plan.bandwidth.map_or(STREAMS_MAX, most)),
        }
    }

    /// Makes the connections beside the first one. Their set-up is no part of the downtime.
    fn open_others(&mut self, connections: &dyn Connections) -> Result<(), MigrateError> {
        for _ in 1..self.streams() {
            let (mut frames, _) = Frames::join(connections, &self.id, Role::Pages)?;
            frames.carry(&self.carriage)?;
            self.lanes.push(Lane::new(frames, Arc::clone(&self.there)));
        }
        if self.plan.mode != Mode::PreCopy {
            self.links = Some(Links::join(connections, &self.id)?);
        }
        Ok(())
    }

    /// Hands the guest over, and sends the remaining pages.
    fn hand_over<'a, V: Vm>(
        &mut self,
        mut outgoing: OutgoingGuest<'a, V>,
        left: RemainingPages<'a, V>,
        progress: OnProgress<'_>,
    ) -> Result<Sent<'a, V>, MigrateError> {
        let mut links = self.links.take().filter(|_| !left.needed_nothing());
        let talked = left.talk(self.main(), links.as_mut(), Reached::State, progress);
        outgoing.pages += left.take_sent();
        outgoing.ran = left.ran();
        outgoing.is_away = !matches!(talked, Err((Reached::State, _)));
        match talked {
            Ok(()) => Ok(Sent::Moved(outgoing)),
            Err((Reached::State, why)) => Err(why),
            Err((reached, why)) => Ok(outgoing.interrupted(left, reached, why)),
        }
    }
}
