//! The tokens of a vCPU's exits on missing memory.

use lacuna_addr::{Access, BackingAddr, Gfn};
use lacuna_apf::Completion;
use lacuna_machine::{FaultToken, Ready, ReadyOutcome, TokenError, TokenLife};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::HashMap;

/// The tokens of one vCPU.
#[derive(Default)]
pub(crate) struct Tokens(Mutex<TokenTable, lock_order::SoftTokens>);

#[derive(Default)]
struct TokenTable {
    /// An accepted token has the completion that delivers page-ready to the guest; `None` after a
    /// reset.
    life: TokenLife<Option<Completion>>,
    /// Tokens that become ready when a page has arrived, by page.
    coming: HashMap<BackingAddr, Vec<FaultToken>>,
}

impl Tokens {
    fn lock(&self) -> MutexGuard<'_, TokenTable> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The token of a new exit of `vcpu`.
    pub fn exit(&self, vcpu: usize) -> FaultToken {
        self.lock().life.exit(vcpu)
    }

    /// As [`TokenLife::enter`].
    pub fn enter(&self) {
        self.lock().life.enter();
    }

    /// The vCPU was reset, or has got another state. Accepted tokens stay until they are reported
    /// ready, but no longer count as faults in flight: a VMM need not report ready for the tokens
    /// of a dropped guest.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.life.enter();
        let cancelled: Vec<_> = state.life.accepted_mut().map(Option::take).collect();
        // Dropping a completion takes a lock.
        drop(state);
        drop(cancelled);
    }

    /// As [`TokenLife::check`].
    pub fn check(&self, token: FaultToken) -> Result<(), TokenError> {
        self.lock().life.check(token)
    }

    /// As [`TokenLife::is_open`].
    pub fn is_open(&self, token: FaultToken) -> bool {
        self.lock().life.is_open(token)
    }

    /// As [`TokenLife::accept`].
    pub fn accepted(&self, token: FaultToken, completion: Completion) -> Result<(), TokenError> {
        let accepted = self.lock().life.accept(token, Some(completion));
        // The completion is dropped after the lock; the drop delivers page-ready.
        accepted.map_err(|_completion| TokenError::Ready)
    }

    /// Notes that `token` becomes ready when `page` has arrived. Returns whether the caller has to
    /// arrange a call of [`Tokens::has_come`]: an earlier caller may have done that. A page keeps
    /// each token once, and no completed token, so endless calls do not use endless memory.
    pub fn ready_when(&self, page: BackingAddr, token: FaultToken) -> bool {
        let mut state = self.lock();
        if !state.life.is_open(token) {
            return false;
        }
        let earlier = state.coming.remove(&page);
        let is_first = earlier.is_none();
        let mut tokens = earlier.unwrap_or_default();
        tokens.retain(|other| *other != token && state.life.is_open(*other));
        tokens.push(token);
        state.coming.insert(page, tokens);
        is_first
    }

    /// Reports the tokens that wait for `page` ready.
    pub fn has_come(&self, page: BackingAddr) {
        let tokens = self.lock().coming.remove(&page);
        for token in tokens.into_iter().flatten() {
            // The call fails if the token is already completed.
            let _ = self.ready(token);
        }
    }

    /// The page of `token` is ready: an accepted token's guest gets page-ready, a pending token
    /// records it.
    pub fn ready(&self, token: FaultToken) -> Result<ReadyOutcome, TokenError> {
        let ready = self.lock().life.ready(token)?;
        let Ready::Accepted(completion) = ready else {
            return Ok(ReadyOutcome::Early);
        };
        // The completion takes a lock and kicks the vCPU.
        let completion = completion.filter(|completion| !completion.is_cancelled());
        let outcome = completion
            .as_ref()
            .map_or(ReadyOutcome::Cancelled, |_| ReadyOutcome::Notified);
        drop(completion);
        Ok(outcome)
    }
}

/// The missing page for which a vCPU has exited, and the vCPU's next reaction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Faulted {
    pub gfn: Gfn,
    /// The page behind `gfn` at the exit: after a change of the slots it is another page.
    pub page: BackingAddr,
    pub access: Access,
    /// Whether the VMM could not notify the guest: then the next run waits for the page instead of
    /// exiting again.
    pub waits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::PAGE_SIZE;

    /// A page keeps one entry for each uncompleted token, however often it is fetched.
    #[test]
    fn tokens_that_wait_for_a_page_are_bounded() {
        let tokens = Tokens::default();
        let page = BackingAddr::new(5 * PAGE_SIZE as u64);
        let mut token = tokens.exit(0);
        assert!(tokens.ready_when(page, token));
        for _ in 0..100 {
            assert!(
                !tokens.ready_when(page, token),
                "the caller has arranged a call"
            );
            token = tokens.exit(0);
        }
        assert!(!tokens.ready_when(page, token));
        assert_eq!(tokens.lock().coming[&page], [token]);
        tokens.has_come(page);
        assert_eq!(tokens.ready(token), Err(TokenError::Ready));
        assert!(
            tokens.ready_when(page, token),
            "the next time that it arrives"
        );
    }
}
