//! `lacuna pager-test`: rules for a page-fault handler, or for daemons that save and restore VMs.
//! They may be of another project.

use crate::args::{CHECK_ONE, PagerTestArgs};
use crate::exit::Exit;
use crate::lab::{Results, reported};
use crate::output::complain;
use crate::progress;
use crate::signals::Signals;
use crate::size::Size;
use crate::test::Tested;
use lacuna_lab::result::to_json;
use lacuna_pager_test::{
    Daemons, Image, Report, Reports, Rule, Suite, SuiteError, Target, all, check_one, chosen,
};
use std::path::Path;
use std::process::Command;

/// Checks the rules that `args` choose, and prints the result.
pub fn pager_test(args: &PagerTestArgs) -> Exit {
    let done = |done: Result<(), String>| match done {
        Ok(()) => Exit::Done,
        Err(why) => {
            complain(&why);
            Exit::Usage
        }
    };
    if let Some(order) = &args.check_one {
        return done(check_one(order));
    }
    if let Some(make) = &args.make_memory {
        return done(make_memory(make));
    }
    let checked = match Checked::of(args) {
        Ok(checked) => checked,
        Err(why) => return done(Err(why)),
    };
    let rules = match chosen(&args.rules, &checked.targets()) {
        Ok(rules) => rules,
        Err(name) => {
            let names: Vec<&str> = all().map(|rule| rule.name).collect();
            return done(Err(format!(
                "{name} is no rule; there are: {}",
                names.join(", ")
            )));
        }
    };
    reported(&args.output, |signals| run(args, &checked, &rules, signals))
}

/// The programs that a run checks.
enum Checked {
    Handler(Box<Suite>),
    Daemons(Daemons),
}

impl Checked {
    fn of(args: &PagerTestArgs) -> Result<Self, String> {
        let daemons = [
            (Target::SaveDaemon, &args.save_daemon),
            (Target::RestoreDaemon, &args.restore_daemon),
            (Target::OnDemandDaemon, &args.on_demand_daemon),
        ];
        let given = |(target, command): (_, &Option<String>)| Some((target, command.clone()?));
        let daemons: Vec<_> = daemons.into_iter().filter_map(given).collect();
        if !daemons.is_empty() {
            return Daemons::new(daemons, args.timeout).map(Self::Daemons);
        }
        Ok(Self::Handler(Box::new(Suite {
            socket: args.socket.clone().unwrap_or_default(),
            memory: args.memory.clone().unwrap_or_default(),
            timeout: args.timeout,
            restart: args.restart.clone(),
            again: Box::new(|order| {
                let mut command = Command::new("/proc/self/exe");
                command.args(["pager-test", &format!("--{CHECK_ONE}"), order]);
                command
            }),
        })))
    }

    fn targets(&self) -> Vec<Target> {
        match self {
            Self::Handler(_) => vec![Target::Handler],
            Self::Daemons(daemons) => daemons.targets(),
        }
    }

    /// Checks what the suite itself needs.
    fn check_host(&self) -> Result<(), SuiteError> {
        match self {
            Self::Handler(suite) => suite.check_socket().and_then(|()| suite.check_host()),
            Self::Daemons(_) => Ok(()),
        }
    }

    fn run(&self, rule: &'static Rule) -> Result<Report, SuiteError> {
        match self {
            Self::Handler(suite) => suite.run(rule),
            Self::Daemons(daemons) => Ok(daemons.run(rule)),
        }
    }
}

fn make_memory(make: &[String]) -> Result<(), String> {
    let [file, size] = make else {
        return Err("--make-memory needs a file and a size".into());
    };
    let size: Size = size
        .parse()
        .map_err(|error| format!("--make-memory: {error}"))?;
    Image::make(Path::new(file), size.0).map_err(|error| error.to_string())
}

fn run(
    args: &PagerTestArgs,
    tested: &Checked,
    rules: &[&'static Rule],
    signals: &Signals,
) -> Results {
    let live = progress::line(args.output.quiet);
    let (mut reports, mut ended_early) = (Reports::default(), None);
    let mut exit = Exit::Done;
    let mut checked = tested.check_host();
    for rule in rules.iter().copied() {
        if checked.is_err() {
            break;
        }
        live.set_message(rule.name);
        live.tick();
        let report = tested.run(rule);
        // The rule's process gets the signals of a terminal too.
        if let Some(signal) = signals.caught() {
            exit = Exit::Interrupted(signal);
            ended_early = Some(format!("ended by {signal}"));
            break;
        }
        checked = report.map(|report| reports.0.push(report));
    }
    live.finish_and_clear();
    if let Err(error) = checked {
        complain(&error.to_string());
        exit = Exit::Host;
        ended_early = Some(error.to_string());
    }
    if exit == Exit::Done && reports.failed() > 0 {
        exit = Exit::GuestFailed;
    }
    let text = reports.to_string();
    (exit, text, to_json(&Tested::of(ended_early, Some(reports))))
}
