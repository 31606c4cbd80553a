//! The options of `lacuna lab`.

use super::Output;
use crate::exit::EXIT_CODES;
use clap::{ArgGroup, Args, ValueEnum};
use lacuna::Arch;
use lacuna_lab::options::{ARCHS, name_of, named};
use std::path::PathBuf;
use std::str::FromStr;

/// `lacuna lab`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
#[command(after_help = EXIT_CODES, group = ArgGroup::new("chosen").multiple(true))]
pub struct LabArgs {
    /// Experiments (apf, apf-arm64, thp, pml, paging, postcopy, restore, migrate, pager, letters,
    /// base), or parts (pml.score). Without a name: a first look at each mechanism, in less than a
    /// minute
    #[arg(group = "chosen")]
    pub experiments: Vec<Name>,
    /// All experiments that compare a mechanism with its absence: all but base and letters (more
    /// than an hour; it says how long before it begins)
    #[arg(long, conflicts_with = "experiments", group = "chosen")]
    pub full: bool,
    /// Fewer and shorter rounds: for CI, not for figures to quote
    #[arg(long)]
    pub quick: bool,
    /// Divides the memory, processes and time of letters by up to 32, for small hosts
    #[arg(long, value_name = "N", requires = "experiments",
          value_parser = clap::value_parser!(u32).range(1..=32))]
    pub scale: Option<u32>,
    /// The guests' processor [default: arm64 for apf-arm64, x86_64 for all others]. With arm64 the
    /// parts for x86_64 guests only are skipped
    #[arg(long, requires = "experiments", value_parser = named(ARCHS))]
    pub arch: Option<Arch>,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
    /// Write a report to this file: one HTML page with plots, which needs no network
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print a table in Markdown, for pasting, instead of text
    #[arg(long)]
    pub markdown: bool,
    /// Show the run that `--json` has saved in this file beside this one, and name the figures
    /// whose intervals do not overlap
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Measure nothing: show the run that `--json` has saved in this file
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["chosen", "quick", "scale", "arch", "json", "resume"])]
    pub from: Option<PathBuf>,
    /// Continue an interrupted run after its last finished experiment: with the results that are in
    /// the file of --json, on the same host and commit
    #[arg(long, requires_all = ["json", "chosen"])]
    pub resume: bool,
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
            // If an experiment is named both as a whole and by a part, all of it is measured.
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

/// The processor of the guests of `experiment`, if `asked` is the one that the user names.
///
/// # Errors
/// The experiment, or one of the chosen parts, is not for guests of that processor.
pub fn arch_of((experiment, parts): &Parts, asked: Option<Arch>) -> Result<Arch, String> {
    let arch = asked.unwrap_or(match experiment {
        Experiment::ApfArm64 => Arch::Arm64,
        _ => Arch::X86_64,
    });
    let only_x86 = parts
        .iter()
        .find(|part| experiment.only_x86().contains(part));
    match (arch, only_x86) {
        (Arch::Arm64, Some(part)) => Err(format!(
            "--arch arm64: part {part} of {experiment:?} is measured with x86-64 guests only: \
             leave --arch out, or choose another part"
        )),
        _ => Ok(arch),
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
        let experiment = Experiment::from_str(name, false).map_err(|_| {
            "no such experiment: choose apf, apf-arm64, thp, pml, paging, postcopy, restore, \
             migrate, pager, letters or base"
                .to_owned()
        })?;
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
    /// The experiment of the arm64 series of 2020, on arm64 guests: a memory-bound thread beside a
    /// CPU-bound one
    ApfArm64,
    /// Huge pages: invalidation of a range, first touch, random reads, memory pressure
    Thp,
    /// Dirty tracking: what it costs to know which pages a running guest writes
    Pml,
    /// Memory that was never provided: one queue for all vCPUs, and exits to the VMM
    Paging,
    /// Memory that is still with a peer: exits and asynchronous page faults, and both together
    Postcopy,
    /// A guest that resumes from a snapshot, with pages read before or while it runs
    Restore,
    /// A running guest that moves to another VM: before, after and beside its memory
    Migrate,
    /// The pager for other VMMs: its faults beside a simple handler's and the kernel's, its fill
    Pager,
    /// The experiments of the talk and the series, at their published size. Only by name
    Letters,
    /// The engine itself: memory overhead, a fault's time, instructions a second. Only by name
    Base,
}

/// The command that repeats an experiment alone.
pub fn repeats(args: &LabArgs, (experiment, parts): &Parts) -> String {
    let value = experiment.to_possible_value();
    let name = value.map_or(String::new(), |value| value.get_name().to_owned());
    let mut words = vec!["lacuna lab".to_owned()];
    match &parts[..] {
        [] => words.push(name),
        parts => words.extend(parts.iter().map(|part| format!("{name}.{part}"))),
    }
    words.extend(args.quick.then(|| "--quick".to_owned()));
    words.extend(args.scale.map(|scale| format!("--scale {scale}")));
    let arch = args.arch.map(|arch| name_of(&ARCHS, &arch));
    words.extend(arch.map(|name| format!("--arch {name}")));
    words.join(" ")
}

impl Experiment {
    /// The experiments that compare a mechanism with its absence.
    const SYSTEMS: [Self; 9] = [
        Self::Apf,
        Self::ApfArm64,
        Self::Thp,
        Self::Pml,
        Self::Paging,
        Self::Postcopy,
        Self::Restore,
        Self::Migrate,
        Self::Pager,
    ];

    /// About how long it takes in `--full`, on two idle cores. `finished` in the JSON of a run has
    /// the measured times.
    pub const fn minutes(self) -> u64 {
        match self {
            Self::Apf => 10,
            Self::ApfArm64 => 12,
            Self::Thp => 10,
            Self::Pml => 30,
            Self::Paging => 10,
            Self::Postcopy => 5,
            Self::Restore => 3,
            Self::Migrate => 8,
            Self::Pager => 2,
            Self::Base | Self::Letters => 0,
        }
    }

    /// The parts without an arm64 form.
    const fn only_x86(self) -> &'static [&'static str] {
        match self {
            Self::Apf => &["kvm", "source"],
            Self::Thp | Self::Pml => &["kvm"],
            Self::Paging => &["crowd", "curve"],
            Self::Base => &["fault", "scaling"],
            Self::Letters => &["talk", "range", "pml"],
            Self::Migrate => &["qemu"],
            _ => &[],
        }
    }

    const fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Apf => lacuna_lab::apf::PARTS,
            Self::ApfArm64 => lacuna_lab::apf::arm64::PARTS,
            Self::Thp => lacuna_lab::thp::PARTS,
            Self::Pml => lacuna_lab::pml::PARTS,
            Self::Paging => lacuna_lab::paging::PARTS,
            Self::Postcopy => lacuna_lab::postcopy::PARTS,
            Self::Restore => lacuna_lab::restore::PARTS,
            Self::Migrate => lacuna_lab::migrate::PARTS,
            Self::Pager => lacuna_lab::pager::PARTS,
            Self::Base => lacuna_lab::base::PARTS,
            Self::Letters => lacuna_lab::letters::PARTS,
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
        assert_eq!(
            chosen("lacuna lab apf apf-arm64 thp pml paging postcopy restore migrate pager"),
            parts(&systems)
        );
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
        let parts = "pml has no such part: choose one of score, page, ending, harvest, gib, kvm";
        assert!(text.contains(parts), "{text}");
        let text = refused("lacuna lab pmk.page");
        assert!(
            text.contains(
                "choose apf, apf-arm64, thp, pml, paging, postcopy, restore, migrate, pager, \
                 letters or base"
            ),
            "{text}"
        );
    }

    #[test]
    fn the_guests_have_the_processor_that_is_asked_for_where_they_can() {
        let arch = |line: &str| match parse(line).unwrap().command {
            Some(Command::Lab(args)) => match args.chosen() {
                Chosen::Parts(parts) => arch_of(&parts[0], args.arch),
                Chosen::FirstLook => panic!("{line}"),
            },
            other => panic!("{other:?}"),
        };
        for (line, expected) in [
            ("lacuna lab apf", Arch::X86_64),
            ("lacuna lab apf-arm64", Arch::Arm64),
            ("lacuna lab apf-arm64.pair --arch x86_64", Arch::X86_64),
            ("lacuna lab postcopy --arch arm64", Arch::Arm64),
            ("lacuna lab paging.arms --arch arm64", Arch::Arm64),
            ("lacuna lab apf --arch arm64", Arch::Arm64),
            ("lacuna lab thp --arch x86_64", Arch::X86_64),
            ("lacuna lab thp --arch arm64", Arch::Arm64),
            ("lacuna lab pml.score --arch arm64", Arch::Arm64),
        ] {
            assert_eq!(arch(line), Ok(expected), "{line}");
        }
        for line in ["thp.kvm", "pml.kvm", "apf.kvm", "base.fault"] {
            let line = format!("lacuna lab {line} --arch arm64");
            let text = arch(&line).unwrap_err();
            assert!(text.contains("x86-64 guests only"), "{text}");
        }
        parse("lacuna lab --arch arm64").unwrap_err();
        parse("lacuna lab letters --scale 4").unwrap();
        parse("lacuna lab letters --scale 0").unwrap_err();
    }
}
