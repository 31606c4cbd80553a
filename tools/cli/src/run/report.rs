//! The report of a run: the sample before it, and its result.

use super::summary::summary;
use super::{Start, profile};
use crate::args::{MODES, RunArgs, SwapSpec, THP};
use crate::exit::Exit;
use crate::pages::GuestPages;
use crate::sample::{Received, RunOptions, RunReport, RunSample};
use crate::signals::Signal;
use crate::size::Size;
use lacuna::memory::{HugePages, MemoryKind};
use lacuna::{Apf, Builder, Ending, Vm as _};
use lacuna_control::{PageCounts as _, missing_in_words};
use lacuna_lab::options::{KINDS, name_of};
use lacuna_lab::report::time;
use std::sync::Arc;
use std::time::Duration;

/// The sample before a run has begun, with the parts that this backend and these options have.
pub(super) fn at_first<B: Builder>(args: &RunArgs, pages: Option<&Arc<GuestPages>>) -> RunSample {
    let soft = B::Vm::BACKEND == lacuna::Backend::Soft;
    let huge = args.on.thp.unwrap_or_default() != HugePages::Never;
    RunSample {
        memory_bytes: args.memory.0,
        budget_bytes: limit(args).0,
        huge: (soft && huge).then(Default::default),
        apf: (soft && args.apf == Apf::On).then(Default::default),
        pages: pages.map(|pages| pages.pages(Duration::ZERO)),
        ..RunSample::default()
    }
}

/// How much of the guest's memory may be resident: all of Linux memory without a limit.
fn limit(args: &RunArgs) -> Size {
    match args.kind() != MemoryKind::Budget {
        true => args.linux_limit().unwrap_or(args.memory),
        false => args.budget(),
    }
}

/// The result for people.
pub(super) fn in_words(report: &RunReport) -> String {
    let mut words = summary(&report.last);
    if let Some(hash) = &report.trace_hash {
        words.push_str(&format!("trace     {hash}\n"));
    }
    if let Some(restored) = &report.restored {
        words.push_str(&format!(
            "restored  {} pages from {} in {:.1} s{}\n",
            restored.pages,
            restored.from,
            restored.seconds,
            if restored.in_place { ", in place" } else { "" }
        ));
        if let Some(lazy) = &restored.lazy {
            words.push_str(&lazy.text());
        }
    }
    if let Some(received) = &report.received {
        words.push_str(&received_in_words(received));
    }
    if let Some(migrated) = &report.migrated {
        words.push_str(&crate::migrate::summary(migrated));
    }
    if let Some(rows) = &report.profile {
        words.push_str(&profile::text(rows));
    }
    words.push_str(&format!("outcome   {}\n", report.outcome));
    words
}

fn received_in_words(received: &Received) -> String {
    let Received {
        at,
        mode,
        pages,
        late,
        missing,
        ranges,
        cuts,
        bytes,
        again,
        downtime_us,
        seconds,
    } = received;
    let mut text = format!(
        "received  {pages} pages at {at} in {seconds:.1} s, and {late} after the guest ({}), \
         {again} of them again; {} over the connections; downtime {}",
        name_of(&MODES, mode),
        Size(*bytes),
        time(downtime_us.saturating_mul(1000)),
    );
    if *cuts > 0 {
        text.push_str(&format!("; {cuts} cuts"));
    }
    if *missing > 0 {
        let missing = missing_in_words(*missing, ranges);
        text.push_str(&format!("; these have never come: {missing}"));
    }
    text + "\n"
}

/// The requests for the end of a run.
#[derive(Clone, Default)]
pub struct Asked {
    /// The signal during the run.
    pub signal: Option<Signal>,
    /// Whether a client of the control socket has stopped it.
    pub stopped: bool,
    /// The outcome of a moved guest.
    pub moved: Option<String>,
}

/// The exit code and the words for an ending.
pub fn verdict(ending: &Ending, asked: &Asked) -> (Exit, String) {
    match (ending, asked.signal) {
        (Ending::Exited(0), _) => (Exit::Done, "done".into()),
        (Ending::Exited(code), _) => (
            Exit::GuestFailed,
            format!("the guest failed with code {code}"),
        ),
        (Ending::PoweredOff, _) => (Exit::Done, ending.to_string()),
        (Ending::Failed(error), _) => (error.kind().into(), error.to_string()),
        (Ending::Device(error), _) => (error.kind().into(), error.to_string()),
        (Ending::Stopped, _) if let Some(moved) = &asked.moved => (Exit::Done, moved.clone()),
        (Ending::Stopped, Some(signal)) => (
            Exit::Interrupted(signal),
            format!("interrupted by {signal} before the guest was done"),
        ),
        (Ending::Stopped, None) if asked.stopped => (
            Exit::Stopped,
            "stopped through its control socket before the guest was done".into(),
        ),
        (Ending::Stopped, None) => (
            Exit::GuestFailed,
            "stopped before the guest was done".into(),
        ),
        _ => (Exit::GuestFailed, ending.to_string()),
    }
}

/// The options, defaults included.
pub(super) fn options<B: Builder>(args: &RunArgs, builder: &B, start: Start<'_>) -> RunOptions {
    let soft = B::Vm::BACKEND == lacuna::Backend::Soft;
    let swap = args.on.swap.as_ref().map(ToString::to_string);
    RunOptions {
        image: args.image.clone(),
        backend: B::Vm::BACKEND.name().into(),
        memory_bytes: args.memory.0,
        memory_kind: name_of(&KINDS, &args.kind()).into(),
        resident_bytes: limit(args).0,
        vcpus: args.vcpus,
        swap: swap.unwrap_or_else(|| match soft {
            true => SwapSpec::default().to_string(),
            false => "mem".into(),
        }),
        apf: args.apf == Apf::On,
        thp: name_of(&THP, &args.on.thp.unwrap_or_default()).into(),
        pages_from: args.pages_from.as_ref().map(ToString::to_string),
        exit_on_missing: args.exit_on_missing,
        seed: args.seed,
        append: match start {
            Start::Image(_) => builder.full_command_line(),
            // The guest keeps the command line with which it was started.
            _ => String::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna::Gpa;
    use lacuna::VcpuError;

    #[test]
    fn an_ending_has_the_code_of_its_cause() {
        let (vcpu, cause) = (0, String::from("the device says so"));
        let lost = VcpuError::PageLost {
            vcpu,
            gpa: Gpa::truncate(0x1000),
            cause: cause.clone(),
        };
        let no_memory = VcpuError::NoMemory {
            vcpu,
            cause: cause.clone(),
        };
        let signal = Some(Signal::Interrupt);
        for (ending, signal, code, word) in [
            (Ending::Exited(0), None, 0, "done"),
            (Ending::Exited(0), signal, 0, "done"),
            (Ending::Exited(7), None, 1, "code 7"),
            (Ending::Shutdown("triple fault".into()), None, 1, "triple"),
            (Ending::PoweredOff, None, 0, "machine off"),
            (Ending::Reset, None, 1, "reset"),
            (Ending::Failed(VcpuError::Hang), None, 1, "hangs"),
            (Ending::Failed(lost), None, 3, "page 0x1000 is lost"),
            (Ending::Failed(no_memory), None, 3, "no memory"),
            (
                Ending::Failed(VcpuError::Host { vcpu, cause }),
                None,
                3,
                "says so",
            ),
            (Ending::Stopped, signal, 130, "interrupted by SIGINT"),
            (Ending::Stopped, Some(Signal::Terminate), 143, "by SIGTERM"),
        ] {
            let stopped = false;
            let moved = None;
            let asked = Asked {
                signal,
                stopped,
                moved,
            };
            let (exit, text) = verdict(&ending, &asked);
            assert_eq!(exit.code(), code, "{ending:?}");
            assert!(text.contains(word), "{text}");
        }
        for (ending, code) in [(Ending::Stopped, 4), (Ending::Exited(0), 0)] {
            let asked = Asked {
                stopped: true,
                ..Asked::default()
            };
            assert_eq!(verdict(&ending, &asked).0.code(), code);
        }
        // A signal arrives after the guest has been handed over.
        let asked = Asked {
            signal,
            moved: Some("moved to tcp:h:1".into()),
            ..Asked::default()
        };
        let (exit, text) = verdict(&Ending::Stopped, &asked);
        assert_eq!((exit.code(), text.as_str()), (0, "moved to tcp:h:1"));
    }
}
