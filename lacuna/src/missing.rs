//! Exits on missing memory, and the pages that the VMM provides.

pub use lacuna_machine::{FaultToken, Provided, ReadyOutcome, TokenError, Tokens};
