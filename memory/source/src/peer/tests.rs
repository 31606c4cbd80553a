//! Messages as bytes: every sent message is decoded, whatever the pieces; the decoder keeps a
//! bounded number of bytes.

use super::wire::REASON;
use super::*;
use crate::{MemoryId, SourcePage};
use lacuna_addr::PAGE_SIZE;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Sent {
    Request(u64),
    Content(u64, u8),
    Zeros(u64),
    Failure(u64, String),
}

fn sent() -> impl Strategy<Value = Sent> {
    prop_oneof![
        any::<u64>().prop_map(Sent::Request),
        (any::<u64>(), any::<u8>()).prop_map(|(page, byte)| Sent::Content(page, byte)),
        any::<u64>().prop_map(Sent::Zeros),
        (any::<u64>(), "[a-z ]{0,600}").prop_map(|(page, why)| Sent::Failure(page, why)),
    ]
}

/// As a message; a reason is cut.
fn with<T>(sent: &Sent, then: impl FnOnce(&Message<'_>) -> T) -> T {
    let content;
    let message = match sent {
        Sent::Request(page) => Message::Request(SourcePage(*page)),
        Sent::Content(page, byte) => {
            content = [*byte; PAGE_SIZE];
            Message::Content(SourcePage(*page), &content)
        }
        Sent::Zeros(page) => Message::Zeros(SourcePage(*page)),
        Sent::Failure(page, why) => {
            let why = &why.as_bytes()[..why.len().min(REASON)];
            Message::Failure(SourcePage(*page), why)
        }
    };
    then(&message)
}

proptest! {
    #[test]
    fn what_is_sent_is_decoded(
        all in prop::collection::vec(sent(), 0..20),
        cuts in prop::collection::vec(1usize..6000, 1..20),
    ) {
        let mut bytes = Vec::new();
        all.iter().for_each(|one| with(one, |message| encode(message, &mut bytes)));
        let (mut decoder, mut expected) = (Decoder::default(), all.iter());
        let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            rest = after;
            decoder.push(piece);
            while let Some(message) = decoder.decode().unwrap() {
                let one = expected.next().expect("no more than was sent");
                with(one, |sent| assert_eq!(&message, sent));
            }
            prop_assert!(decoder.kept() < 16 + PAGE_SIZE);
        }
        prop_assert_eq!(expected.count(), 0);
    }

    #[test]
    fn garbage_ends_in_an_error_or_keeps_less_than_a_message(
        bytes in prop::collection::vec(any::<u8>(), 0..20_000),
    ) {
        let mut decoder = Decoder::default();
        for piece in bytes.chunks(777) {
            decoder.push(piece);
            loop {
                match decoder.decode() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => return Ok(()),
                }
            }
            prop_assert!(decoder.kept() < 16 + PAGE_SIZE);
        }
    }
}

#[test]
fn a_hello_of_another_kind_is_refused_for_its_reason() {
    let hello = Hello {
        pages: 7,
        memory: MemoryId::of(&[b"a", b"b"]),
    };
    let good = hello.bytes();
    assert_eq!(Hello::parse(&good).unwrap(), hello);
    let bad = |at: usize| {
        let mut bytes = good;
        bytes[at] ^= 1;
        Hello::parse(&bytes).unwrap_err()
    };
    assert!(matches!(bad(0), PeerError::NotAPeer));
    assert!(matches!(bad(8), PeerError::Version { theirs: 3, ours: 2 }));
    assert!(matches!(bad(12), PeerError::PageSize(4097)));
    // The hello of version 1 had 24 bytes.
    let old = [&good[..8], &1u32.to_le_bytes(), &good[12..24]].concat();
    assert!(matches!(
        Hello::check(&old),
        Err(PeerError::Version { theirs: 1, ours: 2 })
    ));
    assert!(matches!(Hello::check(&old[..11]), Ok(())));
    assert!(matches!(
        Hello::check(b"GET / HT"),
        Err(PeerError::NotAPeer)
    ));
}

#[test]
fn memories_have_identities() {
    let named: [&[&[u8]]; 4] = [&[b"ab", b"c"], &[b"a", b"bc"], &[b"abc"], &[]];
    let ids = named.map(MemoryId::of);
    for (index, id) in ids.iter().enumerate() {
        assert!(!ids[..index].contains(id), "{ids:?}");
    }
    // A constant of the protocol: the two sides may be of different releases.
    assert_eq!(
        MemoryId::of(&[]).to_string(),
        "6c62272e07bb014262b821756295c58d"
    );
}
