//! A peer that sends the frames of the test's choice.

use lacuna_machine::x86::cpuid::Features;
use lacuna_machine::{Answer, Apf, Arch, CpuModel, PageRequest, ProcessorFeatures, SourcePage};
use lacuna_migrate::stream::{Connection, Connections, Incoming};
use lacuna_source::{Failure, PageRequester};
use serde_json::json;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

/// Existing connections.
pub struct Ready(Mutex<Vec<UnixStream>>);

impl Ready {
    pub fn new(streams: impl Into<Vec<UnixStream>>) -> Self {
        let mut streams = streams.into();
        streams.reverse();
        Self(Mutex::new(streams))
    }
}

impl Connections for Ready {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let stream = self.0.lock().unwrap().pop();
        Ok(Box::new(stream.ok_or(io::ErrorKind::NotConnected)?))
    }
}

/// Sends a frame.
pub fn write(to: &mut UnixStream, kind: u8, payload: &[u8]) {
    let mut frame = vec![kind, 0, 0, 0];
    frame.extend((payload.len() as u32).to_le_bytes());
    let mut sum = crc32fast::Hasher::new();
    sum.update(&frame);
    sum.update(payload);
    frame.extend(sum.finalize().to_le_bytes());
    frame.extend(payload);
    to.write_all(&frame).expect("the other side reads");
}

/// The first message of a post-copy, of a machine with this many pages.
fn hello(pages: u64) -> Vec<u8> {
    let machine = json!({
        "arch": Arch::X86_64,
        "vcpus": 1,
        "memory": pages << 12,
        "apf": Apf::Off,
        "cpu": CpuModel::Host,
        "layout": { "slots": [{ "id": 0, "gfn": 0, "pages": pages, "flags": 0 }] },
    });
    let hello = json!({
        "version": 10, "id": "1", "mode": "postcopy", "streams": 1, "machine": machine,
        "devices": {}, "processor": ProcessorFeatures::X86(Features::default()),
        "compression": "none"
    });
    hello.to_string().into_bytes()
}

fn incoming(pages: u64) -> Incoming {
    let (mut source, here) = UnixStream::pair().expect("a pair");
    write(&mut source, 1, &hello(pages));
    Incoming::accept(&Ready::new([here])).expect("a source")
}

/// The VMM sees the size that a peer has sent before anything of this size is allocated.
#[test]
fn a_size_costs_nothing_before_the_vmm_agrees_to_it() {
    // One bit for each page of this is 8 GiB.
    let most = 1 << 36;
    assert_eq!(incoming(most).machine().layout.pages(), most);
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse().ok());
    assert!(kib.is_some_and(|kib: u64| kib < 4 << 20), "{peak:?}");
}

/// Keeps the first answer.
#[derive(Default)]
struct FirstAnswer(Mutex<Option<String>>);

impl PageRequester for FirstAnswer {
    fn answer(&self, _key: u64, content: Result<&[u8; 4096], Failure<'_>>) -> Answer {
        let answer = content.map_or_else(|failure| failure.to_string(), |_| "a page".into());
        self.0.lock().unwrap().get_or_insert(answer);
        Answer::Taken
    }
}

/// If the guest never arrives, a thread does not wait for ever for a page of the VM.
#[test]
fn a_page_of_a_guest_that_is_refused_is_lost() {
    let incoming = incoming(16);
    let source = incoming.page_source().expect("a post-copy");
    let told = Arc::<FirstAnswer>::default();
    let requester = Arc::clone(&told);
    source.fetch(PageRequest::new(requester, 0, SourcePage(3)));
    assert_eq!(*told.0.lock().unwrap(), None);
    drop(incoming);
    let answer = told.0.lock().unwrap().take();
    let answer = answer.expect("an answer");
    assert!(answer.contains("before this page arrived"), "{answer}");
}
