//! The state of a destination once its source has reported the move.

use super::destination::Destination;
use super::{Guest, migrate};
use lacuna_skip::test;
use serde_json::json;
use tempfile::TempDir;

/// A moved guest can be saved at once, after a move by any mode.
#[test]
fn a_guest_that_has_moved_is_whole() {
    for (mode, from) in [
        ("hybrid", "churn --memory 64M"),
        ("postcopy", "bm --memory 16M"),
        ("precopy", "bm --memory 16M"),
    ] {
        let folder = TempDir::new().unwrap();
        let to = Destination::start(folder.path(), "tcp:127.0.0.1:0", "");
        let words = format!("{from} --append=seconds=1000000");
        let guest = Guest::start(folder.path(), &words);
        let mut request = migrate(&to.address);
        (request["mode"], request["downtime_ms"]) = (mode.into(), 1.into());
        let (mut here, mut there) = (guest.client(), to.client());
        let answer = here.ask(request);
        let saved = there.snapshot(&folder.path().join("saved"));
        assert!(!answer["migrated"].is_null(), "{answer}");
        assert!(!saved["snapshot"].is_null(), "{mode}: {saved}");
        let status = &there.ask(json!({"command": "status"}))["status"];
        assert_eq!(status["arriving"]["stage"], "whole", "{status}");
        assert_eq!(status["arriving"]["missing"], 0, "{status}");
        assert_eq!(there.state("stop"), "ended");
        assert_eq!(to.end().0, Some(4));
        assert_eq!(guest.end().0, 0);
    }
}
