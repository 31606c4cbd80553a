//! Snapshots in an object store: a folder for [`migrate::Store`](crate::migrate::Store).
#![cfg(feature = "objects")]

pub use lacuna_objects::{Objects, ObjectsError, Options, object_store};
