//! The control socket of a destination while no guest is announced.

use super::destination::{Destination, Until, relay};
use super::{ENDLESS, Guest, SOME, migrate};
use lacuna_skip::test;
use serde_json::json;
use tempfile::TempDir;

/// The destination says where it waits, and refuses requests that need a guest. A client stays
/// connected when a guest arrives.
#[test]
fn a_destination_answers_before_its_guest_comes() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "--resident 16M");
    let mut client = to.client();
    let status = client.ask(json!({"command": "status"}))["status"].clone();
    assert_eq!(status["state"], "waiting", "{status}");
    assert_eq!(status["waiting"], to.address, "{status}");
    assert!(status["arriving"].is_null(), "{status}");
    for (command, told) in [
        ("cancel", "no guest was announced"),
        ("keep", "no guest was announced"),
        ("pause", "no guest is here"),
        ("resume", "no guest is here"),
    ] {
        let text = client.refused(json!({ "command": command }));
        assert!(text.contains(told) && text.contains(&to.address), "{text}");
    }
    // A part of a line; the rest follows when the guest is there.
    client.send(b"{\"command\":");
    let guest = Guest::start(folder.path(), ENDLESS);
    let answer = guest.client().ask(migrate(&to.address));
    assert!(!answer["migrated"].is_null(), "{answer}");
    client.send(b"\"status\"}\n");
    let status = &client.answer()["status"];
    assert_eq!(status["state"], "running", "{status}");
    assert!(status["waiting"].is_null(), "{status}");
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(to.end().0, Some(4));
    assert_eq!(guest.end().0, 0);
}

#[test]
fn a_client_ends_the_waiting() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "");
    assert_eq!(to.client().state("stop"), "ended");
    let (code, _, errors) = to.end();
    assert_eq!(code, Some(4), "{errors}");
    let told = "stopped through its control socket before a guest came";
    assert!(errors.contains(told), "{errors}");
}

/// The first attempt is cut while the memory arrives. The client of the control socket stays
/// connected, and the next attempt of the same source brings the guest.
#[test]
fn a_destination_waits_again() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "--resident 16M --wait-again");
    let mut client = to.client();
    let guest = Guest::start(folder.path(), ENDLESS);
    let (through, relay) = relay(folder.path(), &address, 1, Until::Bytes(SOME), || {});
    let text = guest.client().refused(migrate(&through));
    assert!(text.contains("keeps running here"), "{text}");
    relay.join().unwrap();
    // The attempt ends soon.
    while client.state("status") != "waiting" {}
    let answer = guest.client().ask(migrate(&address));
    assert!(!answer["migrated"].is_null(), "{answer}");
    assert_eq!(client.state("status"), "running");
    assert_eq!(client.state("stop"), "ended");
    let (code, _, errors) = to.end();
    assert_eq!(code, Some(4), "{errors}");
    let told = format!("it is with its source; waiting again at {address}");
    assert!(errors.contains(&told), "{errors}");
    assert_eq!(guest.end().0, 0);
}

/// A client's stop during an attempt ends the waiting too.
#[test]
fn a_stopped_attempt_is_the_last_one() {
    let folder = TempDir::new().unwrap();
    let to = Destination::start(
        folder.path(),
        "tcp:127.0.0.1:0",
        "--resident 16M --wait-again",
    );
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut asking = guest.client();
    let request = json!({"command": "migrate", "to": to.address, "bandwidth": 1});
    asking.send(format!("{request}\n").as_bytes());
    let mut client = to.client();
    while client.state("status") == "waiting" {}
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(to.end().0, Some(4));
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}
