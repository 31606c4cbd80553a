//! Tokens of exits on missing memory.

use crate::memory::Page;
use lacuna_sync::lock_order;

/// The tokens of one vCPU.
pub type Tokens = lacuna_machine::Tokens<Page, lock_order::KvmTokens>;
