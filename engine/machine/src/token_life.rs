//! The life of one vCPU's tokens: the table of [`crate::MissingMemory`] as a value.

use crate::missing::{FaultToken, TokenError};
use std::collections::HashMap;

/// The tokens of one vCPU. It has at most one pending token, from its last exit, and as many
/// accepted ones as its queue of async page faults has faults in flight.
///
/// The vCPU's thread makes tokens of both kinds, and any thread may report ready, so [`Tokens`]
/// keeps this value under a lock. An `A` delivers page-ready for an accepted token. This type only
/// gives the `A` back, which is used after the lock.
///
/// [`Tokens`]: crate::Tokens
#[derive(Debug)]
pub struct TokenLife<A> {
    exits: u64,
    pending: Option<Pending>,
    accepted: HashMap<FaultToken, A>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    token: FaultToken,
    is_ready: bool,
}

/// The result of [`TokenLife::ready`].
#[derive(Debug)]
#[must_use]
pub enum Ready<A> {
    /// The token is pending. From now on its accept is refused.
    Early,
    /// The token was accepted.
    Accepted(A),
}

impl<A> Default for TokenLife<A> {
    fn default() -> Self {
        Self {
            exits: 0,
            pending: None,
            accepted: HashMap::new(),
        }
    }
}

impl<A> TokenLife<A> {
    /// The token of a new exit of `vcpu`.
    pub fn exit(&mut self, vcpu: usize) -> FaultToken {
        self.exits += 1;
        let token = FaultToken::new(vcpu, self.exits);
        self.pending = Some(Pending {
            token,
            is_ready: false,
        });
        token
    }

    /// The vCPU is entered or reset, or its token was refused: the exit needs no answer any more.
    pub const fn enter(&mut self) {
        self.pending = None;
    }

    /// Whether `token` may be accepted.
    ///
    /// # Errors
    /// As [`Vcpu::accept`](crate::Vcpu::accept), except `CannotNotify`.
    pub fn check(&self, token: FaultToken) -> Result<(), TokenError> {
        match self.pending {
            Some(pending) if pending.token == token && pending.is_ready => Err(TokenError::Ready),
            Some(pending) if pending.token == token => Ok(()),
            _ if self.accepted.contains_key(&token) => Err(TokenError::Accepted),
            _ => Err(TokenError::Unknown),
        }
    }

    /// The guest got page-not-present for `token`.
    ///
    /// # Errors
    /// `accepted`, if another thread has reported ready since [`TokenLife::check`]: the token
    /// counts as not accepted, [`TokenError::Ready`], and the guest gets page-ready at once.
    pub fn accept(&mut self, token: FaultToken, accepted: A) -> Result<(), A> {
        let pending = self.pending.take();
        if pending.is_some_and(|pending| pending.is_ready) {
            return Err(accepted);
        }
        self.accepted.insert(token, accepted);
        Ok(())
    }

    /// Whether `token` may still be reported ready.
    pub fn is_open(&self, token: FaultToken) -> bool {
        let is_pending = self.pending.is_some_and(|pending| pending.token == token);
        is_pending || self.accepted.contains_key(&token)
    }

    /// The page of `token` is ready.
    ///
    /// # Errors
    /// As [`MissingMemory::ready`](crate::MissingMemory::ready).
    pub fn ready(&mut self, token: FaultToken) -> Result<Ready<A>, TokenError> {
        if let Some(pending) = self.pending.as_mut().filter(|p| p.token == token) {
            return match std::mem::replace(&mut pending.is_ready, true) {
                false => Ok(Ready::Early),
                true => Err(TokenError::Ready),
            };
        }
        let accepted = self.accepted.remove(&token).ok_or(TokenError::Unknown)?;
        Ok(Ready::Accepted(accepted))
    }

    /// The values of the accepted tokens.
    pub fn accepted_mut(&mut self) -> impl Iterator<Item = &mut A> {
        self.accepted.values_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The columns of the table in [`crate::MissingMemory`].
    #[test]
    fn each_order_of_calls_has_one_outcome() {
        let mut life = TokenLife::default();
        let pending = life.exit(3);
        assert_eq!(pending.vcpu(), 3);
        assert!(life.check(pending).is_ok() && life.is_open(pending));
        assert!(matches!(life.ready(pending), Ok(Ready::Early)));
        assert_eq!(life.check(pending), Err(TokenError::Ready));
        assert!(matches!(life.ready(pending), Err(TokenError::Ready)));
        assert_eq!(life.accept(pending, 'a'), Err('a'));
        assert!(!life.is_open(pending));

        let accepted = life.exit(3);
        assert_ne!(accepted, pending);
        assert_eq!(life.accept(accepted, 'b'), Ok(()));
        assert_eq!(life.check(accepted), Err(TokenError::Accepted));
        life.enter();
        let other = life.exit(3);
        assert!(matches!(life.ready(accepted), Ok(Ready::Accepted('b'))));
        assert!(matches!(life.ready(accepted), Err(TokenError::Unknown)));
        life.enter();
        assert_eq!(life.check(other), Err(TokenError::Unknown));
        assert!(matches!(life.ready(other), Err(TokenError::Unknown)));
        assert_eq!(life.accepted_mut().count(), 0);
    }
}
