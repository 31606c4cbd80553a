//! Cut links: one of the two sides runs the guest to its end, and never both.

use super::ends::{End, Move, Outcome};
use super::link::{Cut, UNCUT, link};
use super::{by, soft};
use lacuna_addr::PageCount;
use lacuna_machine::{Arch, Ending};
use lacuna_migrate::Budget;
use lacuna_migrate::stream::{Mode, Plan};
use lacuna_skip::HugePages;
use lacuna_soft::{MemoryKind, VmBuilder};

/// For tests that move many guests.
const LITTLE: PageCount = PageCount::from_bytes(6 << 20);

/// The guest is paused after one round, so the stream has about the same length each time.
pub fn little(arch: Arch, mode: Mode, patience: usize) -> Move<VmBuilder, VmBuilder> {
    let machine = || VmBuilder {
        memory: LITTLE,
        resident: PageCount::new(LITTLE.get() / 2),
        ..soft(arch, 2)
    };
    Move {
        from: machine(),
        to: machine(),
        words: "rounds=2",
        plan: Plan {
            budget: Budget {
                rounds: 1,
                ..Budget::default()
            },
            ..by(mode)
        },
        patience,
        victim: None,
        breaks: false,
        pauses: false,
    }
}

/// Where to cut a link that carried this many bytes when it was whole. In what the source sends: in
/// the first message, in memory, in the state, before `Go` and within it. In the answers: in the
/// first, in a `Synced`, before `Prepared`, before `Running` and within it.
fn places([sent, answered]: [u64; 2]) -> impl Iterator<Item = [Cut; 2]> {
    let of_source = [0, 5, 4000, sent / 2, sent - 2000, sent - 24, sent - 13];
    let of_destination = [
        0,
        1,
        answered - 42,
        answered - 36,
        answered - 24,
        answered - 13,
        answered - 12,
        answered - 1,
    ];
    let of_source = of_source.map(|after| [Cut(after), UNCUT]);
    let of_destination = of_destination.map(|after| [UNCUT, Cut(after)]);
    of_source.into_iter().chain(of_destination)
}

fn ran(end: &Outcome) -> bool {
    end.destination == Some(Ending::Exited(0))
}

/// A connection that is never restored leaves one guest.
#[test]
fn a_cut_leaves_one_guest() {
    for arch in [Arch::X86_64, Arch::Arm64] {
        let migration = || little(arch, Mode::PreCopy, 0);
        let whole = migration().carry_out(&[]);
        let (mut stayed, mut moved, mut unknown) = (0, 0, 0);
        for cut in places(whole.written) {
            let end = migration().carry_out(&[cut]);
            match &end.source {
                End::Ran(Ending::Exited(0)) if end.destination.is_none() => stayed += 1,
                End::Gone if ran(&end) => moved += 1,
                // Paused until a person has looked.
                End::Unknown(None) if ran(&end) => unknown += 1,
                End::Unknown(Some(Ending::Exited(0))) if end.destination.is_none() => unknown += 1,
                _ => panic!("{cut:?} of {:?}: {end:?}", whole.written),
            }
        }
        assert!(
            stayed > 5 && moved > 0 && unknown > 0,
            "{stayed} {moved} {unknown}"
        );
    }
}

/// If the connection is restored, no cut after the pause has an effect, and none before it costs
/// the guest.
#[test]
fn a_cut_is_resumed() {
    for mode in [Mode::PreCopy, Mode::PostCopy, Mode::Hybrid] {
        let migration = || little(Arch::X86_64, mode, 9);
        let whole = migration().carry_out(&[]);
        assert!(ran(&whole), "{whole:?}");
        let (mut stayed, mut resumed) = (0, 0);
        for cut in places(whole.written) {
            // The second link is cut as well.
            let end = migration().carry_out(&[cut, [Cut(700_000), UNCUT], [UNCUT, Cut(60)]]);
            match &end.source {
                End::Ran(Ending::Exited(0)) if end.destination.is_none() => stayed += 1,
                End::Gone if ran(&end) => resumed += usize::from(end.resumed > 0),
                _ => panic!("{mode:?} {cut:?} of {:?}: {end:?}", whole.written),
            }
        }
        assert!(stayed > 0 && resumed > 0, "{mode:?}: {stayed} {resumed}");
    }
}

/// A guest whose memory never arrives is lost, and the error says so. It never runs on zeros.
#[test]
fn a_guest_without_its_memory_is_lost() {
    // The state arrives, and a few pages: the kernel alone has many more.
    let end = little(Arch::X86_64, Mode::PostCopy, 0).carry_out(&[[Cut(60_000), UNCUT]]);
    assert_eq!(end.source, End::Cut, "{end:?}");
    let Some(Ending::Failed(lost)) = &end.destination else {
        panic!("{end:?}");
    };
    assert!(
        lost.to_string().contains("before this page arrived"),
        "{lost}"
    );
}

/// A cut comes while the connections beside a new first one are made. The destination waits for one
/// of these connections, and takes the first one again.
#[test]
fn a_cut_between_new_connections_is_resumed() {
    // The first connection of the new link begins with 79 bytes, and the second one with 80.
    for place in [84, 164] {
        let migration = little(Arch::X86_64, Mode::PostCopy, 3);
        let end = migration.carry_out(&[[Cut(60_000), UNCUT], [Cut(place), UNCUT]]);
        assert_eq!(end.source, End::Gone, "{place}: {end:?}");
        assert!(ran(&end) && end.resumed == 2, "{place}: {end:?}");
    }
}

/// Late pages in huge pages arrive one by one.
#[lacuna_skip::test]
fn a_guest_comes_into_huge_pages() {
    let migration = {
        let little = little(Arch::X86_64, Mode::PostCopy, 3);
        Move {
            to: VmBuilder {
                memory_kind: MemoryKind::Hugetlbfs,
                resident: PageCount::new(LITTLE.get() * 2),
                memory: LITTLE,
                ..soft(Arch::X86_64, 2)
            },
            ..little
        }
    };
    let _reserved = HugePages::reserve(LITTLE.bytes() >> 21);
    let whole = migration.carry_out(&[]);
    assert!(whole.source == End::Gone && ran(&whole), "{whole:?}");
}

/// `Complete` counts, however late it arrives: the destination may have ended the other
/// connections.
#[test]
fn a_late_complete_counts() {
    let end = little(Arch::X86_64, Mode::PostCopy, 0).carry_over(|| {
        let link = link(&[], None);
        link.0.complete_late();
        link
    });
    assert_eq!(end.source, End::Gone, "{end:?}");
    assert!(ran(&end), "{end:?}");
}
