//! The host pauses a kind of thread by a word on the status page.

use super::machine::{assert_ended, boot_with, qemu_missing, temp};
use lacuna_guest::status::{self, GuestState, Kind, Status};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

/// The faulter ends the guest after this many accesses: far more than it makes during the test.
const GOAL: u64 = 1_000_000_000_000;

/// Guest memory as a file, with the status page somewhere in it.
struct Memory {
    file: File,
    page: u64,
}

impl Memory {
    /// Waits until all three threads run, or `over` says that they never will.
    fn find(path: &std::path::Path, over: impl Fn() -> bool) -> Option<Self> {
        while !over() {
            thread::sleep(Duration::from_millis(20));
            let Ok(bytes) = fs::read(path) else { continue };
            let pages = bytes.chunks_exact(status::PAGE_BYTES);
            let Some(index) = pages.clone().position(|p| p.starts_with(b"LACUNAST")) else {
                continue;
            };
            let file = File::options().write(true).read(true).open(path).unwrap();
            let page = (index * status::PAGE_BYTES) as u64;
            let memory = Self { file, page };
            let status = memory.status();
            if status.state == GuestState::Running && status.threads.iter().all(|t| t.counter > 0) {
                return Some(memory);
            }
        }
        None
    }

    fn status(&self) -> Status {
        let mut page = [0; status::PAGE_BYTES];
        self.file.read_exact_at(&mut page, self.page).unwrap();
        Status::parse(&page).unwrap()
    }

    fn pause(&self, bits: u32) {
        let at = self.page + status::PAUSED_AT as u64;
        self.file.write_all_at(&bits.to_le_bytes(), at).unwrap();
    }

    /// The counter of a kind now, and after the other kind has counted `by` further. Once `over`
    /// says that the guest has ended, nothing counts any more, and the test fails.
    fn while_other_counts(&self, kind: Kind, by: u64, over: impl Fn() -> bool) -> (u64, u64) {
        let counter = |status: &Status, same: bool| {
            let of_kind = |t: &&status::Thread| t.kind != Kind::Other && (t.kind == kind) == same;
            status
                .threads
                .iter()
                .find(of_kind)
                .expect("it runs")
                .counter
        };
        let before = self.status();
        loop {
            let now = self.status();
            if counter(&now, false) > counter(&before, false) + by {
                return (counter(&before, true), counter(&now, true));
            }
            assert!(!over(), "the guest ended before {kind:?} was tested");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the guest: sets the faulter's counter to its goal. The faulter may overwrite it with
    /// its own count at the same time, so this repeats until `over` says that the guest has ended.
    fn end(&self, over: impl Fn() -> bool) {
        let threads = self.status().threads;
        let faulter = threads.iter().position(|t| t.kind == Kind::Faulter);
        let entry = status::ENTRIES_AT + faulter.expect("it runs") * status::ENTRY_BYTES;
        let at = self.page + (entry + status::COUNTER_AT) as u64;
        while !over() {
            self.file.write_all_at(&GOAL.to_le_bytes(), at).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn the_host_pauses_threads_by_kind() {
    if qemu_missing() {
        return;
    }
    let (image, path) = (temp("pause.elf"), temp("pause.memory"));
    let bm = lacuna_guest::image("bm").expect("in the catalog");
    fs::write(&image, bm.file).unwrap();
    let _ = fs::remove_file(&path); // left by an earlier run that was interrupted
    let file = path.display();
    let backend = format!("memory-backend-file,id=ram,size=64M,share=on,mem-path={file}");
    let extra = ["-object", &backend, "-machine", "memory-backend=ram"];
    let params = format!("faulters=1 workers=1 accesses={GOAL} bytes=4M populate=1");
    thread::scope(|scope| {
        let guest = scope.spawn(|| boot_with(&image, 1, &params, &extra));
        let over = || guest.is_finished();
        let memory = Memory::find(&path, over).expect("the guest runs");
        for kind in [Kind::Faulter, Kind::Worker] {
            memory.pause(kind.paused_bit());
            // A thread may finish its step. Then its counter must not change.
            while {
                let (before, after) = memory.while_other_counts(kind, 20_000, over);
                before != after
            } {}
            memory.pause(0);
            while {
                let (before, after) = memory.while_other_counts(kind, 20_000, over);
                before == after
            } {}
        }
        memory.end(over);
        assert_ended(&guest.join().unwrap(), 0, "RESULT workers_total=");
    });
    fs::remove_file(&path).unwrap();
}
