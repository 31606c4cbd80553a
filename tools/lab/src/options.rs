//! Parts of the options of `lacuna test`, as clap reads them.

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Command};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Backend};
use rustix::thread::sched_getaffinity;

pub const ARCHS: [(&str, Arch); 2] = [("x86_64", Arch::X86_64), ("arm64", Arch::Arm64)];
pub const BACKENDS: [(&str, Backend); 2] = [("soft", Backend::Soft), ("kvm", Backend::Kvm)];
pub const KINDS: [(&str, MemoryKind); 4] = [
    ("pool", MemoryKind::Budget),
    ("anonymous", MemoryKind::Linux),
    ("memfd", MemoryKind::Shared),
    ("hugetlbfs", MemoryKind::Hugetlbfs),
];

/// One of these names.
pub fn named<T, const N: usize>(values: [(&'static str, T); N]) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let found = move |name: String| values.into_iter().find(|value| value.0 == name);
    let names = PossibleValuesParser::new(values.map(|value| value.0));
    names.map(move |name| found(name).expect("a possible value").1)
}

/// A number from 1 to this.
pub fn up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// The options on a command line: a preset of a test.
///
/// # Panics
/// If the line is wrong.
pub fn options_of<T: Args>(line: &str) -> T {
    let command = T::augment_args(Command::new("test")).no_binary_name(true);
    let matches = command.get_matches_from(line.split_whitespace());
    T::from_arg_matches(&matches).expect("the options of a preset")
}

/// Whether this process may use as many cores as these numbers name: each is a place among them,
/// from 0.
pub fn cores_exist(pin: &[usize]) -> bool {
    let usable = sched_getaffinity(None).map_or(0, |cores| cores.count() as usize);
    pin.iter().all(|&core| core < usable)
}
