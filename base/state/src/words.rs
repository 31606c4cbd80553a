//! An array of any length as a sequence: `serde` supports only up to 32 elements.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(crate) fn serialize<S: Serializer, const N: usize>(
    words: &[u32; N],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    words.as_slice().serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(
    deserializer: D,
) -> Result<[u32; N], D::Error> {
    let words = Vec::deserialize(deserializer)?;
    let found = words.len();
    words
        .try_into()
        .map_err(|_| D::Error::invalid_length(found, &"an array of another length"))
}
