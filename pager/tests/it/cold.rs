//! Idle VMs leave memory, if the host has swap.

use crate::vmm::{Bed, Memory, Words, removals, word};
use lacuna_addr::{Level, PAGE_SIZE};
use lacuna_pager::Config;
use lacuna_skip::test;
use lacuna_source::{HandlerRegion, SourcePage, send_regions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The pager's socket, for a child that is a VMM.
const CHILD: &str = "LACUNA_PAGER_IDLE_CHILD";
const PAGES: u64 = 64;

/// The child: it reads all of its memory, is idle until a line arrives, and reads it again. Without
/// its variable this is no test.
#[test]
fn idle_child() {
    let Ok(path) = std::env::var(CHILD) else {
        return;
    };
    let (uffd, memory) = (removals(), Memory::anonymous(PAGES, PAGE_SIZE as u64));
    // SAFETY: 1. the memory stays mapped, and is accessed only by atomics.
    unsafe { uffd.register(memory.range()) }.unwrap();
    let socket = UnixStream::connect(path).unwrap();
    let region = HandlerRegion {
        memory: memory.range(),
        first: SourcePage(0),
        page: Level::L4K,
    };
    send_regions(&socket, &[region], uffd.as_fd()).unwrap();
    for said in ["has read", "has read again"] {
        for page in 0..PAGES {
            assert_eq!(memory.read_whole(page), word(page));
        }
        println!("{said}");
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
}

/// The pages of an idle VM go to swap, and come back with their content. Without swap the pager
/// says so.
#[test]
fn an_idle_vm_goes_to_swap() {
    drop(removals());
    let config = Config {
        cold_after: Some(Duration::from_secs(1)),
        ..Config::default()
    };
    let bed = Bed::with(Arc::new(Words), PAGES, config);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cold::idle_child", "--nocapture"]);
    command.env(CHILD, &bed.path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with("has read")));
    bed.wait("the page-out", |pager| {
        pager.stats().counts.paged_out > 0 || !bed.said().is_empty()
    });
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap();
    if swaps.lines().count() == 1 {
        assert!(bed.said()[0].contains("the host has no swap"));
    }
    input.write_all(b"\n").unwrap();
    assert!(lines.any(|line| line.ends_with("has read again")));
    drop(input);
    assert!(child.wait().unwrap().success());
    if let Some(said) = bed.said().pop() {
        lacuna_skip::skip(said);
    }
}
