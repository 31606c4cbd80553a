//! The kernel's async page faults without a kernel: tests `kernel/apf.c`, and each architecture's
//! part with a host in C.

use std::path::Path;
use std::process::Command;

fn builds_and_passes(arch: &str, source: &str) {
    if let Some(reason) = lacuna_guest::unavailable() {
        lacuna_skip::skip(reason);
        return;
    }
    let guest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("apf-test-{arch}"));
    let cc = std::env::var_os("LACUNA_GUEST_CC").unwrap_or("cc".into());
    let built = Command::new(cc)
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"])
        .args(["-fno-strict-aliasing", "-fno-toplevel-reorder", "-I"])
        .arg(guest.join("include"))
        .arg("-I")
        .arg(guest.join("kernel"))
        .arg("-I")
        .arg(guest.join("kernel/arch").join(arch))
        .arg(guest.join(source))
        .arg(guest.join("user/format.c"))
        .arg("-o")
        .arg(&out)
        .output()
        .expect("the compiler that built the guest runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let ran = Command::new(&out).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}");
    assert_eq!(said, "apf: ok\n");
}

#[test]
fn every_order_of_events_is_survived() {
    builds_and_passes("x86", "tests/apf.c");
}

#[test]
fn both_forms_of_arm64_are_survived() {
    builds_and_passes("arm64", "tests/apf_arm64.c");
}
