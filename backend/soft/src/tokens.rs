//! The tokens of a vCPU's exits on missing memory.
//!
//! One vCPU has at most one pending token, that of its last exit, and as many accepted ones as its
//! queue has faults in flight. The vCPU's thread makes both kinds; any thread may say ready.

use lacuna_addr::{Access, Gfn};
use lacuna_apf::Completion;
use lacuna_machine::{FaultToken, TokenError, Told};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::HashMap;

/// The tokens of one vCPU.
#[derive(Default)]
pub(crate) struct Tokens(Mutex<State, lock_order::SoftTokens>);

#[derive(Default)]
struct State {
    /// Exits so far.
    exits: u64,
    pending: Option<Pending>,
    /// What tells the guest that the page of an accepted token is ready.
    accepted: HashMap<FaultToken, Completion>,
}

#[derive(Clone, Copy)]
struct Pending {
    token: FaultToken,
    is_ready: bool,
}

impl Tokens {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The token of a new exit of `vcpu`.
    pub fn exit(&self, vcpu: usize) -> FaultToken {
        let mut state = self.lock();
        state.exits += 1;
        let token = FaultToken::new(vcpu, state.exits);
        let is_ready = false;
        state.pending = Some(Pending { token, is_ready });
        token
    }

    /// The vCPU is entered: its exit needs no answer any more.
    pub fn enter(&self) {
        self.lock().pending = None;
    }

    /// Whether `token` may be accepted.
    pub fn check(&self, token: FaultToken) -> Result<(), TokenError> {
        let state = self.lock();
        match state.pending {
            Some(pending) if pending.token == token && pending.is_ready => Err(TokenError::Ready),
            Some(pending) if pending.token == token => Ok(()),
            _ if state.accepted.contains_key(&token) => Err(TokenError::Accepted),
            _ => Err(TokenError::Unknown),
        }
    }

    /// The guest was told. If another thread has said ready meanwhile, the page is ready at once.
    pub fn accepted(&self, token: FaultToken, completion: Completion) {
        let mut state = self.lock();
        let pending = state.pending.take();
        if pending.is_some_and(|pending| pending.is_ready) {
            drop(state);
            completion.complete();
        } else {
            state.accepted.insert(token, completion);
        }
    }

    pub fn ready(&self, token: FaultToken) -> Result<Told, TokenError> {
        let mut state = self.lock();
        if let Some(pending) = state.pending.as_mut().filter(|p| p.token == token) {
            return match std::mem::replace(&mut pending.is_ready, true) {
                false => Ok(Told::Early),
                true => Err(TokenError::Ready),
            };
        }
        let completion = state.accepted.remove(&token).ok_or(TokenError::Unknown)?;
        // The completion takes a lock and kicks the vCPU.
        drop(state);
        let told = match completion.is_cancelled() {
            true => Told::Cancelled,
            false => Told::Guest,
        };
        completion.complete();
        Ok(told)
    }
}

/// What a vCPU does about the missing page that it has exited for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Faulted {
    pub gfn: Gfn,
    pub access: Access,
    /// The VMM could not tell the guest: the next run waits for the page instead of exiting again.
    pub waits: bool,
}
