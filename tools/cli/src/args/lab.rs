//! The options of `lacuna lab`.

use super::Output;
use crate::exit::EXIT_CODES;
use clap::{Args, ValueEnum};
use std::str::FromStr;

/// `lacuna lab`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
#[command(after_help = EXIT_CODES)]
pub struct LabArgs {
    /// Experiments (apf, thp, pml, paging, base), or parts of them (pml.score, base.scaling).
    /// Without a name: a first look at each mechanism, in less than a minute
    pub experiments: Vec<Name>,
    /// All experiments that compare a mechanism with its absence: apf, thp, pml, paging (an hour)
    #[arg(long, conflicts_with = "experiments")]
    pub full: bool,
    /// Fewer and shorter rounds: for CI, not for figures to quote
    #[arg(long)]
    pub quick: bool,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// An experiment with its chosen parts; no part means all of them.
pub type Parts = (Experiment, Vec<&'static str>);

/// What `lacuna lab` is to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// One row for each mechanism.
    FirstLook,
    /// These experiments, each once.
    Parts(Vec<Parts>),
}

impl LabArgs {
    /// What is to be measured.
    pub fn chosen(&self) -> Chosen {
        if self.full {
            let systems = Experiment::SYSTEMS;
            return Chosen::Parts(systems.map(|experiment| (experiment, Vec::new())).into());
        }
        if self.experiments.is_empty() {
            return Chosen::FirstLook;
        }
        let parts_of = |experiment: &Experiment| {
            let named = self.experiments.iter();
            let named = named.filter(|name| name.experiment == *experiment);
            // An experiment that is named as a whole and by a part is measured as a whole.
            let parts: Option<Vec<_>> = named.clone().map(|name| name.part).collect();
            named
                .clone()
                .next()
                .map(|_| (*experiment, parts.unwrap_or_default()))
        };
        let experiments = Experiment::value_variants().iter();
        Chosen::Parts(experiments.filter_map(parts_of).collect())
    }
}

/// The name of an experiment, or of a part of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name {
    /// The experiment.
    pub experiment: Experiment,
    /// Its part; `None` for all of it.
    pub part: Option<&'static str>,
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, part) = match text.split_once('.') {
            Some((name, part)) => (name, Some(part)),
            None => (text, None),
        };
        let experiment = Experiment::from_str(name, false)
            .map_err(|_| "no such experiment: choose apf, thp, pml, paging or base".to_owned())?;
        let known = |part: &str| {
            let parts = experiment.parts();
            let found = parts.iter().find(|known| **known == part);
            found.copied().ok_or_else(|| {
                let parts = parts.join(", ");
                format!("{name} has no such part: choose one of {parts}")
            })
        };
        Ok(Self {
            experiment,
            part: part.map(known).transpose()?,
        })
    }
}

/// An experiment of the lab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Experiment {
    /// Asynchronous page faults, on and off: threads that compute and threads that fault
    Apf,
    /// Huge pages: invalidation of a range, first touch, random reads, memory pressure
    Thp,
    /// Dirty tracking: what it costs to know which pages a running guest writes
    Pml,
    /// Memory that was never provided: one queue for all vCPUs, and exits to the VMM
    Paging,
    /// The engine itself: memory overhead, a fault's time, instructions a second. Only by name
    Base,
}

impl Experiment {
    /// Those that compare a mechanism with its absence.
    const SYSTEMS: [Self; 4] = [Self::Apf, Self::Thp, Self::Pml, Self::Paging];

    const fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Apf => lacuna_lab::apf::PARTS,
            Self::Thp => lacuna_lab::thp::PARTS,
            Self::Pml => lacuna_lab::pml::PARTS,
            Self::Paging => lacuna_lab::paging::PARTS,
            Self::Base => lacuna_lab::base::PARTS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn the_lab_runs_what_is_named() {
        let chosen = |line| match parse(line).unwrap().command {
            Some(Command::Lab(args)) => args.chosen(),
            other => panic!("{other:?}"),
        };
        let parts = |parts: &[Parts]| Chosen::Parts(parts.to_vec());
        let whole = |experiment| (experiment, vec![]);
        for line in ["lacuna lab", "lacuna lab --quick --quiet"] {
            assert_eq!(chosen(line), Chosen::FirstLook, "{line}");
        }
        let systems = Experiment::SYSTEMS.map(whole);
        assert_eq!(chosen("lacuna lab --full"), parts(&systems));
        assert_eq!(chosen("lacuna lab apf thp pml paging"), parts(&systems));
        let both = [Experiment::Apf, Experiment::Base].map(whole);
        assert_eq!(chosen("lacuna lab base apf"), parts(&both));
        let base = [whole(Experiment::Base)];
        assert_eq!(chosen("lacuna lab base base --quick"), parts(&base));
        assert_eq!(chosen("lacuna lab base.fault base"), parts(&base));
        let some = [
            (Experiment::Pml, vec!["harvest", "page"]),
            (Experiment::Base, vec!["scaling"]),
        ];
        let line = "lacuna lab pml.harvest base.scaling pml.page";
        assert_eq!(chosen(line), parts(&some));
    }

    #[test]
    fn a_part_that_does_not_exist_is_refused_with_those_that_do() {
        let refused = |line| parse(line).unwrap_err().to_string();
        let text = refused("lacuna lab pml.pages");
        let parts = "pml has no such part: choose one of score, page, ending, harvest, kvm";
        assert!(text.contains(parts), "{text}");
        let text = refused("lacuna lab pmk.page");
        assert!(
            text.contains("choose apf, thp, pml, paging or base"),
            "{text}"
        );
    }
}
