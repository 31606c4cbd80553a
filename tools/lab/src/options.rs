//! Parts of the options of `lacuna test`, as clap reads them.

use crate::cores::Cores;
use crate::size::Size;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Command};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Backend, PAGE_SIZE, VCPUS_MAX};

pub const ARCHS: [(&str, Arch); 2] = [("x86_64", Arch::X86_64), ("arm64", Arch::Arm64)];
pub const BACKENDS: [(&str, Backend); 2] = [("soft", Backend::Soft), ("kvm", Backend::Kvm)];
pub const KINDS: [(&str, MemoryKind); 4] = [
    ("pool", MemoryKind::Budget),
    ("anonymous", MemoryKind::Linux),
    ("memfd", MemoryKind::Shared),
    ("hugetlbfs", MemoryKind::Hugetlbfs),
];

/// The guest of a test.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct GuestOptions {
    /// Virtual processors
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(VCPUS_MAX as u64))]
    pub vcpus: usize,
    /// Memory that each vCPU accesses
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub bytes: Size,
    /// All vCPUs access the same memory, instead of a share each
    #[arg(long)]
    pub overlap: bool,
    /// Access the pages in a random order. A test that first writes to all pages does so in the
    /// addresses' order
    #[arg(long)]
    pub random: bool,
    /// Where the guest's memory is
    #[arg(long, value_name = "KIND", default_value = "pool", value_parser = named(KINDS))]
    pub memory_kind: MemoryKind,
    /// Memory slots that the memory is split into
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to(32))]
    pub slots: usize,
    /// The host's processors on which the vCPUs' threads run, one each, as in 0-3 or 0,2
    #[arg(long, value_name = "LIST")]
    pub pin: Option<Cores>,
    /// The hypervisor
    #[arg(long, value_name = "soft|kvm", default_value = "soft", value_parser = named(BACKENDS))]
    pub backend: Backend,
    /// The guest's processor
    #[arg(long, value_name = "ARCH", default_value = "x86_64", value_parser = named(ARCHS))]
    pub arch: Arch,
}

impl GuestOptions {
    /// Pages that one vCPU accesses, and all of them together.
    pub const fn pages(&self) -> (u64, u64) {
        let each = self.bytes.0 / PAGE_SIZE as u64;
        let shares = if self.overlap { 1 } else { self.vcpus as u64 };
        (each, each * shares)
    }

    /// Pages that the memory has only together.
    pub fn unit(&self) -> usize {
        match self.memory_kind {
            MemoryKind::Hugetlbfs => 512,
            _ => 1,
        }
    }

    /// Why there is no such guest.
    pub fn check(&self) -> Result<(), &'static str> {
        let (_, all) = self.pages();
        match () {
            () if self.slots as u64 > all.div_ceil(self.unit() as u64) => {
                Err("--slots: give no more slots than pages, or huge pages in hugetlbfs")
            }
            () if self.backend == Backend::Kvm && self.arch != Arch::X86_64 => {
                Err("--backend kvm has x86-64 guests only: leave --arch out")
            }
            () => Ok(()),
        }
    }
}

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
