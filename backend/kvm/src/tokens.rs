//! Tokens of exits on missing memory.

use crate::memory::Page;
use lacuna_apf::Completion;
use lacuna_machine::ReadyOutcome;
use lacuna_sync::lock_order;

/// The tokens of one vCPU.
pub type Tokens = lacuna_machine::Tokens<Page, lock_order::KvmTokens>;

/// Delivers page-ready, unless the guest has cancelled the fault.
pub fn report(completion: Completion) -> ReadyOutcome {
    match completion.is_cancelled() {
        true => ReadyOutcome::Cancelled,
        false => {
            completion.complete();
            ReadyOutcome::Notified
        }
    }
}
