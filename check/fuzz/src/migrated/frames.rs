//! Frames of a migration's stream (docs/formats.md), taken apart and changed.

use super::json;
use crate::values;
use fastrand::Rng;

/// Bytes before a payload.
const HEAD: usize = 12;
/// Kinds whose payload is JSON: `Hello`, `Welcome`, `State`, `Join`.
const JSON: [u8; 4] = [1, 2, 7, 12];
/// `Go`: the source hands its guest over.
pub const GO: u8 = 9;
/// `Running`: the destination runs the guest.
pub const RUNNING: u8 = 10;
/// `Refused`.
pub const REFUSED: u8 = 11;

/// One frame.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub payload: Vec<u8>,
}

/// The whole frames of a stream.
pub fn parse(mut bytes: &[u8]) -> Vec<Frame> {
    let mut all = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let Some((payload, rest)) = rest.split_at_checked(length) else {
            break;
        };
        all.push(Frame {
            kind: head[0],
            payload: payload.to_vec(),
        });
        bytes = rest;
    }
    all
}

/// The bytes of frames, with good checksums.
pub fn encode(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Frame { kind, payload } in frames {
        let mut head = vec![*kind, 0, 0, 0];
        head.extend((payload.len() as u32).to_le_bytes());
        let mut sum = crc32fast::Hasher::new();
        sum.update(&head);
        sum.update(payload);
        head.extend(sum.finalize().to_le_bytes());
        bytes.extend(head);
        bytes.extend(payload);
    }
    bytes
}

/// Changes a stream of `frames`: mostly some frames, with correct checksums afterwards, and
/// sometimes the bytes, so that the checksums are wrong.
pub fn mutate(mut frames: Vec<Frame>, rng: &mut Rng) -> Vec<u8> {
    if rng.u8(..16) == 0 {
        frames = (0..rng.usize(..40)).map(|_| noise(rng)).collect();
    }
    for _ in 0..rng.usize(1..5) {
        change(&mut frames, rng);
    }
    let mut bytes = encode(&frames);
    if rng.u8(..6) == 0 && !bytes.is_empty() {
        let at = rng.usize(..bytes.len());
        match rng.u8(..4) {
            0 => bytes[at] ^= 1 << rng.u32(..8),
            1 => bytes.truncate(at),
            2 => drop(bytes.remove(at)),
            _ => bytes.insert(at, rng.u8(..)),
        }
    }
    bytes
}

/// A frame of any kind and content.
fn noise(rng: &mut Rng) -> Frame {
    let length = match rng.u8(..6) {
        0 => 0,
        1 => 16,
        2 => 8 + 4096 * rng.usize(..4),
        3 => rng.usize(..100_000),
        _ => rng.usize(..64),
    };
    let payload = (0..length).map(|_| rng.u8(..)).collect();
    let kind = match rng.u8(..8) {
        0 => rng.u8(..),
        _ => rng.u8(..20),
    };
    Frame { kind, payload }
}

fn change(frames: &mut Vec<Frame>, rng: &mut Rng) {
    if frames.is_empty() {
        return frames.push(noise(rng));
    }
    // Few frames have documents, and these have the most to read.
    let documents = frames.iter().enumerate();
    let documents: Vec<_> = documents
        .filter(|(_, frame)| JSON.contains(&frame.kind))
        .map(|(index, _)| index)
        .collect();
    let at = match rng.bool() && !documents.is_empty() {
        true => documents[rng.usize(..documents.len())],
        false => rng.usize(..frames.len()),
    };
    match rng.u8(..16) {
        0 => drop(frames.remove(at)),
        1 => frames.insert(at, frames[rng.usize(..frames.len())].clone()),
        2 => frames.insert(at, noise(rng)),
        3 => {
            let other = rng.usize(..frames.len());
            frames.swap(at, other);
        }
        4 => frames.truncate(at),
        5 => frames[at].kind = rng.u8(..20),
        6 => {
            let payload = &mut frames[at].payload;
            payload.truncate(rng.usize(..=payload.len()));
        }
        7 => frames[at].payload.extend((0..rng.usize(..5000)).map(|_| 0)),
        _ => payload(&mut frames[at], rng),
    }
}

/// Changes a frame's payload.
fn payload(frame: &mut Frame, rng: &mut Rng) {
    let document = serde_json::from_slice(&frame.payload).ok();
    if let Some(mut document) = document.filter(|_| JSON.contains(&frame.kind)) {
        for _ in 0..rng.usize(1..4) {
            json::mutate(&mut document, rng);
        }
        frame.payload = serde_json::to_vec(&document).expect("a document");
        return;
    }
    let payload = &mut frame.payload;
    match rng.u8(..3) {
        // Numbers and counts of pages are at the beginning.
        0 | 1 if payload.len() >= 8 => {
            let at = 8 * rng.usize(..(payload.len() / 8).min(2));
            let number = match rng.bool() {
                true => values::number(rng),
                false => rng.u64(..2000),
            };
            payload[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        _ if !payload.is_empty() => {
            let at = rng.usize(..payload.len());
            payload[at] = rng.u8(..);
        }
        _ => payload.push(rng.u8(..)),
    }
}
