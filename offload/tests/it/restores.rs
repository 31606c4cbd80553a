//! Restores on demand: faults, the background, pages that are gone.

use crate::round_trips::restored;
use crate::vmm::{Guest, PAGE, Received, content, impatient, saved, skip_with_huge_pages};
use lacuna_offload::wire::Command;
use lacuna_offload::{Settings, Snapshot, Sources, When, restore};
use lacuna_skip::test;
use lacuna_source::{PageRequest, PageSource};
use rustix::fs::{FallocateFlags, fallocate};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LAZY: When = When::OnDemand { fill: Some(0) };

/// Each fault puts its pages in place, and nothing else does.
#[test]
fn only_what_faults_want() {
    skip_with_huge_pages();
    let guest = Guest::new();
    let (folder, _) = saved(&guest, Command::CompletePaused);
    // A guest may need no page for longer than a VMM may be silent.
    let (daemon, mut received) = restored(folder.path(), LAZY, impatient());
    let mut faults = received.faults.take().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let high = 4 << 30;
    let some = [PAGE, 6 * PAGE, 7 * PAGE, high];
    for (gpa, length) in [
        (PAGE, PAGE),
        (6 * PAGE, 2 * PAGE),
        (high, PAGE),
        (PAGE, PAGE),
    ] {
        assert_eq!(faults.fault(gpa, length), (true, Vec::new()));
    }
    for gpa in guest.all() {
        let wanted = some.contains(&gpa).then(|| content(gpa));
        assert!(received.page(&guest, gpa) == wanted, "{gpa:#x}");
    }
    // The guest's balloon takes a page away. Its old content does not return.
    let file = &received.files[&5];
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, punch, PAGE, PAGE).unwrap();
    assert_eq!(faults.fault(PAGE, PAGE), (true, Vec::new()));
    assert!(received.page(&guest, PAGE) == Some([0; PAGE as usize]));
    drop(faults);
    let restored = daemon.join().unwrap();
    assert_eq!((restored.faults, restored.in_place), (5, 4));
    assert!(!restored.is_running);
}

/// All pages arrive without a fault, and none replaces what the guest has written since.
#[test]
fn the_background_fills_the_rest() {
    skip_with_huge_pages();
    let guest = Guest::new();
    let (folder, _) = saved(&guest, Command::Complete);
    let fill = Some(1 << 20);
    let when = When::OnDemand { fill };
    let (daemon, mut received) = restored(folder.path(), when, Settings::default());
    let mut faults = received.faults.take().unwrap();
    let high = (4 << 30) + 15 * PAGE;
    assert_eq!(faults.fault(high, PAGE), (true, Vec::new()));
    let wrote = [0x77; PAGE as usize];
    received.files[&3].write_all_at(&wrote, 47 * PAGE).unwrap();
    while guest.all().any(|gpa| received.page(&guest, gpa).is_none()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    for gpa in guest.all() {
        let wanted = if gpa == high { wrote } else { content(gpa) };
        assert!(received.page(&guest, gpa) == Some(wanted), "{gpa:#x}");
    }
    drop(faults);
    let restored = daemon.join().unwrap();
    assert_eq!((restored.in_place, restored.faults), (48, 1));
}

/// Answers no request, or fails those of one page.
#[derive(Default)]
struct Odd {
    kept: Mutex<Vec<PageRequest>>,
    lost: Option<u64>,
}

impl PageSource for Odd {
    fn describe(&self) -> String {
        "odd".into()
    }

    fn fetch(&self, request: PageRequest) {
        match self.lost {
            None => self.kept.lock().unwrap().push(request),
            Some(lost) if request.page().0 == lost => _ = request.fail("the disk is broken"),
            Some(_) => _ = request.provide(&[5; PAGE as usize]),
        }
    }
}

/// No fault waits for the background, also not for a page that the background has asked for. A lost
/// page is refused, and the others are served. A wish to end waits for the VM.
#[test]
fn faults_are_served_whatever_the_background_does() {
    skip_with_huge_pages();
    let guest = Guest::new();
    let (folder, _) = saved(&guest, Command::Complete);
    let socket = folder.path().join("restore");
    let listener = UnixListener::bind(&socket).unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&said);
    let settings = Settings {
        report: Arc::new(move |text: &str| to.lock().unwrap().push(text.to_owned())),
        ..Settings::default()
    };
    let (stop, from) = (Arc::clone(&settings.stop), folder.path().join("saved"));
    let daemon = std::thread::spawn(move || {
        let snapshot = Snapshot::open(&from).unwrap();
        let (faults, fill) = (
            Odd {
                lost: Some(2),
                ..Odd::default()
            },
            Odd::default(),
        );
        let sources = Sources {
            faults: &faults,
            fill: &fill,
        };
        // The stuck background ends with the VM: it has asked, and gets its answers late.
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                let when = When::OnDemand { fill: None };
                restore(&snapshot, &socket, sources, when, &settings)
            });
            while !ended.is_finished() {
                if settings.stop.load(Ordering::Relaxed) {
                    fill.kept.lock().unwrap().clear();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            ended.join().unwrap().unwrap()
        })
    });
    let mut received = Received::receive(&listener, true);
    received.main.answer(true);
    let mut faults = received.faults.take().unwrap();
    assert_eq!(faults.fault(0, PAGE), (true, Vec::new()));
    assert_eq!(faults.fault(2 * PAGE, PAGE), (false, Vec::new()));
    // Beyond memory, no whole page, nothing.
    for (gpa, length) in [(32 * PAGE, PAGE), (1, PAGE), (0, 0), (u64::MAX, u64::MAX)] {
        assert_eq!(faults.fault(gpa, length), (false, Vec::new()));
    }
    assert_eq!(faults.fault(PAGE, PAGE), (true, Vec::new()));
    assert!(received.page(&guest, PAGE) == Some([5; PAGE as usize]));
    assert_eq!(received.page(&guest, 2 * PAGE), None);
    stop.store(true, Ordering::Relaxed);
    let needs = |said: &Vec<String>| said.iter().any(|text| text.contains("needs this daemon"));
    while !needs(&said.lock().unwrap()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(faults.fault(3 * PAGE, PAGE), (true, Vec::new()));
    drop(faults);
    assert_eq!(daemon.join().unwrap().faults, 3);
    let said = said.lock().unwrap();
    assert!(
        said.iter()
            .any(|text| text.contains("page 2 is lost: the disk is broken"))
    );
    assert!(said.iter().any(|text| text.contains("in no memory slot")));
}

/// Before the VM resumes, a lost page ends the restore, and the daemon does not connect to the VMM.
#[test]
fn a_lost_page_restores_no_vm() {
    let (folder, _) = saved(&Guest::new(), Command::Complete);
    let snapshot = Snapshot::open(&folder.path().join("saved")).unwrap();
    let socket = folder.path().join("restore");
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let odd = Odd {
        lost: Some(40),
        ..Odd::default()
    };
    let sources = Sources {
        faults: &odd,
        fill: &odd,
    };
    let error = restore(
        &snapshot,
        &socket,
        sources,
        When::Before,
        &Settings::default(),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("page 40"), "{error}");
    assert!(listener.accept().is_err());
}

/// A VMM that is slow to answer the end may run the VM, so its faults are served.
#[test]
fn a_slow_vmm_keeps_its_pages() {
    skip_with_huge_pages();
    let guest = Guest::new();
    let (folder, _) = saved(&guest, Command::Complete);
    let snapshot = Snapshot::open(&folder.path().join("saved")).unwrap();
    let socket = folder.path().join("restore");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut received = Received::receive(&listener, true);
            let mut faults = received.faults.take().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(faults.fault(PAGE, PAGE), (true, Vec::new()));
            assert!(received.page(&guest, PAGE) == Some(content(PAGE)));
        });
        let pages = snapshot.pages().unwrap();
        let sources = Sources {
            faults: &pages,
            fill: &pages,
        };
        let error = restore(&snapshot, &socket, sources, LAZY, &impatient()).unwrap_err();
        assert!(
            error.to_string().contains("sent nothing for 100ms"),
            "{error}"
        );
    });
}
