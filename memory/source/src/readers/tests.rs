//! Failing reads, tried again until the deadline, under each policy.

use super::*;
use crate::policy::{Policy, WhenGone};
use crate::{Answer, Failure, PageRequest, PageRequester, SourcePage};
use std::sync::Mutex as StdMutex;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Fails the first `failures` reads of pages before [`GOOD`].
struct Failing {
    failures: usize,
    tries: AtomicUsize,
    error: ReadError,
    outage: Outage,
}

const GOOD: u64 = 100;

impl ReadPages for Failing {
    type Memo = ();

    fn read(&self, page: u64, _: &mut (), into: &mut [u8; PAGE_SIZE]) -> Result<(), ReadError> {
        if page < GOOD && self.tries.fetch_add(1, Ordering::Relaxed) < self.failures {
            return Err(self.error.clone());
        }
        into.fill(7);
        Ok(())
    }

    fn outage(&self) -> &Outage {
        &self.outage
    }
}

/// Sends the outcome of each answer.
struct Answers(StdMutex<Sender<(u64, Result<u8, String>)>>);

impl PageRequester for Answers {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let content = content
            .map(|page| page[0])
            .map_err(|failure| failure.to_string());
        let _ = self.0.lock().unwrap().send((key, content));
        Answer::Taken
    }
}

type Answered = Receiver<(u64, Result<u8, String>)>;

fn ask(readers: &Readers<Failing>, page: u64) -> Answered {
    let (sender, answers) = channel();
    let requester = Arc::new(Answers(StdMutex::new(sender)));
    let request = PageRequest::new(requester, page, SourcePage(page));
    readers.read(Asked::now(request));
    answers
}

fn readers(failures: usize, error: ReadError, policy: Policy) -> Readers<Failing> {
    let failing = Failing {
        failures,
        tries: AtomicUsize::new(0),
        error,
        outage: Outage::new(policy),
    };
    Readers::new(Arc::new(failing)).unwrap()
}

fn again() -> ReadError {
    ReadError::Again("input/output error".into())
}

fn policy(patience: Duration, when_gone: WhenGone) -> Policy {
    Policy {
        patience,
        when_gone,
    }
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn a_read_that_fails_is_tried_again_until_it_succeeds() {
    let readers = readers(3, again(), policy(LONG, WhenGone::Poison));
    assert_eq!(ask(&readers, 1).recv(), Ok((1, Ok(7))));
    assert_eq!(readers.shared.pages.tries.load(Ordering::Relaxed), 4);
}

#[test]
fn an_error_that_stays_is_not_tried_again() {
    let error = ReadError::Never("truncated".into());
    let readers = readers(usize::MAX, error, policy(LONG, WhenGone::Poison));
    assert_eq!(ask(&readers, 1).recv(), Ok((1, Err("truncated".into()))));
    assert_eq!(readers.shared.pages.tries.load(Ordering::Relaxed), 1);
}

#[test]
fn poison_loses_the_page_after_the_deadline() {
    let readers = readers(
        usize::MAX,
        again(),
        policy(Duration::ZERO, WhenGone::Poison),
    );
    let lost = Err("input/output error".to_owned());
    assert_eq!(ask(&readers, 1).recv(), Ok((1, lost)));
}

#[test]
fn kill_calls_the_function_once_and_before_the_pages_are_lost() {
    let (sender, reasons) = channel();
    let sender = StdMutex::new(sender);
    let kill = WhenGone::Kill(Arc::new(move |reason: &str| {
        sender.lock().unwrap().send(reason.to_owned()).unwrap();
    }));
    let readers = readers(usize::MAX, again(), policy(Duration::ZERO, kill));
    let answers: Vec<_> = (0..20).map(|page| ask(&readers, page)).collect();
    for (page, answer) in (0..).zip(answers) {
        let lost = Err("input/output error".to_owned());
        assert_eq!(answer.recv(), Ok((page, lost)));
        assert_eq!(reasons.try_recv().is_ok(), page == 0);
    }
}

#[test]
fn held_pages_stop_no_other_page_and_fail_at_the_end() {
    let readers = readers(usize::MAX, again(), policy(Duration::ZERO, WhenGone::Hold));
    // More requests than threads: a thread that waited for one request would serve no other.
    let held: Vec<_> = (0..2 * THREADS as u64)
        .map(|page| ask(&readers, page))
        .collect();
    assert_eq!(ask(&readers, GOOD).recv(), Ok((GOOD, Ok(7))));
    assert!(held.iter().all(|answer| answer.try_recv().is_err()));
    drop(readers);
    for (page, answer) in (0..).zip(held) {
        assert_eq!(
            answer.recv(),
            Ok((page, Err("it dropped the request".into())))
        );
    }
}
