//! The leaves that kernels read.

use super::*;
use crate::apic::ApicBus;
use crate::apic::tests::Wakes;
use std::sync::Arc;

fn apic(index: usize, vcpus: usize) -> Lapic {
    Lapic::new(
        index,
        Arc::new(ApicBus::new(vcpus, Arc::new(Wakes::default()))),
    )
}

/// CPUID with no features but the processor's own.
fn cpuid(apic: &Lapic, leaf: u32, subleaf: u32) -> Leaf {
    super::cpuid(
        &System::long_mode(0),
        apic,
        &Announced::default(),
        leaf,
        subleaf,
    )
}

/// EBX, EDX, ECX or EBX, ECX, EDX as text.
fn text(words: &[u32]) -> String {
    words
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .map(char::from)
        .collect()
}

#[test]
fn names() {
    let apic = apic(0, 1);
    let intel = cpuid(&apic, 0, 0);
    assert_eq!(text(&[intel.ebx, intel.edx, intel.ecx]), "GenuineIntel");
    let kvm = cpuid(&apic, 0x4000_0000, 0);
    assert_eq!(text(&[kvm.ebx, kvm.ecx, kvm.edx]), "KVMKVMKVM\0\0\0");
    assert_eq!((intel.eax, kvm.eax), (0x15, 0x4000_0010));
    let brand: String = (0x8000_0002..=0x8000_0004)
        .map(|leaf| cpuid(&apic, leaf, 0))
        .map(|l| text(&[l.eax, l.ebx, l.ecx, l.edx]))
        .collect();
    assert_eq!(
        brand.trim_end_matches('\0'),
        "Lacuna software vCPU @ 1.00GHz"
    );
}

#[test]
fn features_follow_the_machine() {
    let mut last = apic(5, 6);
    let leaf = cpuid(&last, 1, 0);
    assert_eq!(leaf.ebx, 5 << 24 | 6 << 16 | 8 << 8);
    assert_ne!(leaf.edx & (one::APIC | one::HTT), 0);
    last.set_base(0xfee0_0000).unwrap();
    assert_eq!(cpuid(&last, 1, 0).edx & one::APIC, 0);
    assert_eq!(cpuid(&apic(0, 1), 1, 0).edx & one::HTT, 0);
    assert_ne!(leaf.ecx & one::PCID, 0);
    assert_eq!(cpuid(&last, 7, 0).ebx & 1 << 10, 0, "no INVPCID");
    let no_vectors = 1 << 0 | 1 << 23 | 1 << 24 | 1 << 25 | 1 << 26;
    assert_eq!(leaf.edx & no_vectors, 0, "FPU, MMX, FXSR, SSE, SSE2");
}

#[test]
fn kvm_offers_no_clock_and_what_the_hypervisor_adds() {
    let features = cpuid(&apic(0, 1), 0x4000_0001, 0).eax;
    let absent = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 10 | 1 << 14;
    assert_eq!(features & absent, 0);
    let more = 1 << 4 | 1 << 14;
    let announced = Announced {
        kvm_features: more,
        leaves: None,
    };
    let with = |leaf| super::cpuid(&System::long_mode(0), &apic(0, 1), &announced, leaf, 0);
    assert_eq!(with(0x4000_0001).eax, features | more);
    assert_eq!(with(1), cpuid(&apic(0, 1), 1, 0));
    let timing = cpuid(&apic(0, 1), 0x4000_0010, 0);
    assert_eq!((timing.eax, timing.ebx), (1_000_000, 1_000_000));
}

#[test]
fn topology_names_every_vcpu() {
    for (vcpus, shift) in [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8)] {
        let apic = apic(vcpus - 1, vcpus);
        let id = vcpus as u32 - 1;
        let level = |n| cpuid(&apic, 0xb, n);
        assert_eq!(
            level(0),
            Leaf {
                eax: 0,
                ebx: 1,
                ecx: 0x100,
                edx: id
            }
        );
        assert_eq!(
            level(1),
            Leaf {
                eax: shift,
                ebx: vcpus as u32,
                ecx: 0x201,
                edx: id
            }
        );
        assert_eq!(
            level(2),
            Leaf {
                eax: 0,
                ebx: 0,
                ecx: 2,
                edx: id
            }
        );
    }
}

#[test]
fn unknown_leaves_are_zero() {
    let apic = apic(0, 1);
    for leaf in [0x16, 0x80, 0x4000_0002, 0x4000_0011, 0x8000_0009, u32::MAX] {
        assert_eq!(cpuid(&apic, leaf, 0), Leaf::default(), "{leaf:#x}");
    }
    assert_eq!(cpuid(&apic, 7, 1), Leaf::default());
}

#[test]
fn xd_disable_hides_nx() {
    let nx = |misc_enable| {
        let mut sys = System::long_mode(0);
        sys.misc_enable = misc_enable;
        super::cpuid(&sys, &apic(0, 1), &Announced::default(), 0x8000_0001, 0).edx & NX
    };
    assert_eq!((nx(0x1801), nx(0x1801 | 1 << 34)), (NX, 0));
}
