//! The promises of [`TableFormat`](super::TableFormat), as tests that each format includes.

use crate::{Entry, Leaf, Write};
use lacuna_addr::{Level, Pfn};
use lacuna_tables::TableId;
use proptest::prelude::*;

/// Leaves without a defect, but for their alignment: D implies W.
pub(super) fn any_leaf() -> impl Strategy<Value = Leaf> {
    let level = prop::sample::select(Level::ALL.to_vec());
    let write = prop::sample::select(vec![Write::Never, Write::OnFault, Write::Allowed]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (any::<u32>(), level, write, flags).prop_map(|(pfn, level, write, flags)| {
        let (exec, accessed, dirty) = flags;
        Leaf {
            pfn: Pfn::new(pfn),
            level,
            write,
            exec,
            accessed,
            dirty: dirty && write == Write::Allowed,
        }
    })
}

pub(super) fn any_entry() -> impl Strategy<Value = Entry> {
    let table = (1u32..1 << TableId::BITS)
        .prop_map(|raw| Entry::Table(TableId::new(raw).expect("in range")));
    prop_oneof![
        Just(Entry::Absent),
        Just(Entry::Frozen),
        table,
        any_leaf().prop_map(Entry::Leaf),
    ]
}

/// The tests of one format.
macro_rules! promises {
    ($format:ty) => {
        mod promises {
            use super::super::super::tests::{any_entry, any_leaf};
            use super::super::*;
            use proptest::prelude::*;

            type Format = $format;

            proptest! {
                #[test]
                fn decoding_undoes_encoding(entry in any_entry()) {
                    prop_assert_eq!(Format::decode(Format::encode(entry)), entry);
                }

                #[test]
                fn each_kind_of_entry_is_distinguished(entry in any_entry()) {
                    let raw = Format::encode(entry);
                    let table = match entry {
                        Entry::Table(id) => Some(id),
                        _ => None,
                    };
                    let writable = matches!(entry, Entry::Leaf(leaf) if leaf.is_writable());
                    prop_assert_eq!(Format::table(raw), table);
                    prop_assert_eq!(Format::is_leaf(raw), matches!(entry, Entry::Leaf(_)));
                    prop_assert_eq!(Format::is_writable_leaf(raw), writable);
                }

                #[test]
                fn an_access_sets_a_and_a_write_d(leaf in any_leaf()) {
                    for access in [Access::Read, Access::Write, Access::Fetch] {
                        if access.is_write() && !leaf.is_writable() {
                            continue;
                        }
                        let dirty = leaf.dirty || access.is_write();
                        let wanted = Leaf { accessed: true, dirty, ..leaf };
                        let found = Format::accessed(Format::encode(Entry::Leaf(leaf)), access);
                        prop_assert_eq!(Format::decode(found), Entry::Leaf(wanted));
                    }
                }

                #[test]
                fn a_protected_or_cleared_leaf_keeps_all_but_w_and_d(leaf in any_leaf()) {
                    let leaf = Leaf { write: Write::Allowed, ..leaf };
                    let raw = Format::encode(Entry::Leaf(leaf));
                    let no_w = Leaf { write: Write::OnFault, dirty: false, ..leaf };
                    let no_d = Leaf { dirty: false, ..leaf };
                    let logged = if leaf.level == Level::L4K { no_d } else { no_w };
                    let protected = Format::decode(Format::write_protected(raw));
                    prop_assert_eq!(protected, Entry::Leaf(no_w));
                    let cleared = Format::decode(Format::dirty_cleared(raw));
                    prop_assert_eq!(cleared, Entry::Leaf(logged));
                }
            }

            #[test]
            fn zeroed_memory_is_absent() {
                assert_eq!(Format::decode(0), Entry::Absent);
            }
        }
    };
}
pub(super) use promises;
