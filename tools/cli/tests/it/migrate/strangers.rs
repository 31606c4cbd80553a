//! Peers that connect to a destination, and are no source of a guest.

use super::destination::Destination;
use super::tls::with_certificates;
use super::{ENDLESS, Guest, migrate};
use lacuna_skip::test;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use tempfile::TempDir;

/// Strangers are refused, and the destination keeps waiting. Others say nothing, and delay no one;
/// then the right guest arrives.
#[test]
fn strangers_do_not_end_the_waiting() {
    for address in ["tcp:127.0.0.1:0", "tls:localhost:0"] {
        let folder = TempDir::new().unwrap();
        let (options, mut request) = match address.starts_with("tls:") {
            true => with_certificates(),
            false => (String::new(), migrate("")),
        };
        let to = Destination::start(folder.path(), address, &format!("--resident 16M {options}"));
        let place = &to.address[4..];
        let idle = [(); 5].map(|()| TcpStream::connect(place).unwrap());
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 100], &[]] {
            let mut stranger = TcpStream::connect(place).unwrap();
            stranger.write_all(bytes).unwrap();
            // The other side may have closed it already.
            let _ = stranger.shutdown(Shutdown::Write);
            let _ = stranger.read_to_end(&mut Vec::new());
        }
        let guest = Guest::start(folder.path(), ENDLESS);
        request["to"] = to.address.as_str().into();
        // Several connections: idle strangers are before each of them.
        request["mode"] = "postcopy".into();
        let answer = guest.client().ask(request);
        assert!(!answer["migrated"].is_null(), "{answer}");
        assert_eq!(to.client().state("stop"), "ended");
        let (code, _, errors) = to.end();
        assert_eq!(code, Some(4), "{errors}");
        let refused = errors.matches("and still waiting: ").count();
        assert_eq!(refused, 3, "{errors}");
        assert_eq!(guest.end().0, 0);
        drop(idle);
    }
}
