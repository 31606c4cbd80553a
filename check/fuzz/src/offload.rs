//! What a hostile VMM sends to the daemons of `lacuna offload`.

use crate::migrated::json;
use crate::pulse::Pulse;
use crate::tally::Tally;
use crate::values::pick;
use fastrand::Rng;
use lacuna_offload::wire::{Command, FRAME_BYTES, MemoryRange, Phase, Request, Response};
use lacuna_offload::{Slot, Slots};
use serde_json::json;

/// Migrations and configurations for each seed.
const INPUTS: u64 = 64;
/// The bytes of a page.
const PAGE: u64 = 4096;

/// Runs one seed.
pub fn run(seed: u64, pulse: &Pulse, tally: &mut Tally) {
    let mut rng = Rng::with_seed(seed);
    for _ in 0..INPUTS {
        pulse.beat();
        tally.operations += 2;
        migrate(&mut rng, tally);
        configure(&mut rng, tally);
    }
}

/// Frames from the start of a migration until one is refused. Most belong where they come.
fn migrate(rng: &mut Rng, tally: &mut Tally) {
    const USUAL: [u16; 7] = [1, 7, 7, 2, 3, 5, 8];
    let (mut phase, mut accepted) = (Phase::Connected, Vec::new());
    for usual in USUAL {
        let number = if rng.u8(..8) == 0 {
            rng.u16(..12)
        } else {
            usual
        };
        let mut frame = [0; FRAME_BYTES];
        frame[..2].copy_from_slice(&number.to_le_bytes());
        let length = match number {
            2 | 3 => rng.u64(1..1 << 20),
            4 => 16 * rng.u64(1..1 << 10),
            7 => 4,
            9 => 16,
            _ => 0,
        };
        frame[8..].copy_from_slice(&length.to_le_bytes());
        if rng.u8(..8) == 0 {
            frame[rng.usize(..FRAME_BYTES)] = rng.u8(..);
        }
        check_response(&frame);
        let request = match Request::parse(&frame) {
            Ok(request) => request,
            Err(error) => return refused(tally, &error.to_string()),
        };
        assert!(request.command.lengths().contains(&request.length));
        assert_eq!(Request::parse(&request.bytes()), Ok(request), "{frame:?}");
        match phase.after(request.command) {
            Ok(next) => phase = next,
            Err(error) => return refused(tally, &error.to_string()),
        }
        accepted.push(request.command);
        if phase == Phase::Ended {
            break;
        }
    }
    let is_abandoned = accepted.last() == Some(&Command::Abandon);
    if phase == Phase::Ended && !is_abandoned {
        let [first, .., config, state, end] = accepted[..] else {
            panic!("{accepted:?}");
        };
        assert_eq!(first, Command::Start, "{accepted:?}");
        assert_eq!(state, Command::State, "{accepted:?}");
        assert!(
            matches!(config, Command::Config | Command::Memory),
            "{accepted:?}"
        );
        assert!(
            matches!(end, Command::Complete | Command::CompletePaused),
            "{accepted:?}"
        );
    }
    tally.note("frames of VMMs", "accepted");
}

fn refused(tally: &mut Tally, error: &str) {
    assert!((12..300).contains(&error.len()), "{error}");
    tally.note("frames of VMMs", "refused");
}

fn check_response(frame: &[u8; FRAME_BYTES]) {
    if let Ok(response) = Response::parse(frame) {
        assert_eq!(Response::parse(&response.bytes()), Ok(response));
    }
}

/// A configuration, and a range that the VMM asks for.
fn configure(rng: &mut Rng, tally: &mut Tally) {
    let mut gpa = 0;
    let slots = (0..rng.u64(1..5)).map(|slot| {
        let size = PAGE * rng.u64(1..1 << 18);
        gpa += size + PAGE * rng.u64(..4);
        json!({
            "slot": slot, "gpa": gpa - size, "size": size, "file_offset": 0, "virtio_mem": false,
        })
    });
    let slots: Vec<_> = slots.collect();
    let mut config = json!({
        "vm_config": {"memory": {"shared": true}},
        "memory_manager_data": {"guest_ram_mappings": slots, "next_memory_slot": 9},
    });
    for _ in 0..rng.u8(..3) {
        json::mutate(&mut config, rng);
    }
    let slots = match Slots::of_config(config.to_string().as_bytes()) {
        Ok(slots) => slots,
        Err(error) => {
            assert!(error.to_string().len() > 12, "{error}");
            return tally.note("configurations of VMMs", "refused");
        }
    };
    tally.note("configurations of VMMs", "accepted");
    let all = slots.all();
    assert!(!all.is_empty(), "{config}");
    let end = |slot: &Slot| slot.gpa + slot.length;
    let mut pairs = all.windows(2);
    assert!(
        pairs.all(|pair| end(&pair[0]) <= pair[1].gpa),
        "overlap: {config}"
    );
    let bytes = all.iter().map(|slot| slot.length).sum::<u64>();
    assert_eq!(slots.bytes(), bytes, "{config}");
    let near = end(&pick(rng, all)).wrapping_add_signed(PAGE as i64 * rng.i64(-4..4));
    let range = MemoryRange {
        gpa: near.wrapping_add(pick(rng, &[0, 0, 0, 1])),
        length: pick(rng, &[0, PAGE, 3 * PAGE, 1 << 30, u64::MAX]),
    };
    match slots.locate(range) {
        Ok(offset) => {
            let is_whole = [range.gpa, range.length].map(|n| n.is_multiple_of(PAGE));
            assert_eq!(is_whole, [true, true], "{range:?}");
            assert!(offset <= bytes - range.length, "{range:?} {config}");
            tally.note("ranges of VMMs", "accepted");
        }
        Err(reason) => {
            assert!(reason.len() > 12, "{reason}");
            tally.note("ranges of VMMs", "refused");
        }
    }
}
