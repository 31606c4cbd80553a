//! Guests that move over TLS, and refused certificates.

use super::destination::Destination;
use super::proxy::{Moment, Proxy};
use super::{ENDLESS, Guest, failure};
use crate::guest::lacuna;
use lacuna_skip::test;
use serde_json::{Value, json};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use tempfile::TempDir;

pub const CERTIFICATES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../migrate/tests/certificates"
);

/// The options for the certificate `own`, and the authority of the other side.
fn options(authority: &str, own: &str) -> String {
    let folder = CERTIFICATES;
    format!(
        "--tls-ca {folder}/{authority}.pem --tls-cert {folder}/{own}.pem --tls-key \
         {folder}/{own}.key"
    )
}

/// The options of a destination, and the request of a source.
pub fn with_certificates() -> (String, Value) {
    let request = json!({
        "command": "migrate",
        "tls": {
            "ca": format!("{CERTIFICATES}/authority.pem"),
            "cert": format!("{CERTIFICATES}/host.pem"),
            "key": format!("{CERTIFICATES}/host.key"),
        },
    });
    (options("authority", "host"), request)
}

fn start(folder: &TempDir, authority: &str, own: &str) -> Destination {
    let options = format!("--resident 16M {}", options(authority, own));
    Destination::start(folder.path(), "tls:localhost:0", &options)
}

#[test]
fn a_guest_moves_over_tls() {
    let folder = TempDir::new().unwrap();
    let to = start(&folder, "authority", "host");
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display();
    let tls = options("authority", "host");
    let output = lacuna(&format!(
        "migrate {} --control {control} {tls} --json -",
        to.address
    ));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["outcome"], format!("moved to {}", to.address));
    assert_eq!(guest.end().0, 0);
    assert_eq!(to.client().state("stop"), "ended");
    let (code, json, errors) = to.end();
    assert_eq!(code, Some(4), "{errors}");
    assert!(json["received"]["bytes"].as_u64().unwrap() > 4096, "{json}");
}

/// A probe of the port connects between the first connection of a migration and the next one.
#[test]
fn a_probe_of_the_port_does_not_end_a_migration() {
    for (mode, streams) in [("postcopy", 1), ("precopy", 2)] {
        let folder = TempDir::new().unwrap();
        let to = start(&folder, "authority", "host");
        let place = to.address.strip_prefix("tls:").unwrap().to_owned();
        let proxy = Proxy::start(folder.path(), &to.address);
        let (tell, probed) = channel();
        // The proxy has connected. The destination accepts the probe after that connection.
        proxy.at(Moment::Bytes(0), move || {
            drop(TcpStream::connect(place).unwrap());
            tell.send(()).unwrap();
        });
        let guest = Guest::start(folder.path(), ENDLESS);
        let (_, mut request) = with_certificates();
        request["to"] = proxy.address.replace("tcp:", "tls:").into();
        request["mode"] = mode.into();
        request["streams"] = streams.into();
        let answer = guest.client().ask(request);
        assert!(!answer["migrated"].is_null(), "{answer}");
        probed.try_recv().unwrap();
        assert_eq!(guest.end().0, 0);
        assert_eq!(to.client().state("stop"), "ended");
        let (code, _, errors) = to.end();
        assert_eq!(code, Some(4), "{errors}");
    }
}

/// A certificate of another authority is refused on either side, and both get the reason. The
/// destination keeps waiting, and the guest keeps running.
#[test]
fn a_wrong_certificate_is_refused() {
    let folder = TempDir::new().unwrap();
    let to = start(&folder, "authority", "host");
    let guest = Guest::start(folder.path(), ENDLESS);
    let control = guest.socket.display().to_string();
    let migrate = |tls: &str| failure(&format!("migrate {} --control {control} {tls}", to.address));
    // This side's certificate is of an authority that the destination does not know.
    let (code, errors) = migrate(&options("authority", "other"));
    assert_eq!(code, 5, "{errors}");
    let told = "the other side refuses this side's certificate";
    assert!(errors.contains(told), "{errors}");
    // The destination's is of an authority that this side does not know.
    let (code, errors) = migrate(&options("stranger", "host"));
    assert_eq!(code, 2, "{errors}");
    let told = "the other side's certificate is refused";
    assert!(errors.contains(told), "{errors}");
    // No TLS at all.
    let mut client = guest.client();
    let plain = to.address.replace("tls:", "tcp:");
    let text = client.refused(json!({"command": "migrate", "to": plain}));
    assert!(text.contains("the guest has not moved"), "{text}");
    for (words, told) in [
        (String::new(), "--tls-ca, --tls-cert, --tls-key"),
        ("--tls-ca x".into(), "--tls-cert <FILE>"),
        (
            options("authority", "host").replace("host.key", "host.pem"),
            "give the private key",
        ),
        (
            options("authority", "host").replace("host.pem", "old.pem"),
            "give a certificate of X.509 version 3",
        ),
        (options("missing", "host"), "missing.pem"),
    ] {
        let (code, errors) = migrate(&words);
        assert!(code == 2 && errors.contains(told), "{code} {errors}");
    }
    assert_eq!(client.state("stop"), "ended");
    assert_eq!(guest.end().0, 4);
    let pid = rustix::process::Pid::from_child(&to.child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let (code, _, errors) = to.end();
    assert_eq!(code, Some(130), "{errors}");
    let refused = errors.matches("and still waiting: ").count();
    assert_eq!(refused, 3, "{errors}");
    for told in [
        "the other side's certificate is refused",
        "the other side refuses this side's certificate",
        "this is no TLS of a migration",
    ] {
        assert!(errors.contains(told), "{told}: {errors}");
    }
}
