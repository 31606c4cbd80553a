//! Tokens of exits on missing memory.

use crate::memory::Page;
use lacuna_apf::Completion;
use lacuna_machine::{FaultToken, Ready, ReadyOutcome, TokenError, TokenLife};
use lacuna_sync::{Mutex, MutexGuard, lock_order};

struct Accepted {
    page: Page,
    /// Notifies the guest that the page is ready. `None`: its vCPU has another state.
    completion: Option<Completion>,
}

/// The tokens of a VM's vCPUs.
pub struct Tokens(Box<[Mutex<TokenLife<Accepted>, lock_order::KvmTokens>]>);

impl Tokens {
    /// For `vcpus` vCPUs.
    pub fn new(vcpus: usize) -> Self {
        Self((0..vcpus).map(|_| Mutex::default()).collect())
    }

    fn of(&self, vcpu: usize) -> Option<MutexGuard<'_, TokenLife<Accepted>>> {
        let life = self.0.get(vcpu)?;
        Some(life.lock().expect("no panic under this lock"))
    }

    /// The token of a new exit of `vcpu`.
    pub fn exit(&self, vcpu: usize) -> FaultToken {
        self.of(vcpu).expect("a vCPU of this VM").exit(vcpu)
    }

    /// As [`TokenLife::enter`].
    pub fn enter(&self, vcpu: usize) {
        if let Some(mut life) = self.of(vcpu) {
            life.enter();
        }
    }

    /// `vcpu` has another state now. Accepted tokens stay until they are reported ready, but no
    /// longer count as faults in flight. So a VMM need not report ready for the tokens of a dropped
    /// guest.
    pub fn reset(&self, vcpu: usize) {
        let Some(mut life) = self.of(vcpu) else {
            return;
        };
        life.enter();
        let accepted = life.accepted_mut();
        let cancelled: Vec<_> = accepted
            .map(|accepted| accepted.completion.take())
            .collect();
        // Dropping a completion takes a lock.
        drop(life);
        drop(cancelled);
    }

    /// As [`TokenLife::check`].
    pub fn check(&self, vcpu: usize, token: FaultToken) -> Result<(), TokenError> {
        self.of(vcpu).ok_or(TokenError::Unknown)?.check(token)
    }

    /// As [`TokenLife::accept`], for the page of a delivered page-not-present.
    pub fn accepted(
        &self,
        vcpu: usize,
        token: FaultToken,
        page: Page,
        completion: Completion,
    ) -> Result<(), TokenError> {
        let completion = Some(completion);
        let mut life = self.of(vcpu).expect("a vCPU of this VM");
        let accepted = life.accept(token, Accepted { page, completion });
        drop(life);
        // The completion is dropped after the lock; the drop notifies the guest.
        accepted.map_err(|_accepted| TokenError::Ready)
    }

    /// As [`TokenLife::is_open`].
    pub fn is_open(&self, token: FaultToken) -> bool {
        self.of(token.vcpu())
            .is_some_and(|life| life.is_open(token))
    }

    /// The page of `token` is ready. Returns the page if its page-not-present was delivered.
    pub fn ready(&self, token: FaultToken) -> Result<(ReadyOutcome, Option<Page>), TokenError> {
        let ready = self
            .of(token.vcpu())
            .ok_or(TokenError::Unknown)?
            .ready(token)?;
        let Ready::Accepted(Accepted { page, completion }) = ready else {
            return Ok((ReadyOutcome::Early, None));
        };
        // The completion takes a lock and wakes the vCPU.
        let completion = completion.filter(|completion| !completion.is_cancelled());
        let outcome = completion
            .as_ref()
            .map_or(ReadyOutcome::Cancelled, |_| ReadyOutcome::Notified);
        drop(completion);
        Ok((outcome, Some(page)))
    }
}
