//! A test reports that it does not run.

use crate::record::{Skipped, folder};
use std::fmt::Display;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::thread;

/// Records that the calling test does not run, or runs only in part, and the reason.
#[track_caller]
pub fn skip(why: impl Display) {
    let location = Location::caller();
    let thread = thread::current();
    // The harness names a test's thread after the test. For another thread, the call's place in
    // the source is recorded.
    let test = match thread.name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => format!("{}:{}", location.file(), location.line()),
    };
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "?".into());
    let skipped = Skipped {
        test: format!("{package} {test}"),
        why: why
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" "),
    };
    // This is not `eprintln`, because the harness would keep its output.
    let _ = writeln!(io::stderr(), "skipped: {}: {}", skipped.test, skipped.why);
    if let Some(folder) = folder() {
        skipped
            .record(&folder)
            .unwrap_or_else(|error| panic!("cannot record a skipped test: {error}"));
    }
}

/// The payload of [`skip_test`]'s unwinding.
struct TestSkipped;

/// Records that the calling test does not run, with the reason, and ends it here as a success.
///
/// The test must have the attribute [`test`](crate::test). A thread of the test may call this too,
/// if the test passes its panic on.
#[track_caller]
pub fn skip_test(why: impl Display) -> ! {
    skip(why);
    // This is no panic, because the hook would print a message and a trace.
    resume_unwind(Box::new(TestSkipped))
}

/// Calls a test's body, which [`skip_test`] may end.
#[doc(hidden)]
pub fn run(body: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(body))
        && !payload.is::<TestSkipped>()
    {
        resume_unwind(payload);
    }
}
