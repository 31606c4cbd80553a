//! The names of [`Detection`] in JSON, as `lacuna run --dirty` takes them.

use lacuna::dirty::Detection;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(remote = "Detection")]
enum Name {
    #[serde(rename = "wp")]
    WriteProtect,
    #[serde(rename = "pml")]
    Pml,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Named(#[serde(with = "Name")] pub Detection);

pub fn serialize<S: Serializer>(value: &Option<Detection>, to: S) -> Result<S::Ok, S::Error> {
    value.map(Named).serialize(to)
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Detection>, D::Error> {
    Ok(Option::deserialize(from)?.map(|Named(value)| value))
}
