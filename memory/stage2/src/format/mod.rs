//! Entry formats: the only place in this crate with shifts and masks.

mod ept;
mod height;

pub(crate) use ept::{
    cleaned, decode, encode, is_leaf, is_writable_leaf, protected, qualification, table, used,
};
pub(crate) use height::{Height, block_of, block_range, blocks_of, frame_of, leaf_span};
