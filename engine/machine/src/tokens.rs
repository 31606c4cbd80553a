//! The tokens of one vCPU, for the threads that accept them and report them ready.

use crate::missing::{FaultToken, ReadyOutcome, TokenError};
use crate::token_life::{Ready, TokenLife};
use lacuna_sync::lock_order::LockClass;
use lacuna_sync::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::hash::Hash;
use tracing::trace;

/// Reports to the guest that a page is ready. Returns whether the guest still waits for it.
type Report = Box<dyn FnOnce() -> bool + Send>;

/// The tokens of one vCPU of a backend whose pages have the names `P`, under a lock of the class
/// `L`. No call holds the lock while it reports to the guest.
pub struct Tokens<P, L>(Mutex<TokenTable<P>, L>);

struct TokenTable<P> {
    life: TokenLife<Accepted<P>>,
    /// Tokens that become ready when a page has arrived, by page.
    coming: HashMap<P, Vec<FaultToken>>,
}

struct Accepted<P> {
    page: P,
    /// `None`: the vCPU has another state since.
    report: Option<Report>,
}

impl<P, L: LockClass> Default for Tokens<P, L> {
    fn default() -> Self {
        Self(Mutex::new(TokenTable {
            life: TokenLife::default(),
            coming: HashMap::new(),
        }))
    }
}

impl<P: Copy + Eq + Hash, L: LockClass> Tokens<P, L> {
    fn lock(&self) -> MutexGuard<'_, TokenTable<P>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The token of a new exit of `vcpu`.
    pub fn exit(&self, vcpu: usize) -> FaultToken {
        self.lock().life.exit(vcpu)
    }

    /// The vCPU is entered, or its token was refused: the exit needs no answer any more.
    pub fn enter(&self) {
        self.lock().life.enter();
    }

    /// The vCPU was reset, or has got another state. Accepted tokens stay until they are reported
    /// ready, but no longer count as faults in flight: a VMM need not report ready for the tokens
    /// of a dropped guest.
    pub fn reset(&self) {
        let mut table = self.lock();
        table.life.enter();
        let accepted = table.life.accepted_mut();
        let cancelled: Vec<_> = accepted.map(|accepted| accepted.report.take()).collect();
        // A drop takes a lock of the guest's events.
        drop(table);
        drop(cancelled);
    }

    /// Whether `token` may be accepted.
    ///
    /// # Errors
    /// As [`Vcpu::accept`](crate::Vcpu::accept), except `CannotNotify`.
    pub fn check(&self, token: FaultToken) -> Result<(), TokenError> {
        self.lock().life.check(token)
    }

    /// Whether `token` may still be reported ready.
    pub fn is_open(&self, token: FaultToken) -> bool {
        self.lock().life.is_open(token)
    }

    /// The guest got page-not-present for `token`, whose page is `page`. `report` gives it
    /// page-ready, and returns whether it still waits for that; if it is dropped, the guest gets
    /// page-ready too.
    ///
    /// # Errors
    /// Another thread has reported ready since [`Tokens::check`]: the token counts as not accepted,
    /// and the guest gets page-ready at once.
    pub fn accepted(
        &self,
        token: FaultToken,
        page: P,
        report: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<(), TokenError> {
        let report = Some(Box::new(report) as Report);
        let mut table = self.lock();
        let accepted = table.life.accept(token, Accepted { page, report });
        if accepted.is_ok() {
            // Under the lock, so that the event precedes `ready`.
            trace!(target: "lacuna::exit", vcpu = token.vcpu(), token = token.0, "accept");
        }
        drop(table);
        accepted.map_err(|_dropped_without_the_lock| TokenError::Ready)
    }

    /// Notes that `token` becomes ready when `page` has arrived. Returns whether the caller has to
    /// arrange a call of [`Tokens::has_come`]: an earlier caller may have done that. A page keeps
    /// each token once, and no completed token, so endless calls do not use endless memory.
    pub fn ready_when(&self, page: P, token: FaultToken) -> bool {
        let mut table = self.lock();
        if !table.life.is_open(token) {
            return false;
        }
        let earlier = table.coming.remove(&page);
        let is_first = earlier.is_none();
        let mut tokens = earlier.unwrap_or_default();
        tokens.retain(|other| *other != token && table.life.is_open(*other));
        tokens.push(token);
        table.coming.insert(page, tokens);
        is_first
    }

    /// Reports the tokens that wait for `page` ready.
    pub fn has_come(&self, page: P) {
        let tokens = self.lock().coming.remove(&page);
        for token in tokens.into_iter().flatten() {
            // The call fails if the token is already completed.
            let _ = self.ready(token);
        }
    }

    /// The page of `token` is ready: an accepted token's guest gets page-ready, a pending token
    /// records it. Also returns the page of an accepted token.
    ///
    /// # Errors
    /// As [`MissingMemory::ready`](crate::MissingMemory::ready).
    pub fn ready(&self, token: FaultToken) -> Result<(ReadyOutcome, Option<P>), TokenError> {
        let ready = self.lock().life.ready(token)?;
        trace!(target: "lacuna::exit", vcpu = token.vcpu(), token = token.0, "ready");
        Ok(match ready {
            Ready::Early => (ReadyOutcome::Early, None),
            Ready::Accepted(Accepted { page, report }) => {
                let outcome = match report.is_some_and(|report| report()) {
                    true => ReadyOutcome::Notified,
                    false => ReadyOutcome::Cancelled,
                };
                (outcome, Some(page))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_sync::lock_order::SoftTokens;

    /// A page keeps one entry for each uncompleted token, however often it is fetched.
    #[test]
    fn tokens_that_wait_for_a_page_are_bounded() {
        let tokens = Tokens::<u32, SoftTokens>::default();
        let mut token = tokens.exit(0);
        assert!(tokens.ready_when(5, token));
        for _ in 0..100 {
            assert!(
                !tokens.ready_when(5, token),
                "the caller has arranged a call"
            );
            token = tokens.exit(0);
        }
        assert!(!tokens.ready_when(5, token));
        assert_eq!(tokens.lock().coming[&5], [token]);
        tokens.has_come(5);
        assert_eq!(tokens.ready(token).unwrap_err(), TokenError::Ready);
        assert!(tokens.ready_when(5, token), "the next time that it arrives");
    }

    /// An accepted token is reported once, or never if its vCPU has another state.
    #[test]
    fn a_report_is_made_once() {
        let tokens = Tokens::<u32, SoftTokens>::default();
        let [first, second] = [7, 8].map(|page| {
            let token = tokens.exit(0);
            let accepted = tokens.accepted(token, page, || true);
            accepted.unwrap();
            token
        });
        assert_eq!(tokens.ready(first), Ok((ReadyOutcome::Notified, Some(7))));
        assert_eq!(tokens.ready(first), Err(TokenError::Unknown));
        tokens.reset();
        assert_eq!(tokens.ready(second), Ok((ReadyOutcome::Cancelled, Some(8))));
    }
}
