//! First touches of a lazy restore, recorded and replayed.

use super::saved::saved_and_paused;
use super::stopped::ENDLESS;
use crate::guest::{Guest, failure, lacuna};
use lacuna_skip::test;
use serde_json::{Value, json};
use std::time::Duration;
use tempfile::TempDir;

/// The report of a restore about the pages that arrived while the guest ran.
fn pages_of(folder: &TempDir, words: &str) -> Value {
    let json = folder.path().join("json");
    let output = lacuna(&format!("{words} --json {}", json.display()));
    assert_eq!(output.status.code(), Some(0), "{words}: {output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(" on demand, "), "{text}");
    let json: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    json["restored"]["lazy"].clone()
}

/// First touches of one restore are replayed at the next one.
#[test]
fn first_touches() {
    let folder = TempDir::new().unwrap();
    let [saved, other, record] = ["saved", "other", "record"].map(|name| folder.path().join(name));
    let request = json!({"command": "snapshot", "path": saved});
    let guest = saved_and_paused(folder.path(), "", "", &request);
    let mut client = guest.client();
    client.snapshot(&other);
    client.state("resume");
    assert_eq!(guest.end().0, 0);
    let [saved, other, record] = [&saved, &other, &record].map(|path| path.display());
    let words = format!("snapshot restore {saved} --lazy");
    let pages = pages_of(&folder, &words);
    assert!(
        pages["replayed"].is_null() && pages["recorded"].is_null(),
        "{pages}"
    );
    // The guest ends long before the time of the record, so nothing is prefetched.
    let pages = pages_of(
        &folder,
        &format!("{words} --record {record} --record-for 60min"),
    );
    let asked = pages["demand_faults"].as_u64().unwrap();
    assert!(
        asked > 20 && pages["recorded"] == asked && pages["prefetched"] == 0,
        "{pages}"
    );
    // An early complete record, without entries, while the guest runs.
    let early = format!("{words} --record {record}.early --record-for 1ns");
    assert!(pages_of(&folder, &early)["recorded"].as_u64().unwrap() < asked);
    let pages = pages_of(&folder, &format!("{words} --replay {record}"));
    assert!(
        pages["replayed"].is_u64() && pages["recorded"].is_null(),
        "{pages}"
    );
    let url = "gs://bucket/saved";
    let (code, errors) = failure(&format!("snapshot restore {url} --lazy"));
    assert!(code == 2 && errors.contains(url), "{code} {errors}");
    let (code, errors) = failure(&format!(
        "snapshot restore {other} --lazy --replay {record}"
    ));
    assert!(
        code == 2 && errors.contains("of another memory"),
        "{code} {errors}"
    );
    let (code, errors) = failure(&format!(
        "snapshot restore {saved} --lazy --record {}/nowhere/record",
        folder.path().display()
    ));
    assert!(
        code == 2 && errors.contains("cannot write the file"),
        "{code} {errors}"
    );
}

/// The pages of zeros need nothing of the snapshot, so they are not missing.
#[test]
fn a_lazy_restore_says_when_it_is_whole() {
    let folder = TempDir::new().unwrap();
    let saved = folder.path().join("saved");
    let guest = Guest::start(folder.path(), ENDLESS);
    let mut client = guest.client();
    assert!(client.snapshot(&saved)["snapshot"]["pages"].is_u64());
    client.state("stop");
    assert_eq!(guest.end().0, 4);
    let words = format!("snapshot restore {} --lazy", saved.display());
    let guest = Guest::command(folder.path(), &words, None);
    let mut client = guest.client();
    let pages = loop {
        let pages = client.ask(json!({"command": "status"}))["status"]["pages"].clone();
        if pages["whole"] == true {
            break pages;
        }
        assert!(pages["missing"].as_u64().unwrap() > 0, "{pages}");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!((&pages["missing"], &pages["lost"]), (&json!(0), &json!(0)));
    assert_eq!(pages["present"], pages["total"], "{pages}");
    client.state("stop");
    let (_, json) = guest.end();
    assert_eq!(json["last"]["pages"]["whole"], true, "{json}");
}
