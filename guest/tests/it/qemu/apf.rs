//! Async page faults under QEMU: without KVM, which offers none, and with KVM.
//!
//! QEMU offers them on request. Pages are then missing only if the host happens to swap. So this
//! checks the registers, and the wake-all after each enabling, not faults.

use super::machine::{Outcome, assert_ended, boot, boot_with, qemu_missing, temp};
use std::fs::{self, File};

/// `name=number` anywhere on the console.
fn number(outcome: &Outcome, name: &str) -> u32 {
    let mut words = outcome.console.split_whitespace();
    let value = words.find_map(|w| w.strip_prefix(name)?.strip_prefix('='));
    let value = value.and_then(|v| v.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {}", outcome.console))
}

#[test]
fn processors_go_offline_under_a_storm() {
    if qemu_missing() {
        return;
    }
    let params = "bytes=16M accesses=1000 switches=200 every_us=500 offline=4";
    let outcome = boot("apfstorm", "apfstorm", 3, params);
    assert_ended(&outcome, 0, "wrong=0");
    assert_eq!(number(&outcome, "enables"), 0, "QEMU alone has none");
    assert!(number(&outcome, "offlines") > 0, "{}", outcome.console);
}

#[test]
fn breaking_the_rules_without_async_faults_does_nothing() {
    if qemu_missing() {
        return;
    }
    for case in 0..9 {
        let params = format!("case={case} accesses=2000");
        let outcome = boot(&format!("apfhostile{case}"), "apfhostile", 2, &params);
        assert_ended(&outcome, 0, &format!("RESULT case={case} "));
        assert_eq!(number(&outcome, "wrong"), 0, "{}", outcome.console);
    }
    let outcome = boot("apfhostile", "apfhostile", 1, "case=9");
    assert_ended(&outcome, 2, "cannot run with case=9");
}

/// QEMU with KVM and its async page faults. Three options are for nested `kvm_pvm` hosts.
/// `-arch-capabilities`: they refuse to set that register. `qboot.rom`: they emulate firmware, and
/// SeaBIOS takes ten seconds. `syscall=ud2`: they have no syscall instruction.
fn boot_on_kvm(name: &str, smp: u32, params: &str) -> Outcome {
    let path = temp(&format!("kvm-{name}.elf"));
    let image = lacuna_guest::image(name).expect("in the catalog");
    fs::write(&path, image.file).unwrap();
    let cpu = "host,-arch-capabilities,+kvm-asyncpf,+kvm-asyncpf-int";
    let extra = ["-accel", "kvm", "-cpu", cpu, "-bios", "qboot.rom"];
    boot_with(&path, smp, &format!("{params} syscall=ud2"), &extra)
}

fn kvm_missing() -> bool {
    if qemu_missing() {
        return true;
    }
    let device = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = device {
        lacuna_skip::skip(format!("/dev/kvm cannot be used: {error}"));
        return true;
    }
    let hello = boot_on_kvm("hello", 1, "");
    if hello.code != Some(0) {
        lacuna_skip::skip("QEMU cannot run a guest on this /dev/kvm");
    }
    hello.code != Some(0)
}

#[test]
fn kvm_answers_each_enabling_with_a_wake_all() {
    if kvm_missing() {
        return;
    }
    // An emulated kernel needs 0.3 ms for a wake-up: more frequent ones would leave the other
    // threads no time.
    let params = "bytes=8M accesses=1000 switches=50 every_us=5000 offline=0";
    let off = boot_on_kvm("apfstorm", 1, &format!("{params} apf=off"));
    assert_ended(&off, 0, "wrong=0");
    assert_eq!((number(&off, "enables"), number(&off, "wake_all")), (0, 0));

    // KVM accepts bit 0 alone, and then delivers nothing.
    let original = boot_on_kvm("apfstorm", 1, &format!("{params} apf=pf"));
    assert_ended(&original, 0, "wrong=0");
    assert!(number(&original, "enables") > 0, "{}", original.console);
    assert_eq!(number(&original, "wake_all"), 0, "{}", original.console);

    let today = boot_on_kvm("apfstorm", 2, params);
    assert_ended(&today, 0, "wrong=0");
    let (enables, wake_all) = (number(&today, "enables"), number(&today, "wake_all"));
    let boots = 2; // each processor enables them once before a program does
    assert!(enables > 0, "{}", today.console);
    assert!(
        (boots..=boots + enables).contains(&wake_all),
        "{}",
        today.console
    );
    assert_eq!(number(&today, "lost"), 0, "{}", today.console);
}

#[test]
fn kvm_survives_broken_rules() {
    if kvm_missing() {
        return;
    }
    for case in [0, 2, 5, 7] {
        let params = format!("case={case} accesses=20000");
        let outcome = boot_on_kvm("apfhostile", 2, &params);
        assert_ended(&outcome, 0, "wrong=0");
        let refused = number(&outcome, "refused");
        assert_eq!(refused > 0, case == 2 || case == 5, "{}", outcome.console);
    }
}
