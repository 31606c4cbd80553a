//! Tokens of exits on missing memory.
//!
//! KVM's kernel owns the guest's async page faults, so this backend cannot tell a guest of a
//! missing page: no token is accepted. One vCPU has at most one pending token, that of its last
//! exit.

use lacuna_machine::{FaultToken, TokenError, Told};
use lacuna_sync::{Mutex, MutexGuard, lock_order};

#[derive(Default)]
struct State {
    /// Exits so far.
    exits: u64,
    pending: Option<Pending>,
}

#[derive(Clone, Copy)]
struct Pending {
    token: FaultToken,
    is_ready: bool,
}

/// The tokens of a VM's vCPUs.
pub struct Tokens(Box<[Mutex<State, lock_order::KvmTokens>]>);

impl Tokens {
    /// For `vcpus` vCPUs.
    pub fn new(vcpus: usize) -> Self {
        Self((0..vcpus).map(|_| Mutex::default()).collect())
    }

    fn of(&self, vcpu: usize) -> Option<MutexGuard<'_, State>> {
        let state = self.0.get(vcpu)?;
        Some(state.lock().expect("no panic under this lock"))
    }

    /// The token of a new exit of `vcpu`.
    pub fn exit(&self, vcpu: usize) -> FaultToken {
        let mut state = self.of(vcpu).expect("a vCPU of this VM");
        state.exits += 1;
        let token = FaultToken::new(vcpu, state.exits);
        let is_ready = false;
        state.pending = Some(Pending { token, is_ready });
        token
    }

    /// `vcpu` is entered: its exit needs no answer any more.
    pub fn enter(&self, vcpu: usize) {
        if let Some(mut state) = self.of(vcpu) {
            state.pending = None;
        }
    }

    /// Refuses to accept a token.
    pub fn refuse(&self, vcpu: usize, token: FaultToken) -> TokenError {
        let Some(mut state) = self.of(vcpu) else {
            return TokenError::Unknown;
        };
        match state.pending {
            Some(pending) if pending.token != token => TokenError::Unknown,
            Some(pending) if pending.is_ready => TokenError::Ready,
            Some(_) => {
                state.pending = None;
                TokenError::CannotTell
            }
            None => TokenError::Unknown,
        }
    }

    /// The page of `token` is ready.
    pub fn ready(&self, token: FaultToken) -> Result<Told, TokenError> {
        let mut state = self.of(token.vcpu()).ok_or(TokenError::Unknown)?;
        let pending = state.pending.as_mut().filter(|p| p.token == token);
        match std::mem::replace(&mut pending.ok_or(TokenError::Unknown)?.is_ready, true) {
            false => Ok(Told::Early),
            true => Err(TokenError::Ready),
        }
    }
}
