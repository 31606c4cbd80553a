//! Properties of the parser.

use super::*;
use proptest::prelude::*;

const COMMANDS: [Command; 9] = [
    Command::Start,
    Command::Config,
    Command::State,
    Command::Memory,
    Command::Complete,
    Command::Abandon,
    Command::MemoryFd,
    Command::CompletePaused,
    Command::PageFault,
];

/// Bytes like a frame's, so that many are accepted.
fn frames() -> impl Strategy<Value = [u8; FRAME_BYTES]> {
    let length = prop_oneof![
        0..40u64,
        Just(CONFIG_MAX),
        Just(STATE_MAX + 1),
        any::<u64>()
    ];
    (0..12u16, 0..2u16, any::<[u8; 4]>(), length).prop_map(|(kind, version, rest, length)| {
        let mut bytes = frame(kind, length);
        bytes[2..4].copy_from_slice(&version.to_le_bytes());
        bytes[4..8].copy_from_slice(&rest);
        bytes
    })
}

proptest! {
    #[test]
    fn an_accepted_request_has_its_meaning_again(bytes in frames()) {
        let Ok(request) = Request::parse(&bytes) else { return Ok(()) };
        prop_assert!(request.command.lengths().contains(&request.length));
        let again = request.bytes();
        prop_assert_eq!((&again[..2], &again[8..]), (&bytes[..2], &bytes[8..]));
        prop_assert_eq!(Request::parse(&again), Ok(request));
    }

    #[test]
    fn a_response_is_accepted_by_its_status_alone(bytes in frames()) {
        let status = u16::from_le_bytes([bytes[0], bytes[1]]);
        match Response::parse(&bytes) {
            Ok(response) => prop_assert_eq!(Response::parse(&response.bytes()), Ok(response)),
            Err(error) => prop_assert_eq!(error, FrameError::Status(status)),
        }
        prop_assert_eq!(Response::parse(&bytes).is_ok(), (1..=2).contains(&status));
    }

    #[test]
    fn tables(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let ranges = MemoryRange::parse_table(&bytes);
        prop_assert_eq!(ranges.len(), bytes.len() / RANGE_BYTES);
        let again: Vec<u8> = ranges.into_iter().flat_map(MemoryRange::bytes).collect();
        prop_assert_eq!(&again, &bytes[..again.len()]);
    }

    /// No order of commands ends a migration without its configuration and its state.
    #[test]
    fn a_migration_ends_only_whole(order in prop::collection::vec(0..COMMANDS.len(), 0..12)) {
        let (mut phase, mut seen) = (Phase::Connected, Vec::new());
        for command in order.into_iter().map(|at| COMMANDS[at]) {
            let Ok(next) = phase.after(command) else { continue };
            phase = next;
            seen.push(command);
        }
        let count = |wanted| seen.iter().filter(|command| **command == wanted).count();
        let is_over = count(Command::Complete) + count(Command::CompletePaused) == 1;
        prop_assert_eq!(phase == Phase::Ended, is_over || count(Command::Abandon) == 1);
        if is_over {
            let once = [Command::Start, Command::Config, Command::State];
            prop_assert!(once.into_iter().all(|command| count(command) == 1));
            prop_assert!(count(Command::Memory) == 0 || count(Command::MemoryFd) == 0);
        }
    }
}

#[test]
fn the_bytes_are_cloud_hypervisors() {
    let request = Request {
        command: Command::MemoryFd,
        length: 4,
    };
    let bytes = [7, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(request.bytes(), bytes);
    let range = MemoryRange {
        gpa: 0x1_2345_6000,
        length: 0x1000,
    };
    let bytes = [0, 0x60, 0x45, 0x23, 1, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0];
    assert_eq!(range.bytes(), bytes);
    let ok = Response {
        is_ok: true,
        length: 0,
    };
    assert_eq!(
        Request::parse(&ok.bytes()).unwrap().command,
        Command::Start,
        "the same bytes"
    );
}

#[test]
fn wrong_frames_are_refused_with_the_reason() {
    let with = |kind, version: u16, length| {
        let mut bytes = frame(kind, length);
        bytes[2..4].copy_from_slice(&version.to_le_bytes());
        Request::parse(&bytes).unwrap_err().to_string()
    };
    for (error, reason) in [
        (with(0, 0, 0), "unknown command 0"),
        (with(10, 0, 0), "unknown command 10"),
        (with(1, 1, 0), "version 1"),
        (with(1, 0, 1), "Start with 1 bytes, which has 0 to 0"),
        (with(7, 0, 8), "MemoryFd with 8 bytes, which has 4 to 4"),
        (with(2, 0, 1 << 40), "Config with 1099511627776 bytes"),
        (with(4, 0, 24), "no multiple of 16"),
        (with(9, 0, 0), "PageFault with 0 bytes"),
    ] {
        assert!(error.contains(reason), "{error}");
    }
    let again = Phase::Started.after(Command::Start).unwrap_err();
    assert!(again.to_string().contains("Start after Start"), "{again}");
    assert!(again.to_string().contains("a response has the same bytes"));
}
