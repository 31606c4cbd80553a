//! `--pin`, and the threads of experiments that run on one processor only.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fmt;
use std::io;
use std::str::FromStr;

/// Processors of the host, in the order in which threads get them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cores(Vec<usize>);

impl Cores {
    /// The processors at these places, from 0, among those that this process may use. There may be
    /// fewer.
    pub fn allowed_at(places: impl IntoIterator<Item = usize>) -> Self {
        let allowed = sched_getaffinity(None).unwrap_or_default();
        let allowed = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
        let at = |place| allowed.clone().nth(place);
        Self(places.into_iter().filter_map(at).collect())
    }

    /// Lets the calling thread, of vCPU number `vcpu`, run on its processor only. With more vCPUs
    /// than processors, the list repeats.
    ///
    /// # Errors
    /// The host does not have the processor, or this process may not use it.
    pub fn pin(&self, vcpu: usize) -> io::Result<()> {
        let Some(&core) = self.0.iter().cycle().nth(vcpu) else {
            return Ok(());
        };
        let mut only = CpuSet::new();
        only.set(core);
        sched_setaffinity(None, &only).map_err(|error| {
            io::Error::other(format!(
                "--pin: processor {core} of this host: {error}; name processors that this process \
                 may use (taskset -cp $$)"
            ))
        })
    }
}

/// Pins the calling thread to the core at this place among those of this process. Without that, a
/// new thread may start on the core of another one, and a touch is over before the scheduler moves
/// it.
pub(crate) fn pin(place: usize) {
    // If the kernel refuses, the figure is less precise.
    let _ = Cores::allowed_at([place]).pin(0);
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cores = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |word: &str| {
                let number = word
                    .parse::<usize>()
                    .ok()
                    .filter(|core| *core < CpuSet::MAX_CPU);
                number.ok_or_else(|| format!("{word:?} is no processor; write for example 0-3,6"))
            };
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return Err(format!(
                    "{part:?} ends before it begins; write {last}-{first}"
                ));
            }
            cores.extend(first..=last);
        }
        Ok(Self(cores))
    }
}

/// As `--pin` takes it.
impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<_> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_numbers_and_ranges() {
        for (text, cores) in [
            ("0", vec![0]),
            ("0-3", vec![0, 1, 2, 3]),
            ("6,1-2", vec![6, 1, 2]),
        ] {
            assert_eq!(text.parse(), Ok(Cores(cores)), "{text}");
        }
        for text in ["", "a", "3-1", "1-", "0,,1", "-1", "99999"] {
            assert!(text.parse::<Cores>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_thread_runs_on_its_processor_only() {
        let allowed = sched_getaffinity(None).unwrap();
        let core = Cores::allowed_at([0]).0[0];
        let missing = (0..CpuSet::MAX_CPU)
            .rfind(|core| !allowed.is_set(*core))
            .unwrap();
        std::thread::spawn(move || {
            Cores(vec![core]).pin(5).unwrap();
            let now = sched_getaffinity(None).unwrap();
            assert_eq!((now.count(), now.is_set(core)), (1, true));
            let refused = Cores(vec![core, missing]).pin(1).unwrap_err().to_string();
            assert!(
                refused.contains(&format!("processor {missing}")),
                "{refused}"
            );
        })
        .join()
        .unwrap();
    }
}
