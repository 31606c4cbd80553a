//! A page that the source of a migration cannot read.

use super::ends::{End, Machines, Move};
use super::{by, soft};
use lacuna_machine::{Answer, Arch, Ending, PageRequest, PageSource};
use lacuna_migrate::stream::Mode;
use std::sync::Arc;

/// Memory of zeros whose first page cannot be read. Guests do not use that page.
struct Broken;

impl PageSource for Broken {
    fn describe(&self) -> String {
        "a broken disk".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _: Answer = match request.page().0 {
            0 => request.fail("the disk is broken"),
            _ => request.provide(&[0; 4096]),
        };
    }
}

#[test]
fn a_page_that_cannot_be_read_keeps_no_other_back() {
    let migration = |mode| Move {
        from: soft(Arch::X86_64, 2).with_source(Some(Arc::new(Broken))),
        to: soft(Arch::X86_64, 2),
        words: "rounds=2",
        plan: by(mode),
        patience: 0,
        victim: None,
        breaks: false,
        pauses: false,
    };
    // All pages arrive after the guest, this one among others.
    let end = migration(Mode::PostCopy).carry_out(&[]);
    assert_eq!(end.source, End::Cut, "{end:?}");
    assert!(end.errors[0].contains("the disk is broken"), "{end:?}");
    assert_eq!(end.destination, Some(Ending::Exited(0)), "{end:?}");
    // If the read fails before the guest goes, the guest stays.
    let end = migration(Mode::PreCopy).carry_out(&[]);
    assert_eq!(end.source, End::Ran(Ending::Exited(0)), "{end:?}");
    assert!(end.errors[0].contains("the disk is broken"), "{end:?}");
}
