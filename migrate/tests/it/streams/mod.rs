//! Running guests move over a stream, on every backend and architecture. Some streams are cut.

mod cuts;
pub mod ends;
pub mod link;
pub mod puppet;
mod seeded;
mod unread;

use ends::{End, Machines, Move};
use lacuna_addr::PageCount;
use lacuna_machine::{Apf, Arch, CpuModel, Ending};
use lacuna_migrate::MigrateError;
use lacuna_migrate::stream::{Compression, Incoming, Mode, Plan};
use puppet::Ready;
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;

/// Small, because each test runs several guests to their ends.
const MEMORY: PageCount = PageCount::from_bytes(6 << 20);

fn soft(arch: Arch, vcpus: usize) -> lacuna_soft::VmBuilder {
    lacuna_soft::VmBuilder {
        arch,
        vcpus,
        cpu: CpuModel::Common { tsc_khz: None },
        apf: Apf::On,
        ..lacuna_soft::VmBuilder::new(MEMORY, PageCount::new(MEMORY.get() / 3))
    }
}

/// A VM of the kvm backend. Ends the test as skipped where there is none.
fn kvm(vcpus: usize) -> lacuna_kvm::VmBuilder {
    if let Err(error) = lacuna_kvm::available() {
        lacuna_skip::skip_test(error);
    }
    let mut builder = lacuna_kvm::VmBuilder::new(MEMORY, MEMORY);
    builder.vcpus = vcpus;
    builder.cpu = CpuModel::Common { tsc_khz: None };
    builder.apf = Apf::Off;
    builder
}

fn by(mode: Mode) -> Plan {
    Plan {
        mode,
        ..Plan::default()
    }
}

/// The guest checks all of its memory, here and there.
fn moves(from: impl Machines, to: impl Machines, words: &'static str, mode: Mode) {
    let migration = Move {
        from,
        to,
        words,
        plan: by(mode),
        patience: 0,
        victim: None,
        breaks: false,
        pauses: false,
    };
    let moved = migration.carry_out(&[]);
    assert_eq!(moved.source, End::Gone, "{mode:?}: {moved:?}");
    let ending = Some(Ending::Exited(0));
    assert_eq!(moved.destination, ending, "{mode:?}: {moved:?}");
    assert_eq!(moved.rounds > 0, mode != Mode::PostCopy, "{moved:?}");
    assert!(moved.pages > 0, "{moved:?}");
    // The guest was paused in the last round. It had written the pages of the one before.
    if mode == Mode::PreCopy && moved.rounds > 2 {
        assert!(moved.dirty_rate > 0, "{moved:?}");
    }
}

const MODES: [Mode; 3] = [Mode::PreCopy, Mode::PostCopy, Mode::Hybrid];

#[test]
fn between_soft_machines() {
    for arch in [Arch::X86_64, Arch::Arm64] {
        for mode in MODES {
            moves(soft(arch, 2), soft(arch, 2), "rounds=6", mode);
        }
    }
}

/// The rest of the memory then comes after the guest, or while it is paused.
#[test]
fn a_guest_goes_when_its_source_asks_for_it() {
    for (mode, rounds) in [(Mode::PreCopy, 2), (Mode::Hybrid, 1)] {
        let plan = Plan {
            streams: 3,
            ..by(mode)
        };
        let migration = Move {
            from: soft(Arch::X86_64, 2),
            to: soft(Arch::X86_64, 2),
            words: "rounds=6",
            plan,
            patience: 0,
            victim: None,
            breaks: false,
            pauses: true,
        };
        let moved = migration.carry_out(&[]);
        assert_eq!(moved.source, End::Gone, "{mode:?}: {moved:?}");
        let ending = Some(Ending::Exited(0));
        assert_eq!(moved.destination, ending, "{mode:?}: {moved:?}");
        assert_eq!(moved.rounds, rounds, "{mode:?}: {moved:?}");
    }
}

/// Several connections and each compression bring the same pages. A guest whose memory is not all
/// random takes fewer bytes.
#[test]
fn over_several_streams_and_compressed() {
    let mut written = Vec::new();
    for (streams, compression) in [
        (1, Compression::None),
        (3, Compression::None),
        (3, Compression::Lz4),
        (1, Compression::Zstd),
    ] {
        for mode in MODES {
            let migration = Move {
                from: soft(Arch::X86_64, 2),
                to: soft(Arch::X86_64, 2),
                words: "rounds=6",
                plan: Plan {
                    streams,
                    compression,
                    ..by(mode)
                },
                patience: 0,
                victim: None,
                breaks: false,
                pauses: false,
            };
            let moved = migration.carry_out(&[]);
            assert_eq!(
                moved.source,
                End::Gone,
                "{streams} {compression:?}: {moved:?}"
            );
            let ending = Some(Ending::Exited(0));
            assert_eq!(
                moved.destination, ending,
                "{streams} {compression:?}: {moved:?}"
            );
            // A page is not compressed if a vCPU waits for it. Here no vCPU waits.
            if mode == Mode::PreCopy {
                let [source, _] = moved.written;
                written.push(source / moved.pages);
            }
        }
    }
    let [one, several, lz4, zstd] = &written[..] else {
        panic!("{written:?}");
    };
    assert!(
        several > &(one / 2) && lz4 < &(one / 2) && zstd < &(one / 2),
        "bytes a page: {written:?}"
    );
}

/// A slower test machine takes longer, and sends no more.
#[test]
fn under_a_limit_of_bandwidth() {
    for streams in [1, 3] {
        let mut migration = cuts::little(Arch::X86_64, Mode::PreCopy, 0);
        migration.plan.streams = streams;
        migration.plan.bandwidth = NonZeroU64::new(4 << 20);
        let moved = migration.carry_out(&[]);
        assert_eq!(moved.source, End::Gone, "{streams}: {moved:?}");
    }
}

/// The guest gets the pages that it requests, although the limit allows to push one page.
#[test]
fn requested_pages_are_sent_beside_the_limit() {
    let mut migration = cuts::little(Arch::X86_64, Mode::PostCopy, 0);
    migration.plan.bandwidth = Some(ends::NO_PUSH);
    let moved = migration.carry_out(&[]);
    assert_eq!(moved.source, End::Cut, "{moved:?}");
    assert!(moved.errors[0].contains("cancelled"), "{moved:?}");
}

#[lacuna_skip::test]
fn between_kvm_machines() {
    for mode in MODES {
        moves(kvm(2), kvm(2), "rounds=60", mode);
    }
}

#[lacuna_skip::test]
fn from_soft_to_kvm_and_back() {
    let on_kvm = kvm(2);
    let on_soft = || lacuna_soft::VmBuilder {
        apf: Apf::Off,
        cpu: CpuModel::Common {
            tsc_khz: lacuna_kvm::tsc_khz(),
        },
        ..soft(Arch::X86_64, 2)
    };
    for mode in [Mode::PreCopy, Mode::PostCopy] {
        moves(on_soft(), on_kvm.clone(), "rounds=6 syscall=ud2", mode);
        // soft takes long for the work that KVM leaves.
        moves(on_kvm.clone(), on_soft(), "rounds=30", mode);
    }
}

/// A machine of another size is refused, with words for both sides, and the source keeps running
/// the guest.
#[test]
fn another_machine_is_refused() {
    for mode in MODES {
        let moved = Move {
            from: soft(Arch::Arm64, 2),
            to: soft(Arch::Arm64, 1),
            words: "rounds=2",
            plan: by(mode),
            patience: 3,
            victim: None,
            breaks: false,
            pauses: false,
        };
        let end = moved.carry_out(&[]);
        assert_eq!(end.source, End::Ran(Ending::Exited(0)));
        assert_eq!(end.destination, None);
        refused_for(
            "the VM's number of vCPUs is 1, and the saved machine's is 2",
            &end.errors,
        );
    }
}

#[track_caller]
fn refused_for(why: &str, [source, destination]: &[String; 2]) {
    assert!(destination.contains(why), "{destination}");
    assert!(
        source.contains("refused") && source.contains(why),
        "{source}"
    );
}

/// The destination's processor lacks features that the guest sees. It says so before any page.
#[lacuna_skip::test]
fn another_processor_is_refused() {
    let moved = Move {
        from: lacuna_kvm::VmBuilder {
            cpu: CpuModel::Host,
            ..kvm(1)
        },
        to: lacuna_soft::VmBuilder {
            cpu: CpuModel::Host,
            apf: Apf::Off,
            ..soft(Arch::X86_64, 1)
        },
        words: "rounds=2",
        plan: by(Mode::PreCopy),
        patience: 3,
        victim: None,
        breaks: false,
        pauses: false,
    };
    let end = moved.carry_out(&[]);
    assert_eq!(end.source, End::Ran(Ending::Exited(0)));
    assert_eq!((end.pages, end.destination), (0, None));
    refused_for("features.", &end.errors);
    refused_for("CpuModel::Common", &end.errors);
}

/// A destination that gives up in the middle of a round sends its reason, and the source keeps
/// running the guest.
#[test]
fn a_destination_that_gives_up_tells_why() {
    for streams in [1, 3] {
        let moved = Move {
            from: soft(Arch::X86_64, 2),
            to: soft(Arch::X86_64, 2),
            words: "rounds=2",
            plan: Plan {
                streams,
                ..Plan::default()
            },
            patience: 0,
            victim: None,
            breaks: true,
            pauses: false,
        };
        let end = moved.carry_out(&[]);
        assert_eq!(end.source, End::Ran(Ending::Exited(0)));
        assert_eq!(end.destination, None);
        let [source, destination] = end.errors;
        assert!(destination.contains("cancelled"), "{destination}");
        assert!(source.contains("refused: cancelled"), "{source}");
    }
}

/// Any other bytes than a migration's are refused.
#[test]
fn a_stranger_is_refused() {
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0; 64],
        &[1; 4],
        &[],
    ] {
        let (mut stranger, here) = UnixStream::pair().expect("a pair");
        stranger.write_all(bytes).expect("room for it");
        stranger.shutdown(std::net::Shutdown::Write).expect("open");
        let here = Ready::new([here]);
        let error = Incoming::accept(&here).map(drop).expect_err("a stranger");
        let is_known = matches!(error, MigrateError::Stream(_) | MigrateError::Cut(_));
        assert!(is_known, "{error}");
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
    }
}
