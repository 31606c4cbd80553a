//! Fetches pages from a source, many at a time, for a thread that waits for them.

use lacuna_addr::PAGE_SIZE;
use lacuna_source::{Answer, Failure, PageRequest, PageRequester, PageSource, SourcePage};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

/// The most pages that a fetch has under way: as many as a memory file reads at once.
const WINDOW: usize = 64;

/// The content of a page, or why there is none.
pub type Content = Result<Box<[u8; PAGE_SIZE]>, String>;

/// Fetches `pages` from `source`. Calls `each` for each page, in any order, on this thread. The
/// first error of `each` ends the fetch.
///
/// # Errors
/// As `each`.
pub fn fetch<E>(
    source: &dyn PageSource,
    mut pages: impl Iterator<Item = u64>,
    mut each: impl FnMut(u64, Content) -> Result<(), E>,
) -> Result<(), E> {
    let (sender, answers) = channel();
    let mut under_way = 0;
    loop {
        while under_way < WINDOW {
            let Some(page) = pages.next() else { break };
            let asker = Arc::new(Asker {
                sender: sender.clone(),
                is_answered: AtomicBool::new(false),
            });
            PageRequest::new(asker, page, SourcePage(page)).send(source);
            under_way += 1;
        }
        if under_way == 0 {
            return Ok(());
        }
        let (page, content) = answers.recv().expect("this thread has a sender");
        under_way -= 1;
        each(page, content)?;
    }
}

/// The requester of one page.
struct Asker {
    sender: Sender<(u64, Content)>,
    is_answered: AtomicBool,
}

impl PageRequester for Asker {
    fn answer(&self, page: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        // A request fails at its end, also after an answer.
        if self.is_answered.swap(true, Ordering::AcqRel) {
            return Answer::Late;
        }
        let content = match content {
            Ok(content) => Ok(Box::new(*content)),
            Err(failure) => Err(failure.to_string()),
        };
        match self.sender.send((page, content)) {
            Ok(()) => Answer::Taken,
            // The fetch has failed meanwhile.
            Err(_) => Answer::Late,
        }
    }
}
