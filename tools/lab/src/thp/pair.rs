//! VMs with the same guest that take turns: a VM without a turn has no vCPU and no background
//! thread at work, so that each pays for all of its own work and for nothing of the other's.

use crate::experiment::LabError;
use crate::session::{Count, Guest, LastWords, image};
use lacuna_guest::status::Kind;
use lacuna_machine::{Ending, PlatformDevices};
use lacuna_soft::{Background, Host, HostStats, Vcpu, Vm, VmBuilder, VmConfig};
use lacuna_sync::{Clock, HostClock};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a guest may take until it has announced its status page, or until it stands still.
const LIMIT: Duration = Duration::from_secs(60);
/// A guest whose counters stand still for so long has paused: longer than any page takes.
const STILL: Duration = Duration::from_millis(10);

/// How long a turn is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// What goes before what is counted: a paused process looks every 20 ms.
    pub settle: Duration,
    /// What is counted.
    pub slice: Duration,
}

/// What happened in a turn.
pub struct Took {
    /// Steps a second of those that access memory.
    pub rate: f64,
    /// Pages a second read from swap.
    pub swap_ins: f64,
    /// The host's counters at the end of the turn.
    pub host: HostStats,
}

/// One of them.
pub struct Side<'a> {
    guest: Guest<'a>,
    host: Arc<Host>,
    background: Option<Background>,
}

impl<'a> Side<'a> {
    /// Waits for the guest of `machine` to be prepared, and makes it pause.
    fn prepare(machine: &'a Machine) -> Result<Self, LabError> {
        let deadline = Instant::now() + LIMIT;
        let guest = loop {
            if let Some(guest) = Guest::attach(&*machine.vm, &machine.devices) {
                break guest;
            }
            if machine.devices.ending().is_some() || Instant::now() > deadline {
                return Err(LabError::Guest("the guest did not begin".into()));
            }
            thread::sleep(Duration::from_millis(1));
        };
        let host = Arc::clone(machine.vm.host());
        let background = Some(host.spawn_background()?);
        let mut side = Self {
            guest,
            host,
            background,
        };
        side.guest.prepared()?;
        side.pause()?;
        Ok(side)
    }

    /// Lets it run for a turn.
    pub fn take(&mut self, turn: Turn) -> Result<Took, LabError> {
        self.background = Some(self.host.spawn_background()?);
        self.guest.pause(&[])?;
        self.guest.run_for(turn.settle)?;
        let (before, swapped_in) = (self.guest.count()?, self.host.stats().swapped_in);
        self.guest.run_for(turn.slice)?;
        let count = self.guest.count()?;
        let host = self.host.stats();
        self.pause()?;
        let [_, rate] = count.rates_since(&before);
        let swapped_in = (host.swapped_in - swapped_in) as f64;
        Ok(Took {
            rate,
            swap_ins: swapped_in / (count.at - before.at).as_secs_f64(),
            host,
        })
    }

    fn pause(&mut self) -> Result<(), LabError> {
        self.guest.pause(&[Kind::Faulter])?;
        let deadline = Instant::now() + LIMIT;
        let steps = |count: Count| count.faulters;
        let mut last = steps(self.guest.count()?);
        loop {
            self.guest.run_for(STILL)?;
            let now = steps(self.guest.count()?);
            if now == last {
                break;
            }
            if Instant::now() > deadline {
                return Err(LabError::Guest("the guest does not pause".into()));
            }
            last = now;
        }
        self.background = None;
        Ok(())
    }
}

struct Machine {
    vm: Arc<Vm>,
    devices: PlatformDevices,
    words: LastWords,
}

impl Machine {
    fn new(builder: &VmBuilder, name: &str) -> Result<(Self, Vec<Vcpu>), LabError> {
        let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
        let host = builder.host(Arc::clone(&clock))?;
        let config = VmConfig {
            memory: builder.memory,
            vcpus: builder.vcpus,
            apf: builder.apf,
            ..VmConfig::default()
        };
        let vm = Vm::new(host, clock, config)?;
        let vcpus = vm.boot(&image(name)?, &builder.full_command_line())?;
        let words = LastWords::default();
        let devices = PlatformDevices::new(words.console());
        Ok((Self { vm, devices, words }, vcpus))
    }
}

/// Ends the guests, whatever happens to the experiment: else their threads would be waited for.
struct End<'a>(&'a [Machine]);

impl Drop for End<'_> {
    fn drop(&mut self) {
        for machine in self.0 {
            machine.devices.end(Ending::Stopped, &*machine.vm);
        }
    }
}

/// Starts a VM with the guest `name` for each of `launches`, one after the other: the next when
/// this one is prepared and pauses. Then carries out `experiment` on them, and ends them.
///
/// # Errors
/// Those of the experiment and of the launches; and a guest that ends before the experiment does.
pub fn side_by_side<T>(
    launches: &[VmBuilder],
    name: &str,
    experiment: impl FnOnce(&mut [Side<'_>]) -> Result<T, LabError>,
) -> Result<T, LabError> {
    let made = launches.iter().map(|builder| Machine::new(builder, name));
    let (machines, vcpus): (Vec<_>, Vec<_>) = made
        .collect::<Result<Vec<_>, LabError>>()?
        .into_iter()
        .unzip();
    let result = thread::scope(|scope| {
        let _end = End(&machines);
        let start = |(machine, vcpus): (_, Vec<Vcpu>)| {
            let machine: &Machine = machine;
            scope.spawn(move || drop(lacuna_machine::run(vcpus, &machine.devices, &*machine.vm)));
            Side::prepare(machine)
        };
        let sides = machines.iter().zip(vcpus).map(start);
        let mut sides = sides.collect::<Result<Vec<_>, LabError>>()?;
        experiment(&mut sides)
    });
    // Of a guest that has ended by itself, its last words are the reason.
    let ending = |machine: &Machine| machine.devices.ending().unwrap_or(Ending::Stopped);
    let stopped = |machine: &Machine| matches!(ending(machine), Ending::Stopped);
    let failed = machines.iter().find(|machine| !stopped(machine));
    let told = failed.unwrap_or(&machines[0]);
    told.words.settle(Some(result), &ending(told))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::PageCount;
    use lacuna_soft::{Apf, HugePages, LatencySetting, Swap};

    fn builder(huge: HugePages, words: &str) -> VmBuilder {
        VmBuilder {
            memory: PageCount::from_bytes(32 << 20),
            resident: PageCount::from_bytes(64 << 20),
            vcpus: 1,
            huge,
            swap: Swap::Memory,
            latency: LatencySetting::default(),
            apf: Apf::Off,
            seed: None,
            command_line: words.into(),
        }
    }

    const TURN: Turn = Turn {
        settle: Duration::from_millis(30),
        slice: Duration::from_millis(50),
    };

    #[test]
    fn who_has_no_turn_does_nothing() {
        let launches = [HugePages::Never, HugePages::Always]
            .map(|huge| builder(huge, "huge=1 seconds=1000000"));
        let done = side_by_side(&launches, "zipf", |sides| {
            let resting = sides[1].guest.count()?.faulters;
            let took = sides[0].take(TURN)?;
            assert!(took.rate > 0.0 && took.host.huge_pages == 0);
            assert_eq!(sides[1].guest.count()?.faulters, resting);
            let took = sides[1].take(TURN)?;
            assert!(took.rate > 0.0 && took.host.huge_pages > 4);
            Ok(())
        });
        done.unwrap();
    }

    #[test]
    fn a_guest_that_refuses_says_why() {
        let launches = [builder(HugePages::Never, "processes=0")];
        let error = side_by_side(&launches, "zipf", |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("cannot be"), "{error}");
    }
}
