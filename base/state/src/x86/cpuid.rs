//! CPUID: the answers of the common processor model, and the features reported to a guest.

use crate::{Apf, StateError};
use serde::{Deserialize, Serialize};

/// EAX, EBX, ECX and EDX.
pub type Answer = [u32; 4];

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// One answer of CPUID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// EAX before.
    pub function: u32,
    /// ECX before; 0 for a function that ignores it.
    pub index: u32,
    /// The four registers after.
    pub answer: Answer,
}

/// The words of CPUID that announce features.
const WORDS: [(u32, usize); 9] = [
    (1, ECX),
    (1, EDX),
    (7, EBX),
    (7, ECX),
    (7, EDX),
    (0x8000_0001, ECX),
    (0x8000_0001, EDX),
    (0x8000_0007, EDX),
    (KVM_FEATURES, EAX),
];

/// The names of [`WORDS`], for bits without an entry in [`NAMES`].
const WORD_NAMES: [&str; WORDS.len()] = [
    "features.1.ecx",
    "features.1.edx",
    "features.7.ebx",
    "features.7.ecx",
    "features.7.edx",
    "features.80000001.ecx",
    "features.80000001.edx",
    "features.80000007.edx",
    "features.kvm",
];

/// The bits that are no features: OSXSAVE follows CR4, and HTT means several processors.
const NO_FEATURE: [(usize, u32); 2] = [(0, 27), (1, 28)];

/// Word and bit of features, the common model's first.
const NAMES: [(usize, u32, &str); 38] = [
    (0, 21, "features.x2apic"),
    (0, 24, "features.tsc_deadline"),
    (0, 31, "features.hypervisor"),
    (1, 2, "features.de"),
    (1, 3, "features.pse"),
    (1, 4, "features.tsc"),
    (1, 5, "features.msr"),
    (1, 6, "features.pae"),
    (1, 8, "features.cx8"),
    (1, 9, "features.apic"),
    (1, 13, "features.pge"),
    (1, 15, "features.cmov"),
    (1, 16, "features.pat"),
    (1, 19, "features.clflush"),
    (5, 0, "features.lahf_lm"),
    (6, 11, "features.syscall"),
    (6, 20, "features.nx"),
    (6, 29, "features.lm"),
    (7, 8, "features.invariant_tsc"),
    (8, 1, "features.kvm_nop_io_delay"),
    (8, 4, "features.kvm_async_pf"),
    (8, 14, "features.kvm_async_pf_int"),
    (0, 0, "features.sse3"),
    (0, 13, "features.cx16"),
    (0, 17, "features.pcid"),
    (0, 23, "features.popcnt"),
    (0, 26, "features.xsave"),
    (0, 28, "features.avx"),
    (1, 0, "features.fpu"),
    (1, 23, "features.mmx"),
    (1, 24, "features.fxsr"),
    (1, 25, "features.sse"),
    (1, 26, "features.sse2"),
    (2, 7, "features.smep"),
    (5, 5, "features.lzcnt"),
    (6, 26, "features.pdpe1gb"),
    (6, 27, "features.rdtscp"),
    (8, 10, "features.kvm_async_pf_vmexit"),
];

/// How many of [`NAMES`] the common model has: those that KVM offers even with shadow paging, as in
/// `kvm_pvm`. The last two of them are offered with [`Apf::On`] alone.
const COMMON: usize = 22;
const COMMON_APF: usize = 2;

/// The features that a processor announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Features([u32; WORDS.len()]);

impl Features {
    /// The features of a processor with the CPUID `answer`, by function and index.
    pub fn of(mut answer: impl FnMut(u32, u32) -> Answer) -> Self {
        let mut words = WORDS.map(|(function, register)| answer(function, 0)[register]);
        for (word, bit) in NO_FEATURE {
            words[word] &= !(1 << bit);
        }
        Self(words)
    }

    /// The features of the common model.
    pub fn common(apf: Apf) -> Self {
        let count = match apf {
            Apf::Off => COMMON - COMMON_APF,
            Apf::On => COMMON,
        };
        let mut words = [0; WORDS.len()];
        for (word, bit, _) in &NAMES[..count] {
            words[*word] |= 1 << bit;
        }
        Self(words)
    }

    /// A feature of `self` that `other` lacks: its name and its bit, or, for unnamed features, all
    /// such bits of their word.
    fn missing_in(&self, other: &Self) -> Option<(&'static str, u64)> {
        let lacks = |word: usize| self.0[word] & !other.0[word];
        let named = (NAMES.iter()).find(|(word, bit, _)| lacks(*word) >> bit & 1 == 1);
        let unnamed = (0..WORDS.len()).find(|word| lacks(*word) != 0);
        match (named, unnamed) {
            (Some((_, bit, name)), _) => Some((name, 1 << bit)),
            (None, Some(word)) => Some((WORD_NAMES[word], lacks(word).into())),
            (None, None) => None,
        }
    }

    /// Checks that a processor with the features `own` can resume a guest that sees `self`.
    ///
    /// # Errors
    /// [`StateError::Feature`].
    pub fn check_in(&self, own: &Self) -> Result<(), StateError> {
        let missing = self.missing_in(own);
        missing.map_or(Ok(()), |(field, bits)| {
            Err(StateError::Feature { field, bits })
        })
    }

    fn word(&self, function: u32, register: usize) -> u32 {
        let word = WORDS.iter().position(|word| *word == (function, register));
        word.map_or(0, |word| self.0[word])
    }
}

/// The last basic leaf is all zeros: KVM answers a leaf beyond the last with the last.
const MAX_BASIC: u32 = 0x16;
const MAX_EXTENDED: u32 = 0x8000_0008;
const SIGNATURE: u32 = 0x4000_0000;
const KVM_FEATURES: u32 = 0x4000_0001;
/// The leaf of clock frequencies, as in QEMU and other VMMs: EAX = TSC kHz, EBX = APIC timer kHz.
const CLOCKS: u32 = 0x4000_0010;
/// The local APIC's timer counts nanoseconds.
const APIC_KHZ: u32 = 1_000_000;
/// Family 6, model 15: the first Intel model with all of these features, and on few lists of
/// quirks.
const MODEL: u32 = 0x0000_06fb;
const BRAND: &[u8; 48] =
    b"Lacuna common vCPU\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Enough for 511G of memory and the hole below 4G; every processor with VMX or SVM of the last
/// ten years has them.
const PHYSICAL_BITS: u32 = 40;
const LINEAR_BITS: u32 = 48;

/// One processor of a VM with the common model. Its CPUID is the same on every backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Common {
    /// Its number, which is its APIC ID.
    pub index: u32,
    /// The number of processors.
    pub vcpus: u32,
    /// Frequency of the TSC.
    pub tsc_khz: u32,
    /// Whether asynchronous page faults are offered.
    pub apf: Apf,
}

impl Common {
    /// All nonzero answers.
    ///
    /// The vendor is Intel: it decides which of the two vendors' corner cases hold. There is no
    /// FPU, MMX or SSE.
    pub fn leaves(&self) -> Vec<Leaf> {
        let features = Features::common(self.apf);
        let f = |function, register| features.word(function, register);
        let brand = |part: usize| {
            let word = |i: usize| {
                let at = part * 16 + i * 4;
                u32::from_le_bytes([BRAND[at], BRAND[at + 1], BRAND[at + 2], BRAND[at + 3]])
            };
            [0, 1, 2, 3].map(word)
        };
        let cores = self.vcpus.next_power_of_two().ilog2();
        let all: [(u32, u32, Answer); 17] = [
            (0, 0, named(MAX_BASIC, b"GenuntelineI")),
            (
                1,
                0,
                [MODEL, self.numbers(), f(1, ECX), f(1, EDX) | self.several()],
            ),
            (7, 0, [0, f(7, EBX), 0, 0]),
            // One package of cores without hyper-threads.
            (0xb, 0, [0, 1, 1 << 8, self.index]),
            (0xb, 1, [cores, self.vcpus, 2 << 8 | 1, self.index]),
            (0xb, 2, [0, 0, 2, self.index]),
            (0x15, 0, self.crystal()),
            (MAX_BASIC, 0, [0; 4]),
            (SIGNATURE, 0, named(CLOCKS, b"KVMKVMKVM\0\0\0")),
            (KVM_FEATURES, 0, [f(KVM_FEATURES, EAX), 0, 0, 0]),
            (CLOCKS, 0, [self.tsc_khz, APIC_KHZ, 0, 0]),
            (0x8000_0000, 0, [MAX_EXTENDED, 0, 0, 0]),
            (
                0x8000_0001,
                0,
                [0, 0, f(0x8000_0001, ECX), f(0x8000_0001, EDX)],
            ),
            (0x8000_0002, 0, brand(0)),
            (0x8000_0003, 0, brand(1)),
            (0x8000_0007, 0, [0, 0, 0, f(0x8000_0007, EDX)]),
            (MAX_EXTENDED, 0, [LINEAR_BITS << 8 | PHYSICAL_BITS, 0, 0, 0]),
        ];
        let leaf = |(function, index, answer)| Leaf {
            function,
            index,
            answer,
        };
        all.map(leaf).to_vec()
    }

    /// The missing feature, if a host with this CPUID cannot run the model.
    pub fn missing_in(apf: Apf, mut host: impl FnMut(u32, u32) -> Answer) -> Option<&'static str> {
        if host(MAX_EXTENDED, 0)[EAX] & 0xff < PHYSICAL_BITS {
            return Some("40 physical address bits");
        }
        let missing = Features::common(apf).missing_in(&Features::of(host));
        missing.map(|(name, _)| name)
    }

    /// Leaf 1 EBX: APIC ID, number of processors, the cache line in units of 8 bytes.
    fn numbers(&self) -> u32 {
        let line = 64 / 8;
        self.index.min(0xff) << 24 | self.vcpus.min(0xff) << 16 | line << 8
    }

    /// Leaf 1 EDX: HTT.
    fn several(&self) -> u32 {
        u32::from(self.vcpus > 1) << 28
    }

    /// TSC = crystal * 1 / 1. Zeros if the frequency does not fit.
    fn crystal(&self) -> Answer {
        self.tsc_khz
            .checked_mul(1000)
            .map_or([0; 4], |hertz| [1, 1, hertz, 0])
    }
}

/// A leaf with a name in EBX, ECX, EDX.
fn named(max: u32, name: &[u8; 12]) -> Answer {
    let word = |i: usize| u32::from_le_bytes([name[i], name[i + 1], name[i + 2], name[i + 3]]);
    [max, word(0), word(4), word(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(apf: Apf) -> Common {
        Common {
            index: 1,
            vcpus: 2,
            tsc_khz: 2_500_000,
            apf,
        }
    }

    fn answer(leaves: &[Leaf], function: u32, index: u32) -> Answer {
        let leaf = leaves
            .iter()
            .find(|l| (l.function, l.index) == (function, index));
        leaf.map_or([0; 4], |leaf| leaf.answer)
    }

    #[test]
    fn the_leaves_announce_the_common_features_and_no_fpu() {
        for apf in [Apf::Off, Apf::On] {
            let leaves = common(apf).leaves();
            let found = Features::of(|function, index| answer(&leaves, function, index));
            assert_eq!(found, Features::common(apf));
            let vectors = 1 << 0 | 1 << 23 | 1 << 24 | 1 << 25 | 1 << 26;
            assert_eq!(answer(&leaves, 1, 0)[EDX] & vectors, 0);
            assert_eq!(answer(&leaves, CLOCKS, 0), [2_500_000, APIC_KHZ, 0, 0]);
        }
        let on = Features::common(Apf::On);
        assert_eq!(
            on.missing_in(&Features::common(Apf::Off)),
            Some(("features.kvm_async_pf", 16))
        );
    }

    #[test]
    fn what_a_host_lacks_has_a_name() {
        let leaves = common(Apf::On).leaves();
        let host = |function, index| answer(&leaves, function, index);
        assert_eq!(Common::missing_in(Apf::On, host), None);
        let without = |function: u32, register: usize, bit: u32| {
            let host = |f, i| {
                let mut answer = answer(&leaves, f, i);
                if f == function {
                    answer[register] &= !(1u32 << bit);
                }
                answer
            };
            Common::missing_in(Apf::Off, host)
        };
        assert_eq!(without(1, EDX, 13), Some("features.pge"));
        assert_eq!(
            without(MAX_EXTENDED, EAX, 5),
            Some("40 physical address bits")
        );
    }

    #[test]
    fn a_bit_without_a_name_is_named_by_its_word() {
        let mut more = Features::common(Apf::Off);
        more.0[3] |= 6;
        let missing = more.missing_in(&Features::common(Apf::Off));
        assert_eq!(missing, Some(("features.7.ecx", 6)));
    }
}
