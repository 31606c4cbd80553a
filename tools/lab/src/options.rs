//! Parts of the command line that several commands have.

use crate::cores::Cores;
use crate::size::Size;
use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Command, ValueEnum};
use lacuna::dirty::{Backup, Delivery, RingSize};
use lacuna::memory::MemoryKind;
use lacuna::{Arch, Backend, PAGE_SIZE, VCPUS_MAX};

/// A value of an option: its name, the value, and the help text.
pub type Value<T> = (&'static str, T, &'static str);

/// `--arch`.
pub const ARCHS: [Value<Arch>; 2] = [
    ("x86_64", Arch::X86_64, "64-bit x86"),
    ("arm64", Arch::Arm64, "64-bit Arm: AArch64"),
];
const BACKENDS: [Value<Backend>; 2] = [
    (
        "soft",
        Backend::Soft,
        "Lacuna's own hypervisor, in user space; needs no KVM",
    ),
    ("kvm", Backend::Kvm, "Linux's KVM, through /dev/kvm"),
];
/// `--memory-kind`.
#[rustfmt::skip]
pub const KINDS: [Value<MemoryKind>; 5] = [
    ("pool", MemoryKind::Budget, "Frames of a budget of this process, which swaps pages out"),
    ("anonymous", MemoryKind::Linux, "Private memory of Linux, which swaps it out"),
    ("memfd", MemoryKind::Shared, "A shared memory file (memfd_create)"),
    ("hugetlbfs", MemoryKind::Hugetlbfs,
     "A shared memory file in reserved huge pages of 2 MiB"),
    ("hugetlbfs-1g", MemoryKind::Hugetlbfs1G, "One in reserved huge pages of 1 GiB"),
];

/// Where a guest's writes are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Recorder {
    /// One bit a page
    Bitmap,
    /// The largest ring for each vCPU
    Ring,
}

impl Recorder {
    /// The delivery of a VM. Writes without a ring go to `backup`.
    pub fn delivery(self, backup: Backup) -> Delivery {
        match self {
            Self::Bitmap => Delivery::Bitmap,
            Self::Ring => Delivery::Ring {
                size: RingSize::from_bytes(RingSize::BYTES_MAX).expect("it is its own limit"),
                backup,
            },
        }
    }
}

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

    /// Pages that are only provided together.
    pub fn unit(&self) -> usize {
        self.memory_kind.page_size().pages() as usize
    }

    /// Why there is no such guest: the options that exclude each other, and what to do.
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

/// The images of `arch`.
pub const fn guests(arch: Arch) -> lacuna_guest::Arch {
    match arch {
        Arch::Arm64 => lacuna_guest::Arch::Arm64,
        _ => lacuna_guest::Arch::X86_64,
    }
}

/// One of these values, by its name.
pub fn named<T, const N: usize>(values: [Value<T>; N]) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let found = move |name: String| values.into_iter().find(|value| value.0 == name);
    let possible = values.map(|(name, _, help)| PossibleValue::new(name).help(help));
    let names = PossibleValuesParser::new(possible);
    names.map(move |name| found(name).expect("a possible value").1)
}

/// The name of one of these values.
///
/// # Panics
/// If it is another value.
pub fn name_of<T: PartialEq>(values: &[Value<T>], value: &T) -> &'static str {
    let found = values.iter().find(|known| known.1 == *value);
    found.expect("a value of the option").0
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
