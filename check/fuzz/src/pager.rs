//! What a hostile VMM announces to a pager, and files of its operator.

use crate::migrated::json;
use crate::pulse::Pulse;
use crate::tally::Tally;
use crate::values::pick;
use fastrand::Rng;
use lacuna_addr::PageCount;
use lacuna_cli::pager::Settings;
use serde_json::{Value, json};
use std::path::Path;

/// Messages and files for each seed.
const INPUTS: u64 = 64;
/// Bytes of the pages that a region may have.
const PAGES: [u64; 3] = [4096, 2 << 20, 1 << 30];
const FILE: &str = r#"
metrics = "127.0.0.1:9101"
[[image]]
socket = "/run/a.socket"
from = "file:/snapshots/a.mem+a.diff"
memory = "512M"
patience = "forever"
when-lost = "kill"
users = [1000, 1001]
vms-max = 20
memory-max = "8G"
[[image]]
socket = "b.socket"
layers = ["b.mem", "b.diff"]
"#;

/// Runs one seed.
pub fn run(seed: u64, pulse: &Pulse, tally: &mut Tally) {
    let mut rng = Rng::with_seed(seed);
    for _ in 0..INPUTS {
        pulse.beat();
        tally.operations += 2;
        announce(&mut rng, tally);
        configure(&mut rng, tally);
    }
}

/// A message: most are near to a good one.
fn announce(rng: &mut Rng, tally: &mut Tally) {
    let source = PageCount::new(1 << rng.u32(1..24));
    let mut message = message(rng, source);
    for _ in 0..rng.u8(..3) {
        json::mutate(&mut message, rng);
    }
    let mut text = message.to_string().into_bytes();
    if rng.u8(..8) == 0 {
        text.truncate(rng.usize(..text.len()));
    }
    let regions = match lacuna_pager::regions(&text, source) {
        Ok(regions) => regions,
        Err(error) => {
            let error = error.to_string();
            // JSON's own errors quote the message, with escapes.
            let is_bounded = error.len() < 200 + 6 * text.len();
            assert!(error.len() > 12 && is_bounded, "{error}");
            return tally.note("messages of VMMs", "refused");
        }
    };
    tally.note("messages of VMMs", "accepted");
    let text = String::from_utf8_lossy(&text);
    let mut sum = 0;
    for region in &regions {
        let (memory, page) = (region.memory, region.page);
        assert!(memory.pages() > 0, "{text}");
        assert!(memory.pages().is_multiple_of(page.pages()), "{text}");
        assert!(memory.start().get().is_multiple_of(page.bytes()), "{text}");
        assert!(region.first.0 + memory.pages() <= source.get(), "{text}");
        sum += memory.pages();
    }
    assert!(!regions.is_empty() && sum <= source.get(), "{text}");
    let mut pairs = regions.windows(2);
    let are_apart = pairs.all(|pair| pair[0].memory.end() <= pair[1].memory.start());
    assert!(are_apart, "{text}");
}

/// Regions one after the other in memory and in the source.
fn message(rng: &mut Rng, source: PageCount) -> Value {
    let (mut base, mut offset) = (0x7000_0000_0000_u64, 0);
    let regions = (0..rng.u8(1..5)).map(|_| {
        let page = pick(rng, &PAGES);
        let size = page * rng.u64(1..4);
        base = base.next_multiple_of(page);
        let mut region = json!({
            "base_host_virt_addr": base, "size": size, "offset": offset, "page_size": page,
        });
        if rng.bool() {
            region["page_size_kib"] = json!(page);
        }
        (base, offset) = (base + size, (offset + size).min(source.bytes()));
        region
    });
    regions.collect()
}

/// A file with changed lines and bytes.
fn configure(rng: &mut Rng, tally: &mut Tally) {
    let mut lines: Vec<_> = FILE.lines().map(str::to_owned).collect();
    for _ in 0..rng.u8(..4) {
        let [at, other] = [(); 2].map(|()| rng.usize(..lines.len()));
        match rng.u8(..4) {
            0 => lines.swap(at, other),
            1 => lines.insert(at, lines[other].clone()),
            2 => lines[at].clear(),
            _ => {
                let mut line: Vec<char> = lines[at].chars().collect();
                let place = rng.usize(..=line.len());
                line.insert(place, rng.char('\0'..'\u{250}'));
                lines[at] = line.into_iter().collect();
            }
        }
    }
    let text = lines.join("\n");
    match Settings::parse(&text, Path::new("/etc/pager.toml")) {
        Ok(settings) => {
            tally.note("files of a pager", "accepted");
            let mut sockets: Vec<_> = settings.images.iter().map(|one| &one.socket).collect();
            assert!(sockets.iter().all(|socket| socket.is_absolute()), "{text}");
            sockets.sort();
            sockets.dedup();
            assert!(
                !sockets.is_empty() && sockets.len() == settings.images.len(),
                "{text}"
            );
        }
        Err(wrong) => {
            tally.note("files of a pager", "refused");
            let rest = wrong.strip_prefix("/etc/pager.toml:");
            let line = rest.and_then(|rest| rest.split_once(": "));
            let line = line.and_then(|(line, _)| line.parse::<usize>().ok());
            let last = text.split('\n').count();
            let is_there = line.is_some_and(|line| (1..=last).contains(&line));
            assert!(is_there && !wrong.contains('\n'), "{wrong}\n{text}");
        }
    }
}
