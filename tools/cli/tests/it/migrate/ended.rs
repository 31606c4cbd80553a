//! Guests that are ended at the destination while the rest of their memory arrives.

use super::destination::Destination;
use super::proxy::{Moment, Proxy};
use super::{ENDLESS, Guest, SOME, migrate, until};
use lacuna_skip::test;
use rustix::process::{Pid, Signal, kill_process};
use std::sync::mpsc::channel;
use tempfile::TempDir;

/// What ends the guest.
#[derive(Clone, Copy, Debug)]
enum By {
    Stop,
    Signal(Signal),
}

/// The destination's exit code says what has ended the guest. The source ends too: its pages are
/// needed nowhere.
#[test]
fn a_guest_that_is_ended_there_needs_its_source_no_more() {
    for (mode, by, code, reason) in [
        (
            "postcopy",
            By::Signal(Signal::TERM),
            143,
            "interrupted by SIGTERM",
        ),
        (
            "postcopy",
            By::Signal(Signal::INT),
            130,
            "interrupted by SIGINT",
        ),
        (
            "postcopy",
            By::Stop,
            4,
            "stopped through its control socket",
        ),
    ] {
        let folder = TempDir::new().unwrap();
        let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "");
        let proxy = Proxy::start(folder.path(), &to.address);
        // The state, and some of the missing pages, have passed. No more of these pages pass.
        let (end, is_over) = channel::<()>();
        proxy.at(Moment::Bytes(SOME as u64), move || _ = is_over.recv());
        let guest = Guest::start(folder.path(), ENDLESS);
        let mut request = migrate(&proxy.address);
        request["mode"] = mode.into();
        let mut asking = guest.client();
        asking.send(format!("{request}\n").as_bytes());
        until(&mut to.client(), |status| {
            status["arriving"]["stage"] == "rest"
        });
        match by {
            By::Stop => assert_eq!(to.client().state("stop"), "ended"),
            By::Signal(signal) => kill_process(Pid::from_child(&to.child), signal).unwrap(),
        }
        let (found, json, errors) = to.end();
        assert_eq!(found, Some(code), "{by:?}: {errors} {json}");
        assert!(
            json["received"]["missing"].as_u64() > Some(0),
            "{by:?}: {json}"
        );
        let mut answer = asking.answer();
        while !answer["progress"].is_null() {
            answer = asking.answer();
        }
        assert_eq!(answer["migrated"]["ended"], reason, "{answer}");
        let (found, json) = guest.end();
        let told = format!("moved to {}, where it has ended: {reason}", proxy.address);
        assert_eq!((found, &json["outcome"]), (0, &told.into()), "{json}");
        drop(end);
    }
}
