//! Migrations that fail: the exit code of each side says which side failed, and both sides get the
//! reason.

use super::destination::Destination;
use super::{ENDLESS, Guest, migrate};
use crate::guest::{failure, lacuna};
use lacuna_skip::test;
use serde_json::json;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use tempfile::TempDir;

/// The destination's swap is full. The page that does not fit may arrive on any connection.
#[test]
fn a_destination_without_swap_tells_why() {
    for streams in [1, 4, 4] {
        let folder = TempDir::new().unwrap();
        let options = format!("--resident 4M --swap file,dir={}", folder.path().display());
        // 1 MiB, or half of it.
        let limit = "ulimit -f 1000";
        let address = "tcp:127.0.0.1:0";
        let to = Destination::start_after(limit, folder.path(), address, &options);
        let guest = Guest::start_with(
            folder.path(),
            "verify --memory 16M --resident 16M",
            Some("rounds=100000"),
        );
        // Its memory has content.
        let mut client = guest.client();
        for number in 0.. {
            let saved = client.snapshot(&folder.path().join(format!("saved{number}")));
            if saved["snapshot"]["pages"].as_u64().unwrap() > 2000 {
                break;
            }
        }
        let control = guest.socket.display();
        let words = format!(
            "migrate {} --control {control} --streams {streams}",
            to.address
        );
        let (code, errors) = failure(&words);
        let is_told = errors.contains("keeps running here: the other side refused: ");
        assert!(is_told && errors.contains("swap device full"), "{errors}");
        assert_eq!(code, 5, "{errors}");
        let (code, _, errors) = to.end();
        assert!(errors.contains("swap device full"), "{errors}");
        assert_eq!(code, Some(3), "{errors}");
        assert_eq!(guest.client().state("stop"), "ended");
        assert_eq!(guest.end().0, 4);
    }
}

/// Passes on the bytes of one connection, with one byte changed.
fn damage(listener: UnixListener, to: String) {
    let (source, _) = listener.accept().unwrap();
    let destination = UnixStream::connect(to).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = io::copy(&mut &destination, &mut &source);
            let _ = source.shutdown(Shutdown::Both);
        });
        let (mut passed, mut buffer) = (0, vec![0; 16 << 10]);
        while let Ok(read @ 1..) = (&source).read(&mut buffer) {
            let damaged = 50_000;
            if (passed..passed + read).contains(&damaged) {
                buffer[damaged - passed] ^= 1;
            }
            passed += read;
            if (&destination).write_all(&buffer[..read]).is_err() {
                break;
            }
        }
    });
}

/// A damaged stream is not this host's failure, and no wrong argument.
#[test]
fn a_damaged_stream_is_the_peers_failure() {
    let folder = TempDir::new().unwrap();
    let address = format!("unix:{}/in", folder.path().display());
    let to = Destination::start(folder.path(), &address, "--resident 16M");
    let middle = folder.path().join("middle");
    let listener = UnixListener::bind(&middle).unwrap();
    let path = address.strip_prefix("unix:").unwrap().to_owned();
    let relay = thread::spawn(move || damage(listener, path));
    let guest = Guest::start(folder.path(), ENDLESS);
    let answer = guest
        .client()
        .ask(migrate(&format!("unix:{}", middle.display())));
    assert_eq!(answer["error"]["kind"], "peer", "{answer}");
    let text = answer["error"]["text"].as_str().unwrap();
    assert!(text.contains("the stream is damaged"), "{text}");
    let (code, _, errors) = to.end();
    assert!(errors.contains("the stream is damaged"), "{errors}");
    assert_eq!(code, Some(5), "{errors}");
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
    relay.join().unwrap();
}

/// A client's wrong request keeps its own exit code.
#[test]
fn a_wrong_request_is_no_failure_of_a_peer() {
    let folder = TempDir::new().unwrap();
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display();
    let output = lacuna(&format!("migrate tcp:127.0.0.1:1 --control {control}"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let answer = guest.client().ask(json!({"command": "keep"}));
    assert_eq!(answer["error"]["kind"], "request", "{answer}");
    assert_eq!(guest.client().state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
}
