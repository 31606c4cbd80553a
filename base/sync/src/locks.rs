//! Locks with a place in the [order](crate::lock_order). Each behaves as the lock of the same name
//! in [`shim`]; debug builds check the order before they take it.

use crate::held::{self, Held};
use crate::lock_order::LockClass;
use crate::shim;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::{Duration, Instant};

/// Fails, in debug builds, if the calling thread holds a lock under which no thread may wait. Call
/// it before a wait for anything but a [`Condvar`], which checks this itself.
#[inline(always)]
#[track_caller]
pub fn assert_may_wait() {
    held::assert_may_wait();
}

/// A mutex of class `C`.
#[repr(transparent)]
pub struct Mutex<T, C> {
    inner: shim::Mutex<T>,
    class: PhantomData<fn() -> C>,
}

/// Takes the lock, also after a thread has panicked while it held the lock: for data that is
/// consistent at each step that may panic.
#[inline]
#[track_caller]
pub fn lock<T, C: LockClass>(mutex: &Mutex<T, C>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A held [`Mutex`]. Dropping it unlocks.
#[must_use = "dropping it unlocks"]
pub struct MutexGuard<'a, T> {
    inner: shim::MutexGuard<'a, T>,
    held: Held,
}

impl<T, C: LockClass> Mutex<T, C> {
    /// A mutex around `value`.
    pub fn new(value: T) -> Self {
        Self {
            inner: shim::Mutex::new(value),
            class: PhantomData,
        }
    }

    /// Takes the lock.
    ///
    /// # Errors
    /// A thread has panicked while it held the lock. The error contains the guard.
    #[inline]
    #[track_caller]
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let (result, held) = Held::take::<C, _>(|| self.inner.lock());
        map(result, |inner| MutexGuard { inner, held })
    }

    /// The value, without the lock: no other thread can hold it.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.inner.get_mut()
    }

    /// Takes the lock if it is free. The order does not matter here, because the thread does not
    /// wait for the lock.
    ///
    /// # Errors
    /// The lock is not free; or as [`Mutex::lock`].
    #[inline]
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        let guard = |inner| MutexGuard {
            inner,
            held: Held::tried::<C>(),
        };
        match self.inner.try_lock() {
            Ok(inner) => Ok(guard(inner)),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(error)) => Err(TryLockError::Poisoned(PoisonError::new(
                guard(error.into_inner()),
            ))),
        }
    }
}

impl<T: Default, C: LockClass> Default for Mutex<T, C> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A reader-writer lock of class `C`.
#[repr(transparent)]
pub struct RwLock<T, C> {
    inner: shim::RwLock<T>,
    class: PhantomData<fn() -> C>,
}

/// An [`RwLock`] held by a reader. Dropping it unlocks.
#[must_use = "dropping it unlocks"]
pub struct RwLockReadGuard<'a, T> {
    inner: shim::RwLockReadGuard<'a, T>,
    _held: Held,
}

/// An [`RwLock`] held by its writer. Dropping it unlocks.
#[must_use = "dropping it unlocks"]
pub struct RwLockWriteGuard<'a, T> {
    inner: shim::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T, C: LockClass> RwLock<T, C> {
    /// A lock around `value`.
    pub fn new(value: T) -> Self {
        Self {
            inner: shim::RwLock::new(value),
            class: PhantomData,
        }
    }

    /// Takes the lock for reading, together with other readers.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[inline]
    #[track_caller]
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        let (result, _held) = Held::take::<C, _>(|| self.inner.read());
        map(result, |inner| RwLockReadGuard { inner, _held })
    }

    /// Takes the lock for reading if no thread holds it alone, or waits to do so. As
    /// [`Mutex::try_lock`] otherwise.
    ///
    /// # Errors
    /// The lock is not free; or as [`Mutex::lock`].
    #[inline]
    pub fn try_read(&self) -> TryLockResult<RwLockReadGuard<'_, T>> {
        let guard = |inner| RwLockReadGuard {
            inner,
            _held: Held::tried::<C>(),
        };
        match self.inner.try_read() {
            Ok(inner) => Ok(guard(inner)),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(error)) => Err(TryLockError::Poisoned(PoisonError::new(
                guard(error.into_inner()),
            ))),
        }
    }

    /// Takes the lock alone.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[inline]
    #[track_caller]
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        let (result, _held) = Held::take::<C, _>(|| self.inner.write());
        map(result, |inner| RwLockWriteGuard { inner, _held })
    }
}

impl<T: Default, C: LockClass> Default for RwLock<T, C> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A condition variable for a [`Mutex`]. A waiting thread holds no lock but that mutex and locks of
/// ranks that [may wait](crate::lock_order::Rank::may_wait).
#[derive(Default)]
pub struct Condvar(shim::Condvar);

impl Condvar {
    /// A condition variable on which no thread waits.
    pub fn new() -> Self {
        Self(shim::Condvar::new())
    }

    /// Wakes one of the waiting threads.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Releases the mutex, waits for a notification, and takes the mutex again. May return without
    /// a notification.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[track_caller]
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let MutexGuard { inner, held } = guard;
        let (result, held) = held.wait(|| self.0.wait(inner));
        map(result, |inner| MutexGuard { inner, held })
    }

    /// As [`Condvar::wait`], for at most `patience`. The caller checks the condition again.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[track_caller]
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        patience: Duration,
    ) -> LockResult<MutexGuard<'a, T>> {
        let MutexGuard { inner, held } = guard;
        let (result, held) = held.wait(|| self.0.wait_timeout(inner, patience));
        map(result, |(inner, _)| MutexGuard { inner, held })
    }

    /// Waits until `waits` is false.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[track_caller]
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut waits: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while waits(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// Waits until `waits` is false, but for at most `patience`. The caller checks `waits` again.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    #[track_caller]
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        patience: Duration,
        mut waits: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        let start = Instant::now();
        while waits(&mut guard) {
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            guard = self.wait_timeout(guard, left)?;
        }
        Ok(guard)
    }
}

fn map<G, H>(result: LockResult<G>, guard: impl FnOnce(G) -> H) -> LockResult<H> {
    match result {
        Ok(inner) => Ok(guard(inner)),
        Err(error) => Err(PoisonError::new(guard(error.into_inner()))),
    }
}
