//! A program that blocks `SIGBUS` in its threads, as programs do that read signals elsewhere. A
//! page that the kernel takes away is lost, and does not end the process.

use crate::common;

use common::FakeMmu;
use lacuna_addr::PageCount;
use lacuna_host::HostError;
use std::process::Command;

/// Set in the process that blocks the signal.
const CHILD: &str = "LACUNA_BLOCKED";

#[lacuna_skip::test]
fn a_copy_by_a_thread_that_blocks_the_signal() {
    if std::env::var_os(CHILD).is_some() {
        return lose_a_page();
    }
    // `env` of GNU coreutils 8.31.
    let blocks = |program: &std::ffi::OsStr, args: &[&str]| {
        Command::new("env")
            .args(["--block-signal=BUS"])
            .arg(program)
            .args(args)
            .env(CHILD, "1")
            .output()
    };
    if !blocks("true".as_ref(), &[]).is_ok_and(|output| output.status.success()) {
        return lacuna_skip::skip("env(1) cannot block signals");
    }
    let program = std::env::current_exe().unwrap();
    let test = "blocked_signal::a_copy_by_a_thread_that_blocks_the_signal";
    let output = blocks(program.as_os_str(), &["--exact", test, "--nocapture"]).unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn lose_a_page() {
    let host = common::linux::host(512);
    let mmu = FakeMmu::of(&host);
    let range = host.add_linux_region(None, PageCount::new(4), mmu).unwrap();
    host.copy_in(range.start(), &[1; 8]).unwrap();
    host.take_away(range).unwrap();
    let lost = std::thread::scope(|scope| {
        let reader = scope.spawn(|| host.copy_out(range.start(), &mut [0; 8]));
        reader.join().unwrap()
    });
    assert!(matches!(lost, Err(HostError::Lost(_))), "{lost:?}");
    host.verify();
}
