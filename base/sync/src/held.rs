//! A thread's held locks: debug builds record and check them, release builds do nothing.

#[cfg(debug_assertions)]
pub(crate) use checked::{Held, assert_may_wait};
#[cfg(not(debug_assertions))]
pub(crate) use unchecked::{Held, assert_may_wait};

#[cfg(debug_assertions)]
mod checked {
    use crate::lock_order::{LockClass, Rank};
    use std::cell::RefCell;
    use std::fmt;
    use std::marker::PhantomData;
    use std::sync::MutexGuard;

    #[cfg(loom)]
    loom::thread_local! {
        static HELD: RefCell<Vec<Lock>> = RefCell::new(Vec::new());
    }
    #[cfg(not(loom))]
    thread_local! {
        static HELD: RefCell<Vec<Lock>> = const { RefCell::new(Vec::new()) };
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Lock {
        rank: Rank,
        name: &'static str,
        /// Of a range lock: the address of its `RangeLocks`, and its index there.
        place: Option<(usize, usize)>,
    }

    impl Lock {
        fn of<C: LockClass>() -> Self {
            Self {
                rank: C::RANK,
                name: C::NAME,
                place: None,
            }
        }

        fn may_precede(self, next: Self) -> bool {
            match (self.place, next.place) {
                (Some((locks, index)), Some((same, after))) if locks == same => index < after,
                _ => self.rank < next.rank,
            }
        }

        /// Call this before the lock is taken: a violation then panics, and does not deadlock.
        #[track_caller]
        fn check(self) {
            // A second panic would end the process without a message about the first.
            if std::thread::panicking() {
                return;
            }
            let wrong = find(|held| !held.may_precede(self));
            if let Some(held) = wrong {
                panic!("lock order: {self} is taken while {held} is held (see docs/locking.md)");
            }
        }

        fn record(self) -> Held {
            // This fails only while the thread ends and its thread-local values are gone.
            let _ = HELD.try_with(|held| held.borrow_mut().push(self));
            Held(self, PhantomData)
        }
    }

    impl fmt::Display for Lock {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let Self { rank, name, place } = self;
            write!(f, "{name}")?;
            if let Some((_, index)) = place {
                write!(f, " {index}")?;
            }
            write!(f, " of rank {rank:?}")
        }
    }

    fn find(wanted: impl Fn(Lock) -> bool) -> Option<Lock> {
        let found = HELD.try_with(|held| held.borrow().iter().copied().find(|lock| wanted(*lock)));
        found.ok().flatten()
    }

    /// A held lock. Like a guard, it stays on its thread.
    pub(crate) struct Held(Lock, PhantomData<MutexGuard<'static, ()>>);

    impl Held {
        /// Checks a lock of class `C` against the order, then takes it.
        #[track_caller]
        pub(crate) fn take<C: LockClass, G>(lock: impl FnOnce() -> G) -> (G, Self) {
            Lock::of::<C>().check();
            let guard = lock();
            (guard, Lock::of::<C>().record())
        }

        /// Records a lock that was taken without waiting. Such a lock cannot deadlock.
        pub(crate) fn tried<C: LockClass>() -> Self {
            Lock::of::<C>().record()
        }

        /// Checks lock `index` of the range locks at address `locks`, then takes it.
        #[track_caller]
        pub(crate) fn take_range<C: LockClass, G>(
            locks: usize,
            index: usize,
            lock: impl FnOnce() -> G,
        ) -> (G, Self) {
            let ranged = Lock {
                place: Some((locks, index)),
                ..Lock::of::<C>()
            };
            ranged.check();
            let guard = lock();
            (guard, ranged.record())
        }

        /// `wait` releases the lock, waits, and takes the lock again.
        #[track_caller]
        pub(crate) fn wait<G>(self, wait: impl FnOnce() -> G) -> (G, Self) {
            let lock = self.0;
            drop(self);
            assert_may_wait();
            let guard = wait();
            (guard, lock.record())
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            // As in `record`, an error means that the thread ends.
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(last) = held.iter().rposition(|lock| *lock == self.0) {
                    held.remove(last);
                }
            });
        }
    }

    /// Fails if the thread holds a lock under which no thread may wait.
    #[track_caller]
    pub(crate) fn assert_may_wait() {
        if std::thread::panicking() {
            return;
        }
        if let Some(held) = find(|held| !held.rank.may_wait()) {
            panic!("lock order: a thread waits while {held} is held (see docs/locking.md)");
        }
    }
}

#[cfg(not(debug_assertions))]
mod unchecked {
    use crate::lock_order::LockClass;
    use std::marker::PhantomData;
    use std::sync::MutexGuard;

    /// As in debug builds, a guard stays on its thread; nothing is recorded.
    pub(crate) struct Held(PhantomData<MutexGuard<'static, ()>>);

    impl Held {
        #[inline(always)]
        pub(crate) fn take<C: LockClass, G>(lock: impl FnOnce() -> G) -> (G, Self) {
            (lock(), Self(PhantomData))
        }

        #[inline(always)]
        pub(crate) fn tried<C: LockClass>() -> Self {
            Self(PhantomData)
        }

        #[inline(always)]
        pub(crate) fn take_range<C: LockClass, G>(
            _: usize,
            _: usize,
            lock: impl FnOnce() -> G,
        ) -> (G, Self) {
            (lock(), Self(PhantomData))
        }

        #[inline(always)]
        pub(crate) fn wait<G>(self, wait: impl FnOnce() -> G) -> (G, Self) {
            (wait(), self)
        }
    }

    #[inline(always)]
    pub(crate) fn assert_may_wait() {}
}
