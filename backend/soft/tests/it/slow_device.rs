//! Extremely slow, frozen or temporarily full swap devices, under whole guests.

use crate::common;

use common::{Lines, MIB, builder, image, run};
use lacuna_machine::{Builder as _, Ending, PlatformDevices};
use lacuna_skip::test;
use lacuna_soft::{Apf, HostStats, LatencySetting, Swap, VmBuilder};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// A stopped run ends, although its vCPUs wait for pages that take an hour.
#[test]
fn the_end_of_a_run_does_not_wait_for_pages() {
    let dial = LatencySetting::default();
    for apf in [Apf::Off, Apf::On] {
        dial.set(Duration::ZERO);
        let builder = VmBuilder {
            latency: dial.clone(),
            apf,
            ..builder(24, 6, 2, "rounds=1000")
        };
        let lines = Lines::default();
        let devices = PlatformDevices::new(lines.sink());
        let running = builder.start(&image("verify"), devices).unwrap();
        let mut looks = 0;
        while !running.wait_timeout(Duration::from_millis(100)) {
            looks += 1;
            if running.vm().host().stats().swapped_in > 1000 {
                dial.set(Duration::from_secs(3600));
            }
            // Now all vCPUs wait for pages that do not arrive.
            if looks > 20 && dial.ns() > 0 {
                running.stop();
            }
        }
        assert!(
            matches!(running.wait().ending, Ending::Stopped),
            "{}",
            lines.text()
        );
    }
}

/// A small file system that exists until it is dropped.
struct Volume {
    dir: tempfile::TempDir,
}

impl Volume {
    /// `None`, and a recorded skip, if mounting is not allowed.
    fn new() -> Option<Self> {
        let volume = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let file = volume.dir.path().join("image");
        let made = std::fs::File::create(&file).and_then(|file| file.set_len(96 << 20));
        made.unwrap();
        std::fs::create_dir(volume.mount()).unwrap();
        let made = call("mkfs.ext4", &["-q", "-F"], &[&file])
            .and_then(|()| call("mount", &["-o", "loop"], &[&file, &volume.mount()]));
        match made {
            Ok(()) => Some(volume),
            Err(reason) => {
                lacuna_skip::skip(reason);
                None
            }
        }
    }

    fn mount(&self) -> PathBuf {
        self.dir.path().join("mount")
    }

    fn freeze(&self, how: &str) {
        call("fsfreeze", &[how], &[&self.mount()]).unwrap();
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Nothing is mounted if the test was skipped.
        let _ = call("umount", &[], &[&self.mount()]);
    }
}

fn call(program: &str, options: &[&str], paths: &[&Path]) -> Result<(), String> {
    let done = Command::new(program).args(options).args(paths).output();
    match done {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(String::from_utf8_lossy(&done.stderr).trim().to_owned()),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

fn on(volume: &Volume) -> VmBuilder {
    VmBuilder {
        swap: Swap::File(volume.mount()),
        ..builder(48, 12, 2, "rounds=3")
    }
}

/// Runs `verify`, and calls `upset` beside it as soon as `when` holds.
fn beside(volume: &Volume, when: fn(&HostStats) -> bool, upset: impl FnOnce() + Send) {
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // Nothing is sent if the run ended before that.
            if receiver.recv().is_ok() {
                upset();
            }
        });
        let lines = Lines::default();
        let mut sender = Some(sender);
        let devices = PlatformDevices::new(lines.sink());
        let running = on(volume).start(&image("verify"), devices).unwrap();
        while !running.wait_timeout(Duration::from_millis(100)) {
            if when(&running.vm().host().stats())
                && let Some(sender) = sender.take()
            {
                sender.send(()).unwrap();
            }
        }
        let ending = running.wait().ending;
        assert!(sender.is_none(), "that never happened");
        assert!(
            matches!(ending, Ending::Exited(0)),
            "{ending:?}\n{}",
            lines.text()
        );
    });
}

#[test]
fn a_frozen_file_system_stops_the_guest_and_does_not_end_it() {
    let Some(volume) = Volume::new() else { return };
    let swaps = |stats: &HostStats| stats.swapped_out > 500;
    beside(&volume, swaps, || {
        volume.freeze("-f");
        thread::sleep(Duration::from_secs(4));
        volume.freeze("-u");
    });
}

/// The file system has no room for the guest's pages; later it has.
#[test]
fn a_full_file_system_is_used_again_when_it_has_room() {
    let Some(volume) = Volume::new() else { return };
    let filler = volume.mount().join("filler");
    // Fills the file system, but leaves less room than the guest needs.
    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 1 << 16]).is_ok() {}
    let all = file.metadata().unwrap().len();
    file.set_len(all - 12 * MIB).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let builder = on(&volume);
    let (outcome, text) = run(&builder, "verify");
    let Ending::Failed(error) = outcome.ending else {
        panic!("{:?}\n{text}", outcome.ending);
    };
    let error = error.to_string();
    assert!(error.contains("swap device full: swap file in "), "{error}");
    let is_full = |stats: &HostStats| stats.write_failures > 0;
    beside(&volume, is_full, || std::fs::remove_file(&filler).unwrap());
}
